"""Tasksets of verifiers, unmodified.

1. Tasks, ids and splits are the same in every process.
2. The library plays the episode; rewards and metrics are its own.
3. Its failures abort the episode, with its reason.
4. A wrong target, setting or version is an error before the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentjet import environments
from agentjet.environments import Environment, EnvironmentFailed
from agentjet.environments.kinds.verifiers import Verifiers
from agentjet.environments.registry import check_installed
from agentjet.errors import ConfigError
from tests.environments.episodes import Play, episodes
from tests.needs import need

need("verifiers")

TASKSETS = Path(__file__).parent / "tasksets"


def load(file: str = "digit_sum.py", **settings: Any) -> Environment:
    return environments.load(f"verifiers:{TASKSETS / file}", processes=1, **settings)


def reply(prompt: str) -> str:
    if "capital" not in prompt:
        return "The sum is 1."
    if "Paris" in prompt:
        return "It is Paris."
    return '<tool_call>\n{"name": "capitals_find", "arguments": {"country": "France"}}\n</tool_call>'


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    with episodes(reply) as (play, _):
        yield play


def test_ids_and_splits_are_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []
    for target in ("digit_sum.py", "./digit_sum.py"):
        monkeypatch.chdir(TASKSETS)
        with environments.load(f"verifiers:{target}", held_out_taskset={"split": "test", "size": 3}) as environment:
            loads.append([[task.id for task in tasks] for tasks in (environment.tasks, environment.held_out)])
    assert loads[0] == loads[1]
    train, held_out = loads[0]
    assert (len(train), len(held_out)) == (4, 3)
    assert not set(train) & set(held_out)
    with load(taskset={"size": 40}, num_tasks=20) as environment:
        assert [len(environment.tasks), len(environment.held_out)] == [16, 4]


def test_the_library_plays_and_scores(play: Play) -> None:
    with load(held_out=0) as environment:
        rewards = [play(environment, task) for task in environment.tasks[:2]]
    assert [reward.value for reward in rewards] == [2.0, 0.0]
    assert rewards[0].metrics == {"correct": 1.0, "length": 13.0, "turns": 1.0, "truncated": 0.0}
    assert rewards[0].text == "correct 1"


def test_its_tools_are_called(play: Play) -> None:
    with load("lookup.py", held_out=0) as environment:
        assert [task.id for task in environment.tasks] == ["france"]
        reward = play(environment, environment.tasks[0])
    assert (reward.value, reward.metrics["turns"]) == (1.0, 2.0)


REASONS = {
    "nothing": "TaskError: .*NoneType",
    "nan": "reward is nan: it must be a finite number",
    "error": "TaskError: .*answers.json",
    "hang": "the reward 'correct' was not computed: the episode ended by scoring_timeout",
}


def test_its_failures_are_reasons(play: Play) -> None:
    settings = {"taskset": {"replies": list(REASONS)}, "env": {"agent": {"timeout": {"scoring": 0.5}}}}
    with load(held_out=0, **settings) as environment:
        for task, reason in zip(environment.tasks, REASONS.values(), strict=True):
            with pytest.raises(EnvironmentFailed, match=reason):
                play(environment, task)
    reason, hangs = "it did not end within 4 s and was ended", {"replies": ["hang"]}
    with load(held_out=0, seconds=4, taskset=hangs) as environment, pytest.raises(EnvironmentFailed, match=reason):
        play(environment, environment.tasks[0])


def test_a_harness_that_needs_a_container_is_refused(play: Play) -> None:
    reason = "Harness 'codex' needs a container runtime"
    with load(held_out=0, harness="codex") as environment, pytest.raises(EnvironmentFailed, match=reason):
        play(environment, environment.tasks[0])


def test_a_task_without_a_reward_is_a_failure(play: Play) -> None:
    reason = "the episode has no reward: the task needs a method with @vf.reward"
    with load("no_reward.py", held_out=0) as environment, pytest.raises(EnvironmentFailed, match=reason):
        play(environment, environment.tasks[0])


@pytest.mark.parametrize(
    ("target", "settings", "sentence"),
    [
        ("nemo-gim", {}, "there is no taskset 'nemo-gim'; did you mean 'nemo_gym'?"),
        ("my-maths", {}, "there is no taskset 'my-maths'; install its package, or give a file such as ./my_tasks.py"),
        ("digits.py", {}, "digits.py is not a taskset: give a file such as my_tasks.py, or a folder"),
        ("classic.py", {}, r"classic.py is a classic environment \(load_environment\). verifiers 0.3.1 was the last"),
        ("../episodes.py", {}, "episodes.py exports no taskset: name a subclass of vf.Taskset in __all__ of"),
        ("digit_sum.py", {"harness": "nul"}, "verifiers refuses .*harness 'nul' not found"),
        ("digit_sum.py", {"runtime": "moon"}, "verifiers refuses .*runtime = .*'moon'"),
        ("digit_sum.py", {"taskset": {"sise": 3}}, "verifiers refuses .*taskset.sise = 3: "),
        ("digit_sum.py", {"env": {"agnet": {}}}, "verifiers refuses .*agnet = "),
        ("digit_sum.py", {"taskset": {"size": 0}}, "digit_sum.py has no tasks"),
    ],
)
def test_what_is_wrong_is_said_before_the_run(
    target: str, settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTJET_CALLER", str(TASKSETS))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match=sentence):
        Verifiers(target=target, **settings).listed()  # In this process, to import the library once.


def test_an_unknown_setting_has_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="hraness = 'null': unknown setting; did you mean 'harness'"):
        load(hraness="null")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.environments.registry.version", lambda package: "0.3.1")
    sentence = "verifiers 0.3.1 does not fit the kind verifiers, which needs verifiers>=0.4,<0.5: .*pip install"
    with pytest.raises(ConfigError, match=sentence):
        check_installed("verifiers", Verifiers)
