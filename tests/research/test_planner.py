"""1. Each kind of question is recognised, with its settings. Unknown words are listed, unknown topics refused.
2. Arms differ in the compared setting, at an equal number of samples, and tune interacting settings. Claims have the
   expected sign.
3. A file can describe any comparison. Its errors are named.
4. Every setting of the priors exists, a server accepts its values, and each of its topics gives a plan.
5. The cost is that of the procedure. A plan beyond the budget is refused. The page shows all of this.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyLog
from agentjet.research.models import Subject
from agentjet.research.planner.plan import plan, read_space, runs_of
from agentjet.research.planner.priors import base_value, check_job, knob, priors
from agentjet.research.planner.topics import TopicKind, parse_topic
from agentjet.research.scheduler import conduct, estimate_cost
from tests.research.world import STUDY, Formula
from tests.setting_names import recipe_parameters, setting_names

SUBJECT = Subject("tiny", "agent.py:agent", "tasks.jsonl", "held_out.jsonl", steps=30)


@pytest.mark.parametrize(
    ("topic", "kind", "settings", "ignored"),
    [
        ("Which learning rate is best?", "sweep", ["job.optimizer.lr"], []),
        ("a sweep of lr and beta2", "sweep", ["job.optimizer.lr", "job.optimizer.beta2"], []),
        ("ablation: KL penalty, dual clip", "ablation", ["job.recipe.kl_coef", "job.recipe.loss.dual_clip"], []),
        ("GRPO vs RLOO on moonlight", "a_against_b", ["job.recipe.name"], ["moonlight"]),
        ("does dividing by the group's standard deviation help", "a_against_b", ["job.recipe.name"], []),
        ("Does a KL penalty help?", "a_against_b", ["job.recipe.kl_coef"], []),
        ("lr 1e-5 against 1e-4", "a_against_b", ["job.optimizer.lr"], []),
        ("how does the group size scale", "scaling", ["job.group_size"], []),
        ("batch size", "scaling", ["job.batch_size"], []),
        ("dynamic sampling", "a_against_b", ["job.recipe.drop_zero_variance"], []),
        ("why does my run collapse?", "diagnosis", [], ["run"]),
    ],
)
def test_topics_are_understood(topic: str, kind: TopicKind, settings: list[str], ignored: list[str]) -> None:
    found = parse_topic(topic)
    assert (found.kind, found.settings, list(found.ignored)) == (kind, settings, ignored)


@pytest.mark.parametrize(
    ("topic", "named"),
    [
        ("learnin rate", "'learning rate'"),
        ("is the moon larger than cheese", "--space"),
        ("a length penalty", "the agent of each arm"),
        ("kl penalty -1 vs 5", "kl_coef = -1.0: give a value from 0 to 10"),
        ("group size 2.5 vs 4", "job.group_size = 2.5: give a whole number"),
        ("group size 3 vs 5", "job.batch_size would have to be 21.3"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_way_out(topic: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(topic, budget="100")


def test_arms_tune_what_interacts_with_the_question() -> None:
    made = plan("grpo vs dr_grpo", budget="100", subject=replace(SUBJECT, settings={"job.optimizer.lr": 1e-3}))
    assert [dict(arm.changes) for arm in made.study.arms] == [
        {"job.recipe.name": "grpo"},
        {"job.recipe.name": "dr_grpo"},
    ]
    assert {arm.nuisance for arm in made.study.arms} == {(knob("job.optimizer.lr", {"job.optimizer.lr": 1e-3}),)}
    assert made.study.arms[0].nuisance[0].values == (1.1e-4, 3.3e-4, 1e-3, 3e-3, 9e-3)
    assert [(claim.sign, "scales the step" in claim.why) for claim in made.study.hypotheses] == [("0", True)]


def test_more_of_a_group_is_at_as_many_samples() -> None:
    made = plan("scaling of the group size", budget="200", subject=SUBJECT)
    samples = {int(arm.changes["job.group_size"]) * int(arm.changes["job.batch_size"]) for arm in made.study.arms}
    assert samples == {64}
    assert [(h.arm, h.against) for h in made.study.hypotheses] == [("4", "2"), ("8", "4"), ("16", "8"), ("32", "16")]
    left_out = plan("group size 4 vs 6 vs 16", budget="200", subject=SUBJECT)
    assert [arm.name for arm in left_out.study.arms] == ["4", "16"]
    assert "job.group_size = 6 is left out" in left_out.notes[0]


def test_a_claim_points_where_the_difference_is_expected() -> None:
    [claim] = plan("staleness 0 vs 4", budget="100").study.hypotheses
    assert (claim.arm, claim.against) == ("0", "4"), "less of it is expected to score higher"
    [claim] = plan("does gradient clipping help", budget="100").study.hypotheses
    assert (claim.arm, claim.against) == ("with gradient clipping", "without")


def test_a_sweep_holds_the_present_value_against_the_best_of_several() -> None:
    present, tuned = plan("tune the learning rate", budget="100").study.arms
    assert (dict(present.changes), present.nuisance) == ({"job.optimizer.lr": 2e-5}, ())
    assert [tried.name for tried in tuned.nuisance] == ["job.optimizer.lr"]


def test_a_schedule_spans_the_run() -> None:
    made = plan("linear or cosine decay", budget="200", subject=SUBJECT)
    assert {arm.changes["job.optimizer.total_steps"] for arm in made.study.arms} == {30}


@pytest.mark.parametrize("name", list(priors()))
def test_every_setting_of_the_priors_makes_a_plan(name: str) -> None:
    prior = priors()[name]
    assert name in {*setting_names(), *recipe_parameters()}
    assert set(prior.tune) | set(prior.hold) | set(prior.spans) <= set(setting_names())
    assert prior.refusal(name, base_value(name, {})) is None
    for value in [prior.typed(v) for v in (prior.on, prior.off) if v is not None]:
        check_job({name: value})
        assert prior.refusal(name, value) is None
    assert all(prior.refusal(name, value) is None for value in prior.tried(base_value(name, {})))
    try:
        made = plan(prior.says[0], budget="1000", subject=SUBJECT)
    except ConfigError as error:
        assert "name the values to compare" in str(error)
    else:
        assert made.study.hypotheses and prior.says[0] in made.to_markdown()


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
        plan("a or b", budget="100", subject=SUBJECT, space=read_space(file))


def test_the_model_is_no_setting_of_the_base() -> None:
    with pytest.raises(ConfigError, match=r"^model\.name = 'other': all arms run the study's --model"):
        plan("does a kl penalty help?", budget="100", subject=replace(SUBJECT, settings={"model.name": "other"}))
    check_job({"model.threads": 1, "server.port": 8401})


def test_an_error_of_a_space_file_names_no_option_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text("[arms.a]\n[arms.b]\nchanges = { 'job.batch_size' = 0 }\n")
    with pytest.raises(ConfigError, match=r"job\.batch_size = 0") as refused:
        plan("a or b", budget="100", subject=SUBJECT, space=read_space(file))
    assert "--set" not in str(refused.value)


def test_numbers_outside_their_range_are_refused() -> None:
    assert "from 1e-08 to 0.1" in str(priors()["job.optimizer.lr"].refusal("lr", 5.0))
    assert "whole" in str(priors()["job.group_size"].refusal("n", 2.5))
    assert "one of grpo, dr_grpo, rloo" in str(priors()["job.recipe.name"].refusal("a", "ppo"))
    assert "true or false" in str(priors()["job.recipe.by_role"].refusal("r", 1))
    assert "a number" in str(priors()["job.optimizer.lr"].refusal("lr", "high"))


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
low = 1e-6
high = 1e-3

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
    made = plan("Do short answers pay?", budget="100", space=space, folder=tmp_path, subject=SUBJECT)
    base, short, fast = made.study.arms
    assert made.study.subject and made.study.subject.agent_of("short") == f"{tmp_path / 'short.py'}:agent"
    assert made.study.subject.agent_of("base") == SUBJECT.agent
    assert short.code and not base.code
    assert (len(base.nuisance[0].values), base.nuisance[0].values[0], base.nuisance[0].values[-1]) == (25, 1e-6, 1e-3)
    assert fast.nuisance == (), "what an arm sets it does not tune"
    assert (made.study.sesoi, made.study.looks, made.study.metric) == (0.05, (4, 6), "points")
    assert [(h.arm, h.against) for h in made.study.hypotheses] == [("short", "base")]
    page = made.to_markdown()
    assert "25 values from 1e-06 to 0.001" in page
    assert (
        f"| `{tmp_path / 'short.py'}:agent` |" in page and "25 values from 1e-06 to 0.001 | `agent.py:agent` |" in page
    )
    assert "Evaluator: `agent.py:agent`; it scores every arm." in page

    (tmp_path / "short.py").write_text("def agent(task, episode): return 1\n", encoding="utf-8")
    assert plan("x", budget="100", space=space, folder=tmp_path, subject=SUBJECT).study.arms[1].code != short.code


def test_whole_settings_are_tuned_over_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "space.toml"

    def tried(setting: str, values: str) -> tuple[float, ...]:
        path.write_text(f'[arms.a]\n[arms.b]\nchanges = {{"job.temperature" = 0.5}}\n[knobs."{setting}"]\n{values}\n')
        [knob] = plan("x", budget="200", space=read_space(path), subject=SUBJECT).study.arms[0].nuisance
        return knob.values

    assert tried("job.max_tokens", "low = 4\nhigh = 9") == (4, 5, 6, 7, 8, 9)
    many = tried("job.max_tokens", "low = 1000\nhigh = 9999")
    assert (len(many), many[0], many[-1]) == (25, 1000, 9999) and all(value == int(value) for value in many)
    assert len(tried("job.optimizer.lr", "low = 4\nhigh = 9")) == 25
    for values in ("values = [4, 4.5, 6]", "low = 4.5\nhigh = 9"):
        with pytest.raises(ConfigError, match=r"arm 'a': job\.max_tokens = 4\.5: .*integer"):
            tried("job.max_tokens", values)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("sesoi = 0.05", "sesio = 0.05", "sesio: unknown key; did you mean sesoi"),
        ("sesoi = 0.05", "sesoi = 0", "sesoi = 0: it must be above 0"),
        ("looks = [4, 6]", "looks = [4, 100000000]", "looks.1 = 100000000: it must be 1000 or less"),
        ("looks = [4, 6]", f"looks = {[*range(4, 40)]}", "looks = .*20 items or fewer"),
        ('why = "half', CLAIMED.format("short", "base"), "'short' and 'base' are compared twice, .* keep one"),
        ('why = "half', CLAIMED.format("base", "short"), "'base' and 'short' are compared twice"),
        ("low = 1e-6", "low = 1", "is not below high"),
        ("low = 1e-6", "low = 0.0", "has no logarithm"),
        ("low = 1e-6", "values = [1.0]", "either values or both low and high"),
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
        plan("x", budget="100", space=read_space(tmp_path / "space.toml"), folder=tmp_path, subject=SUBJECT)


# ---- price and page -------------------------------------------------------------------------------------------------


def test_a_rehearsal_costs_what_the_study_costs() -> None:
    cost = estimate_cost(STUDY)
    _, launcher = conduct(STUDY, StudyLog(), Formula())
    assert cost.least <= launcher.spending.total <= cost.most
    assert cost.most == 2 * 8 + 2 * 2 + 2 * 12, "both grids, a second seed of the finalists, the last look"


@pytest.mark.parametrize(
    ("budget", "runs"),
    [("60", 60.0), ("60 runs", 60.0), ("4h", 480.0), ("90m", 180.0), ("90 min", 180.0), ("0.5d", 1440.0)],
)
def test_budgets(budget: str, runs: float) -> None:
    assert runs_of(budget, run_seconds=60.0, servers=2) == runs


@pytest.mark.parametrize(
    ("budget", "named"),
    [("lots", "4h or 90m"), ("0", "give full runs"), ("-3", "give full runs"), ("4h", "duration of a run is unknown")],
)
def test_budgets_that_say_nothing(budget: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        runs_of(budget, run_seconds=None, servers=1)


def test_what_cannot_be_paid_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs at least 20\.2; give at least that, or have less tuned, in a"):
        plan("does a kl penalty help", budget="20")
    with pytest.raises(
        ConfigError,
        match=r"needs at least 47\.9; .*, or compare fewer than 5 arms or have less tuned, in a file: --space",
    ):
        plan("how does group size scale", budget="20")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("", ""),
        ("[arms.c]\n", ", or compare fewer than 3 arms, in the file"),
        ("[knobs.lr]\nvalues = [1, 2]\n", ", or have less tuned, in the file"),
    ],
)
def test_what_would_be_cheaper_can_be_done(tmp_path: Path, text: str, advice: str) -> None:
    path = tmp_path / "space.toml"
    path.write_text("[arms.a]\n[arms.b]\n" + text)
    with pytest.raises(ConfigError, match=rf"give at least that{advice}$"):
        plan("which?", budget="1", space=read_space(path))
    path.write_text("looks = [6, 8]\n[arms.a]\n[arms.b]\n")
    with pytest.raises(ConfigError, match=r"give at least that, or look before 6 seeds, in the file$"):
        plan("which?", budget="1", space=read_space(path))


def test_the_page_says_all_of_it() -> None:
    made = plan("Does a KL penalty help on moonlight?", budget="45m", subject=SUBJECT, run_seconds=90, servers=1)
    page = made.to_markdown()
    for said in (
        "# Does a KL penalty help on moonlight?",
        "“kl penalty” is `job.recipe.kl_coef`",
        "Not understood, so not part of the question: “moonlight”",
        "| with kl scores higher than without | nothing is known | confirmatory | holds the policy back",
        "| with kl | `job.recipe.kl_coef = 0.02` | – | `job.optimizer.lr`: 2.2e-06, 6.7e-06, 2e-05, 6e-05, ",
        "Smallest effect of interest: **0.02**",
        "looks at 4, 8, 12 an arm; alpha 0.05 in all",
        "Budget: **30 full runs**, 40% of it for confirming alone, which has what exploring leaves, too.",
        "The budget may run out before the last look",
        "At 90 s a run, 1 at a time, that is at most 0.8 h",
        f"Study `{made.study.id}`",
    ):
        assert said in page, said


def test_what_is_spoken_of_and_not_compared_stands_in_the_plan() -> None:
    page = plan("learning rate 1e-3 vs 1e-4 vs 1e-5 and batch size 4 vs 8", budget="200").to_markdown()
    assert "Note: job.batch_size is not varied" in page


def test_what_is_wrong_with_a_file_is_said_in_words(tmp_path: Path) -> None:
    for text, said in (
        ("[arms.a]\n[arms.b]\n[[hypotheses]]\narm = 'a'\n", r"hypotheses\.0\.against: is required"),
        ("alpha = 'x'\n[arms.a]\n[arms.b]\n", "alpha = 'x': it must be a number$"),
        ("[arms.a]\n[arms.b]\n[knobs.lr]\nlow = 1\n", r"knobs\.lr: give either values or both low and high"),
    ):
        (tmp_path / "space.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=said):
            read_space(tmp_path / "space.toml")
