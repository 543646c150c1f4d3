"""The kind `inspect` with real tasks.

1. Samples are tasks, with ids that stay the same. 2. The first score is the reward, the others are metrics, the
explanation is the text. 3. Errors and missing scores abort; a limit does not if the sample is scored. 4. Nothing is
left behind. 5. Wrong settings are an error before the run.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentjet import environments
from agentjet.client import AsyncSwarm, EvalReport, Retry
from agentjet.client.rollout import AgentFailing
from agentjet.environments import Environment
from agentjet.errors import ConfigError
from tests.fakes import recent_episodes, saying
from tests.needs import need
from tests.server.serving import ADMIN, Served, serving
from tests.tiny import make_model_info

need("inspect")
pytestmark = pytest.mark.anyio
FILE = Path(__file__).with_name("inspect_tasks.py")


def load(task: str, **settings: Any) -> Environment:
    return environments.load(f"inspect:{FILE}@{task}", **{"processes": 1, "held_out": 0.0} | settings)


def doubling(prompt: str) -> str:
    """Calls the tool if there is one, and answers with the result, or with 6."""
    if "Doubles a number" not in prompt:
        return "It is 6"
    if "<tool_response>" not in prompt:
        return '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'
    return prompt.rpartition("<tool_response>\n")[2].partition("\n")[0]


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[tuple[AsyncSwarm, Served]]:
    card = make_model_info(folder / "tokenizer", "qwen3", tool_format="hermes")
    job = {"batch_size": 1, "group_size": 2, "max_tokens": 512}
    retry = Retry(patience=5.0)
    async with (
        serving(folder / "data", saying(doubling), card=card, job=job) as served,
        AsyncSwarm(served.url, ADMIN, retry=retry) as client,
    ):
        yield client, served


async def played(folder: Path, task: str, **settings: Any) -> EvalReport:
    with load(task, **settings) as environment:
        async with swarm(folder) as (client, _):
            return await client.evaluate(environment.agent, environment.tasks, concurrency=1, progress=False)


async def test_samples_are_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    before = set(os.listdir(FILE.parent))
    with load("doubles") as first, load("doubles", task_args={"num": 2}) as second:
        ids = [task.id for task in first.tasks]
        assert ids[0] == "three" and ids[:2] == [task.id for task in second.tasks]
        async with swarm(tmp_path) as (client, served):
            evaluated = await client.evaluate(first.agent, first.tasks, concurrency=1, progress=False)
            report = await client.train(first.agent, first.tasks[:1], steps=1, concurrency=2, progress=False)
            episode = recent_episodes(served.run.gateway.swarm, 1, status="finished")[0]
            [call] = (await client.episode_tree(episode.id)).calls
    assert evaluated.metric_at_k("score/match").value == pytest.approx(1 / 3) == evaluated.mean_reward
    assert (report.rewards, report.num_aborted) == ((1.0,), 0)
    assert (episode.reward_text, episode.metrics["turns"], call.orphan) == ("It is 6", 1.0, "")
    assert not list((tmp_path / "home").rglob("*inspect*")) and set(os.listdir(FILE.parent)) - before <= {"__pycache__"}


async def test_tools_of_a_task(tmp_path: Path) -> None:
    report = await played(tmp_path, "with_tool")
    assert sorted(result.reward or 0 for result in report.results) == [0, 0, 1]
    assert report.mean_metric("turns") == 2


async def test_limits_count_if_the_sample_is_scored(tmp_path: Path) -> None:
    report = await played(tmp_path, "endless", max_turns=3)
    assert (report.mean_reward, report.mean_metric("turns")) == (1.0, 3.0)


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"task_args": {"value": "P"}}, 0.5),
        ({"task_args": {"value": 0.25}}, 0.25),
        ({"task_args": {"value": {"a": 1, "b": 2}}}, 1.0),
        ({"task_args": {"value": {"a": 1, "b": 2}}, "scorer": "giving/b"}, 2.0),
    ],
)
async def test_values_of_scores(tmp_path: Path, settings: dict[str, Any], value: float) -> None:
    report = await played(tmp_path, "scored", **settings)
    assert (report.mean_reward, report.results[0].error) == (value, "")


@pytest.mark.parametrize(
    ("task", "settings", "error"),
    [
        ("broken", {}, "inspect: .*the solver breaks"),
        ("graded", {}, "a scorer asks for a grader, and the task names none"),
        ("graded", {"task_args": {"has_grader": True}}, "the grader of the task is asked"),
        ("scored", {"task_args": {"value": "great"}}, "the score giving is 'great': give a number, or C, I, P or N"),
        (
            "scored",
            {"task_args": {"value": "NaN"}},
            "the score giving is nan: inspect did not score the sample",
        ),
        ("scored", {"scorer": "other"}, "scorer = 'other': the sample has the scores giving"),
    ],
)
async def test_an_episode_without_a_score_is_aborted(
    tmp_path: Path, task: str, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises((AgentFailing, ConfigError), match=error):
        await played(tmp_path, task, **settings)


@pytest.mark.parametrize(
    ("target", "settings", "error"),
    [
        ("", {}, "the target is empty: give FILE.py@TASK"),
        ("nowhere.py@a", {}, "there is no file .*nowhere.py: give FILE.py@TASK"),
        (f"{FILE}", {}, r"names 8 tasks \(.*doubles.*\): give one, such as .*inspect_tasks.py@TASK"),
        (f"{FILE}@nothing", {}, "nothing"),
        (f"{FILE}@unscored", {}, "has no scorer: give it one"),
        (f"{FILE}@doubles", {"task_args": {"nun": 2}}, "task_args.nun: the task .* has no such argument"),
        ("no_package/task", {}, "no_package/task"),
    ],
)
def test_wrong_targets_are_errors_before_the_run(target: str, settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        environments.load(f"inspect:{target}", **settings)


def test_a_task_that_needs_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sandbox docker, and there is no docker: install Docker Engine, or"):
        load("with_bash")
    with load("with_bash", tool_sandbox="local") as environment:
        assert len(environment.tasks) == 3
