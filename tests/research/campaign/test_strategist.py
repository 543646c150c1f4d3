"""What is pinned: each edit finds its place and only that; signs follow from the facts; the table is sound."""

from __future__ import annotations

import string
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentjet.config import parse_config
from agentjet.research.campaign import strategist as edits
from agentjet.research.campaign.strategist import (
    Intervention,
    Strategist,
    View,
    facts_of,
    signs,
    table,
    unseen_fields,
)
from agentjet.research.diagnosis import SignRule
from agentjet.research.models import Outcome, Transcript

SUBJECT = 'agent = "agent.py:agent"\ntasks = "tasks.jsonl"\nevaluator = "judge.py:score"\n\n[settings]\n'


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("f(x, temperature=0.1)\n", "f(x)\n"),
        ("f(temperature=0.1, x=1)\n", "f(x=1)\n"),
        ("f(\n    x,\n    temperature=0.1,\n)\n", "f(\n    x,\n)\n"),
        ('d = {"a": 1, "temperature": 0.1}\n', 'd = {"a": 1}\n'),
        ('d = {"temperature": 0.1, "a": 1}\n', 'd = {"a": 1}\n'),
        ("s = 'é'; f(s, temperature=0.1)\n", "s = 'é'; f(s)\n"),
        ("WARM = 0.1\nf(x, temperature=WARM)\n", "WARM = 0.1\nf(x)\n"),
        ("f(x, temperature=episode.warm)\n", "f(x)\n"),
        ("f(x, **dict(temperature=1 + 1))\n", "f(x, **dict())\n"),
        ('d["temperature"] = WARM\nd["a"] = 1\n', 'pass\nd["a"] = 1\n'),
        ("def f(x, temperature=1):\n    g(x, temperature=temperature)\n", "def f(x, temperature=1):\n    g(x)\n"),
        (
            "def f(*, temperature):\n    g(temperature=1)\nf(temperature=2)\n",
            "def f(*, temperature):\n    g()\nf(temperature=2)\n",
        ),
        ("def f(**given):\n    g(**given)\nf(temperature=1)\n", "def f(**given):\n    g(**given)\nf()\n"),
        ('d = {"temperature": 1}\nf(temperature=d["temperature"])\n', 'd = {"temperature": 1}\nf()\n'),
        ("class C:\n    temperature: int\nc = C(temperature=1)\n", None),
        ("class A:\n    def f(self, temperature):\n        self.f(temperature=1)\n", None),
    ],
)
def test_an_argument_is_removed(source: str, wanted: str | None) -> None:
    files = {"subject.toml": SUBJECT, "agent.py": source}
    assert edits.remove_argument(files, "temperature") == ({"agent.py": wanted} if wanted else {})


def test_an_argument_is_removed_in_every_file_of_the_agent() -> None:
    """Also in another spelling. The evaluator's file is fixed, and others are not the agent's."""
    call = "f(max_completion_tokens=LIMIT)\n"
    imports = {"agent.py": "import talk, judge\ntalk.ask(max_tokens=3)\n", "talk.py": f"from lib.api import g\n{call}"}
    rest = {"lib/api.py": call, "judge.py": call, "tasks.py": call}
    changed = edits.remove_argument({"subject.toml": SUBJECT, **imports, **rest}, "max_tokens")
    agent = "import talk, judge\ntalk.ask()\n"
    assert changed == {"agent.py": agent, "talk.py": "from lib.api import g\nf()\n", "lib/api.py": "f()\n"}


@pytest.mark.parametrize("name", ["temperature", "max_tokens"])
@pytest.mark.parametrize("source", ["f(x, **load())\n", "def f(x, {0}):\n    g(x, {0})\nf(x, {0}=1)\n"])
def test_a_value_without_a_place_is_overridden(name: str, source: str) -> None:
    """In training. The agent's file stays."""
    files = {"subject.toml": SUBJECT, "agent.py": source.format(name)}
    assert edits.remove_argument(files, name) == {}
    signals = {f"overridden/{name}": (1.0,) * 6, "completion/truncated": (0.5,) * 6}
    for listed in ((), ("seed",)):
        shown = run(signals=signals, settings={"job.sampling.override": listed, "job.temperature": 1.0})
        view = View("t", shown, 1, set(), [], files, "")
        made = next(one for one in Strategist().propose(view, 6) if not isinstance(one, str) and " + " not in one.name)
        assert made.changes == {"job.sampling.override": (*listed, name)} and not made.patch
        assert Intervention.from_json(made.to_json()) == made
        parse_config(dict(made.changes))


AGENT = """def agent(item, episode):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Which? " + str(1)}]
    return episode.chat(messages)
"""


def test_fields_are_shown_in_the_users_message() -> None:
    files = {"subject.toml": SUBJECT, "agent.py": AGENT}
    changed = edits.show_fields(files, ["digits"])["agent.py"]
    space: dict[str, object] = {}
    exec(changed, space)
    seen: list[str] = []

    class Episode:
        def chat(self, messages: list[dict[str, str]]) -> None:
            seen.append(messages[1]["content"])

    class Item:
        payload = {"digits": "4 7"}  # noqa: RUF012

    space["agent"](Item(), Episode())  # type: ignore[operator]
    assert seen == ["Which? 1\ndigits: 4 7"]


def test_the_judges_reward_is_a_copy() -> None:
    files = {"subject.toml": SUBJECT, "agent.py": AGENT}
    changed = edits.judge_reward(files, "def score(task, messages): return 1.0\n")
    assert changed["judge_reward.py"].startswith("def score")
    assert 'reward = "judge_reward.py:score"\n[settings]' in changed["subject.toml"]
    assert edits.judge_reward({**files, **changed}, "x") == {}


