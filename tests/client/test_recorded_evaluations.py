"""Evaluations outside a training run, against a real server over a scripted worker.

1. The score of each is stored if one policy version answered throughout. Its name is that of the task set.
2. Otherwise a sentence has the reason: the policy learned, no episode finished, or the server did not answer.
3. Without the server's policy, or with `record=False`, nothing is stored.
4. Only held-out scores have a best one, which is kept, and a place in the health and in the list of checkpoints.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.runs import read_runs
from agentjet.client import AsyncEpisode, AsyncSwarm, Endpoint, EpisodeResult, EvalReport, Retry
from agentjet.client.evaluation import record_if_possible
from agentjet.types import Task
from tests.client.test_evaluation import client
from tests.client.test_real_server import TASKS, agent
from tests.server.serving import TOKEN, serving


async def right(task: Task, episode: AsyncEpisode) -> float:
    return 1.0


async def scores(swarm: AsyncSwarm) -> list[tuple[int, str, float, bool, bool]]:
    return [(one.policy_version, one.name, one.score, one.held_out, one.best) for one in await swarm.evaluations()]


# ---- 1. recorded -----------------------------------------------------------------------------------------------------


def test_before_and_after_training_are_on_the_list_and_in_compare(tmp_path: Path, capsys: Any) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:

            async def improving(task: Task, episode: AsyncEpisode) -> float:
                return min(1.0, 0.25 + episode.policy_version)

            await swarm.evaluate(improving, TASKS, repeats=2)
            report = await swarm.train(agent, TASKS, steps=2, concurrency=8, progress=False)
            await swarm.evaluate(improving, TASKS, repeats=2)
            last = report.steps[-1].policy_version
            before, after = await swarm.evaluations()
            assert [(one.policy_version, one.score) for one in (before, after)] == [(0, 0.25), (last, 1.0)]
            assert {(one.name, one.held_out, one.best) for one in (before, after)} == {("numbers", False, False)}
            assert (before.num_tasks, before.num_episodes) == (4, 8)

    asyncio.run(scenario())
    assert "not recorded" not in capsys.readouterr().out
    figures = read_runs([tmp_path / "data"]).runs[0].figures
    assert (figures["evaluations"], figures["evaluation_first"], figures["evaluation_last"]) == (2, 0.25, 1.0)
    assert figures["score_first"] is figures["score_best"] is figures["score_best_version"] is None


@pytest.mark.parametrize(
    ("task_sets", "name"), [(("", ""), "evaluation"), (("math", "math"), "math"), (("math", "code"), "evaluation")]
)
@pytest.mark.parametrize("options", [{}, {"at_version": "newest"}])
def test_the_name_is_that_of_the_task_set(
    task_sets: tuple[str, ...], name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            tasks = [Task(f"t{number}", task_set) for number, task_set in enumerate(task_sets)]
            await swarm.evaluate(right, tasks, progress=False, **options)
            assert await scores(swarm) == [(0, name, 1.0, False, False)]

    asyncio.run(scenario())


PAYLOAD, OTHER = {"question": "1 + 1"}, {"question": "2 + 2"}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([Task("a"), Task("b")], [Task("b"), Task("a")], True),
        ([Task("a", payload=PAYLOAD)], [Task("a", payload=dict(PAYLOAD))], True),
        ([Task("a", payload=object())], [Task("a", payload=object())], True),
        ([Task("a"), Task("b")], [Task("a"), Task("c")], False),
        ([Task("a"), Task("b")], [Task("a")], False),
        ([Task("a", "s")], [Task("a", "t")], False),
        ([Task("line-1", payload=PAYLOAD)], [Task("line-1", payload=OTHER)], False),
    ],
)
def test_the_same_tasks_are_one_list(one: list[Task], other: list[Task], is_same: bool, tmp_path: Path) -> None:
    """An agent that changes its payloads does not change the list of a training's held-out tasks."""

    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            for tasks in (one, other):
                await swarm.evaluate(right, tasks, progress=False)
            first, second = await swarm.evaluations()
            assert (first.task_list == second.task_list) is is_same
            assert first.task_list.startswith(f"{len(one)} task{'s' * (len(one) > 1)}, ")

            async def changing(task: Task, episode: AsyncEpisode) -> float:
                if isinstance(task.payload, dict):
                    task.payload["seen"] = task.payload.get("seen", 0) + 1
                return await agent(task, episode)

            given = {"eval_tasks": copy.deepcopy(one), "eval_every": 1}
            await swarm.train(changing, TASKS, steps=1, concurrency=8, progress=False, **given)
            held_out = [evaluation for evaluation in await swarm.evaluations() if evaluation.held_out]
            assert len(held_out) == 2 and {evaluation.task_list for evaluation in held_out} == {first.task_list}

    asyncio.run(scenario())


