"""1. A file describes any comparison. Its errors are named.
2. Arms cannot differ in settings that do not affect training. Their models are locked, too.
3. The cost is that of the procedure. A plan beyond the budget is refused. The page shows all of this.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog
from agentjet.research.models import Subject
from agentjet.research.plan import Space, check_job, plan, read_space
from agentjet.research.report import plan_page
from agentjet.research.scheduler import conduct, estimate_cost
from tests.research.world import STUDY, Formula

SUBJECT = Subject("tiny", "agent.py:agent", "tasks.jsonl", "held_out.jsonl", steps=30)
KL = Space.model_validate(
    {
        "arms": {
            "without": {"changes": {"job.recipe.kl_coef": 0}},
            "with kl": {"changes": {"job.recipe.kl_coef": 0.02}},
        },
        "knobs": {"job.optimizer.lr": {"values": [1e-5, 1e-4]}},
    }
)
"""A space as a Python object."""


@pytest.mark.parametrize(
    ("arm", "knobs", "said"),
    [
        (
            'changes = { "model.name" = "owner/other" }',
            "",
            r"arm 'b': model\.name = 'owner/other': all arms run",
        ),
        (
            'changes = { "model.path" = "other" }',
            "",
            r"arm 'b': model\.path = 'other': all arms run the study's --model",
        ),
        ('changes = { "model.threads" = 2 }', "", r"arm 'b': model\.threads = 2 belongs to the server"),
        ('changes = { "server.port" = 8401 }', "", r"arm 'b': server\.port = 8401 belongs to the server"),
        ("", '[knobs."model.threads"]\nvalues = [1, 2]', r"arm 'a': model\.threads = 1.0 belongs to the server"),
    ],
)
def test_what_arms_cannot_differ_in(tmp_path: Path, arm: str, knobs: str, said: str) -> None:
    file = tmp_path / "space.toml"
    file.write_text(f"[arms.a]\n[arms.b]\n{arm}\n{knobs}\n")
    with pytest.raises(ConfigError, match=said):
        plan("a or b", budget=100, subject=SUBJECT, space=read_space(file))


def test_the_model_is_no_setting_of_the_base() -> None:
    with pytest.raises(ConfigError, match=r"^model\.name = 'other': all arms run the study's --model"):
        plan("t", budget=100, space=KL, subject=replace(SUBJECT, settings={"model.name": "other"}))
    check_job({"model.threads": 1, "server.port": 8401})


@pytest.mark.parametrize(("size", "warns"), [(64, True), (8, False)])
def test_a_plan_warns_of_unequal_episodes(size: int, warns: bool, tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(f"[arms.a]\n[arms.b]\nchanges = {{ 'job.batch_size' = {size}, 'job.max_tokens' = 9 }}\n")
    page = plan_page(plan("a or b", budget=100, subject=SUBJECT, space=read_space(file)))
    assert ("“b” learns from 512 episodes a step, and “a” from 64, in equally many steps" in page) is warns


def test_an_error_of_a_space_file_names_no_option_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text("[arms.a]\n[arms.b]\nchanges = { 'job.batch_size' = 0 }\n")
    with pytest.raises(ConfigError, match=r"job\.batch_size = 0") as refused:
        plan("a or b", budget=100, subject=SUBJECT, space=read_space(file))
    assert "--set" not in str(refused.value)


# ---- a file ---------------------------------------------------------------------------------------------------------

SPACE = """
metric = "points"
sesoi = 0.05
looks = [4, 6]

[arms.base]
[arms.short]
agent = "short.py:agent"
changes = { "job.max_tokens" = 64 }
[arms.fast]
changes = { "job.optimizer.lr" = 1e-3 }

[knobs."job.optimizer.lr"]
values = [1e-3, 1e-6]

[[hypotheses]]
arm = "short"
against = "base"
sign = "+"
why = "half the tokens"
"""


CLAIMED = """[[hypotheses]]
arm = "{}"
against = "{}"
why = "half"""


def test_a_file_says_what_no_topic_can(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE, encoding="utf-8")
    (tmp_path / "short.py").write_text("def agent(task, episode): ...\n", encoding="utf-8")
    space = read_space(tmp_path / "space.toml")
    made = plan("Do short answers pay?", budget=100, space=space, folder=tmp_path, subject=SUBJECT)
    base, short, fast = made.arms
    assert made.subject and made.subject.agent_of("short") == f"{tmp_path / 'short.py'}:agent"
    assert made.subject.agent_of("base") == SUBJECT.agent
    assert short.code and not base.code
    assert base.nuisance[0].values == (1e-6, 1e-3)
    assert fast.nuisance == (), "what an arm sets it does not tune"
    assert (made.sesoi, made.looks, made.metric) == (0.05, (4, 6), "points")
    assert [(h.arm, h.against) for h in made.hypotheses] == [("short", "base")]
    page = plan_page(made)
    assert "job.optimizer.lr over 1e-6, 0.001" in page and f"| `{tmp_path / 'short.py'}:agent` |" in page

    (tmp_path / "short.py").write_text("def agent(task, episode): return 1\n", encoding="utf-8")
    assert plan("x", budget=100, space=space, folder=tmp_path, subject=SUBJECT).arms[1].code != short.code