def test_less_is_better_is_negated_for_training() -> None:
    files = {"subject.toml": f"best = 0\nworst = 10\n{SUBJECT}", "agent.py": AGENT}
    changed = edits.judge_reward(files, "def score(task, messages): return 3.0\n")
    space: dict[str, Any] = {}
    exec(changed["judge_reward.py"], space)
    assert 'reward = "judge_reward.py:negated"' in changed["subject.toml"] and space["negated"](None, []) == -3.0
    assert edits.judge_reward({**files, **changed}, "x") == {}


def test_tasks_that_never_differ_are_left_out() -> None:
    rows = "".join(f'{{"id": "t{i}"}}\n' for i in range(8))
    files = {"subject.toml": SUBJECT, "tasks.jsonl": rows}
    by_task = {f"t{i}": (0.0, 1.0 if i < 5 else 0.0, 8) for i in range(8)}
    assert edits.keep_mixed(files, by_task)["tasks.jsonl"].count("\n") == 5


def test_a_diff_applies_with_git(tmp_path: Path) -> None:
    before = {"agent.py": "a\nb", "subject.toml": "x = 1\n"}
    after = {**before, "agent.py": "a\nc", "new.py": "n = 1\n"}
    for name, text in before.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    patch = edits.unified_diff(before, after)
    subprocess.run(["git", "apply", "--unsafe-paths", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == after


def run(**fields: object) -> Outcome:
    return Outcome("t", "completed", **{"score": 0.5, "curve": (0.1, 0.5), **fields})  # type: ignore[arg-type]


def test_fields_that_no_prompt_shows() -> None:
    """The facts name inputs. What else is in a task may be its answer."""
    hidden = run(facts={"unseen.digits": 0.5, "unseen.hint": 0.1})
    assert unseen_fields(hidden) == ["digits"] and "unseen_input" in {sign.cause for sign in signs(hidden)}
    gold = Transcript(
        "best", {"q": "1 2", "solution": "3", "level": 4, "is_new": True}, ({"role": "user", "content": "1 2"},), 1.0
    )
    assert not signs(run(transcripts=(gold, gold)))


@pytest.mark.parametrize(
    ("facts", "signals", "settings", "name", "proposed"),
    [
        ({}, {"groups/zero_variance": 0.6}, {"job.temperature": 1.0}, "tasks that teach", True),
        ({}, {"groups/zero_variance": 0.6}, {"job.temperature": 0.1}, "tasks that teach", False),
        ({}, {"groups/zero_variance": 0.6, "overridden/temperature": 1.0}, {}, "tasks that teach", False),
        ({}, {"policy/kl": 0.01, "groups/zero_variance": 0.5}, {}, "thirty times the learning rate", True),
        ({}, {"policy/kl": 0.01, "groups/zero_variance": 1.0}, {}, "thirty times the learning rate", False),
        ({"held_out_error": 0.01}, {}, {}, "a tenth of the learning rate", True),
        ({"held_out_error": 0.01, "overpaid": 0.2}, {}, {}, "a tenth of the learning rate", False),
    ],
)
def test_a_sign_that_another_cause_explains_asks_for_nothing_yet(
    facts: Any, signals: Any, settings: Any, name: str, proposed: bool
) -> None:
    """Cold groups agree on every task; groups that agree move no policy; a wrong reward lowers the score."""
    shown = run(
        curve=(0.1, 0.9, 0.5) if facts else (0.1, 0.5),
        facts=facts,
        signals={name: (value,) * 6 for name, value in ({"policy/entropy": 1.0} | signals).items()},
        settings={"job.optimizer.lr": 1e-4, **settings},
        by_task={"t0": (0.0, 0.0, 9), "t1": (0.0, 1.0, 9)},
    )
    files = {"subject.toml": SUBJECT, "tasks.jsonl": "".join(f'{{"id": "t{i}"}}\n' for i in range(9))}
    made = Strategist().propose(View("t", shown, 1, set(), [], files, "def score(task, messages): return 1.0\n"), 9)
    assert (name in {one.name for one in made if not isinstance(one, str)}) == proposed


def test_a_leak_is_a_sign() -> None:
    assert signs(run(score=0.9, facts={"swapped": 0.95}))[0].cause == "leaking_judge"
    assert not signs(run(score=0.9, facts={"swapped": 0.7}, curve=(0.1, 0.9)))


SIGNALS = ("groups/zero_variance", "reward/mean", "policy/kl", "policy/entropy", "completion/truncated")
SETTINGS = ("job.temperature", "job.recipe.kl_coef", "job.optimizer.lr", "job.group_size")


def test_every_row_refers_to_known_facts() -> None:
    full = run(
        facts={"rejected": 0.1, "overpaid": 0.1, "swapped": 0.1, "unseen.q": 1.0, "held_out_error": 0.1},
        signals=dict.fromkeys(SIGNALS, (1.0,) * 6),
        settings=dict.fromkeys(SETTINGS, 1.0),
        by_task={"a": (0.0, 1.0, 9)},
    )
    known = set(facts_of(full))
    rules, remedies = table()
    assert {name for rule in rules for name, _, _ in rule.when} <= known
    fields = {name for row in remedies for _, name, _, _ in string.Formatter().parse(row.why) if name}
    assert fields <= known | {"unseen_names"}
    assert {row.cause for row in remedies} <= {rule.cause for rule in rules} | {""}
    assert frozenset().union(*(row.unless for row in remedies)) <= {rule.cause for rule in rules}


def test_an_unknown_fact_fulfils_no_condition() -> None:
    for text in ("unknown > 0", "unknown < 0"):
        assert not SignRule(cause="x", when=(text,), meaning="").holds({})