# ---- 2. not recorded, with the reason --------------------------------------------------------------------------------


@pytest.mark.parametrize("learned_in", [0, 1, 2], ids=["first", "second", "last"])
@pytest.mark.parametrize("progress", [True, False])
def test_a_score_of_several_versions_is_not_recorded(
    learned_in: int, progress: bool, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            seen: list[int] = []

            async def learning(task: Task, episode: AsyncEpisode) -> float:
                seen.append(episode.policy_version)
                if len(seen) == learned_in + 1:
                    await served.run.batch()
                return 1.0

            report = await swarm.evaluate(learning, TASKS[:3], concurrency=1, progress=progress)
            assert report.mean_reward == 1.0 and seen == [0] * (learned_in + 1) + [1] * (2 - learned_in)
            assert await scores(swarm) == []

    caplog.set_level(logging.INFO, "agentjet.client")
    asyncio.run(scenario())
    sentence = "The score is not recorded: the policy learned during the evaluation, from version 0 to 1, and a score "
    assert (sentence in capsys.readouterr().out) is progress
    assert (sentence in caplog.text) is not progress


def report(outcome: Any, reward: float | None) -> EvalReport:
    return EvalReport((EpisodeResult("t", "", outcome, 0, reward),), 1.0)


@pytest.mark.parametrize(
    ("given", "url", "reason"),
    [
        (report("aborted", None), "", "no episode finished"),
        (report("finished", 1.0), "http://127.0.0.1:1", "no answer from http://127.0.0.1:1"),
        (report("finished", 1.0), "", ""),
    ],
)
def test_a_failure_to_record_is_a_reason(given: EvalReport, url: str, reason: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            async with AsyncSwarm(url or served.url, TOKEN, retry=Retry(patience=0.0)) as other:
                found = await record_if_possible(other.connection, "me", given, "1 task, 0")
            assert found.startswith(reason) and bool(found) == bool(reason), found
            assert len(await swarm.evaluations()) == (not reason)

    asyncio.run(scenario())


# ---- 3. nothing to record --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"record": False},
        {"record": False, "at_version": "newest"},
        {"endpoint": Endpoint("http://127.0.0.1:2/v1", "theirs", "their-key")},
    ],
)
def test_nothing_is_recorded(options: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:
            await swarm.evaluate(right, TASKS, **options)
            assert await scores(swarm) == []

    asyncio.run(scenario())
    assert "not recorded" not in capsys.readouterr().out


# ---- 4. held-out scores ----------------------------------------------------------------------------------------------


def test_the_best_is_a_held_out_score(tmp_path: Path) -> None:
    """Better scores before, beside and after it are no held-out scores."""

    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served.url) as swarm:

            async def half(task: Task, episode: AsyncEpisode) -> float:
                return 0.5

            tags: Callable[[], dict[str, int]] = served.run.gateway.store.tags.read
            await swarm.evaluate(right, TASKS, progress=False)
            assert tags() == {} and await scores(swarm) == [(0, "numbers", 1.0, False, False)]
            health = await swarm.health()
            assert [rule for rule in health.rules if rule.name == "held_out"] == []
            await swarm.evaluate(half, TASKS, progress=False, at_version="newest", record=True)
            await served.run.until(lambda: tags() == {"best": 0})
            await served.run.batch()
            await swarm.evaluate(right, TASKS, progress=False)
            await swarm.checkpoint()
            assert await scores(swarm) == [
                (0, "numbers", 1.0, False, False),
                (0, "numbers", 0.5, True, True),
                (1, "numbers", 1.0, False, False),
            ]
            assert [(one.policy_version, one.score) for one in await swarm.checkpoints()] == [(0, 0.5), (1, None)]
            [rule] = [rule for rule in (await swarm.health()).rules if rule.name == "held_out"]
            assert rule.text == "held-out score 0.5 at version 0"
            assert tags() == {"best": 0}

    asyncio.run(scenario())
    figures = read_runs([tmp_path / "data"]).runs[0].figures
    assert {name: value for name, value in figures.items() if "score" in name or "evaluation" in name} == {
        "evaluations": 3,
        "score_first": 0.5,
        "score_last": 0.5,
        "score_best": 0.5,
        "score_best_version": 0,
        "evaluation_first": 1.0,
        "evaluation_last": 1.0,
    }