def test_a_value_that_a_server_refuses_is_named(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"
    path.write_text('[arms.a]\n[arms.b]\n[knobs."job.max_tokens"]\nvalues = [4, 4.5, 6]\n')
    with pytest.raises(ConfigError, match=r"arm 'a': job\.max_tokens = 4\.5: .*integer"):
        plan("x", budget=200, space=read_space(path), subject=SUBJECT)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("sesoi = 0.05", "sesio = 0.05", "sesio: unknown key; did you mean sesoi"),
        ("sesoi = 0.05", "sesoi = 0", "sesoi = 0: input should be greater than 0"),
        ("looks = [4, 6]", "looks = [4, 100000000]", "looks.1 = 100000000: input should be less than or equal to 1000"),
        ("looks = [4, 6]", f"looks = {[*range(4, 40)]}", "looks = .*at most 20 items"),
        ('why = "half', CLAIMED.format("short", "base"), "'short' and 'base' are compared twice, .* keep one"),
        ('why = "half', CLAIMED.format("base", "short"), "'base' and 'short' are compared twice"),
        ("[arms.base]", "[arms.base", "not valid TOML"),
        ('agent = "short.py:agent"', 'agent = "long.py:agent"', "long.py:agent"),
        ('arm = "short"', 'arm = "tall"', "'tall' is not an arm"),
        ('"job.max_tokens" = 64', '"job.max_token" = 64', "did you mean job.max_tokens"),
        ('"job.max_tokens" = 64', '"job.seed" = 64', "seeds and lengths of trials are the study's"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    (tmp_path / "space.toml").write_text(SPACE.replace(old, new), encoding="utf-8")
    (tmp_path / "short.py").write_text("def agent(task, episode): ...\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=named):
        plan("x", budget=100, space=read_space(tmp_path / "space.toml"), folder=tmp_path, subject=SUBJECT)


# ---- price and page -------------------------------------------------------------------------------------------------


def test_the_estimate_contains_what_the_study_costs() -> None:
    cost = estimate_cost(STUDY)
    _, launcher = conduct(STUDY, StudyLog(), Formula())
    assert cost.least - 1e-9 <= launcher.spending.total <= cost.most
    assert cost.most == 2 * 8 + 2 * 2 + 2 * 12, "both grids, a second seed of the finalists, the last look"


def test_what_cannot_be_paid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs at least .*: give at least that, or fewer arms, knobs"):
        plan("does a kl penalty help", budget=5, space=KL, subject=SUBJECT)


def test_the_page_shows_the_plan() -> None:
    made = plan("Does a KL <b>penalty</b> help?", budget=30, space=KL, subject=SUBJECT)
    page = plan_page(made)
    for shown in (
        r"# Does a KL \<b\>penalty\</b\> help?",
        r"| with kl | `agent.py:agent` | job.recipe.kl_coef = 0.02 | job.optimizer.lr over 1e-5, 0.0001 |",
        "| smallest effect of interest | 0.02 |",
        "| looks, in seeds per arm | 4, 8, 12 |",
        "| budget, in full runs | 30, of which 40 % are reserved for confirming |",
        f"The plan is `{made.id}`",
    ):
        assert shown in page, page
    assert "## Answer" not in page and "## Every arm" not in page


ARMS = "[arms.a]\n[arms.b]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[arms.a]\n", "arms = {'a': {}}: dictionary should have at least 2 items"),
        ("sesoi = nan\n" + ARMS, "sesoi = nan: input should be a finite number"),
        ("looks = 3\n" + ARMS, "looks = 3: input should be a valid tuple"),
        ("looks = [4, 8.5]\n" + ARMS, "looks.1 = 8.5: input should be a valid integer"),
        (ARMS + "[arms.'*']\n", "= '*': string should match pattern"),
        (ARMS + "[arms.c]\nagent = 3\n", "arms.c.agent = 3: input should be a valid string"),
        (ARMS + "[arms.c]\nagnet = '3'\n", "arms.c.agnet: unknown key; did you mean agent?"),
        (
            ARMS + "[arms.c]\nchanges = { 'job.x' = [1] }\n",
            "arms.c.changes.job.x = [1]: it must be text, a number, true or",
        ),
        (ARMS + "[[hypotheses]]\narm = 'a'\n", "hypotheses.0.against: is required"),
        ("alpha = 'x'\n" + ARMS, "alpha = 'x': input should be a valid number"),
        (ARMS + "[knobs.lr]\nvalues = []\n", "knobs.lr.values = []: tuple should have at least 1 item"),
    ],
)
def test_a_file_is_refused_with_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_space(path)
