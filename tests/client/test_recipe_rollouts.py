"""Clients follow the recipe's choices of tasks, group sizes, temperatures and turns, on the real application."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.client import AsyncEpisode
from agentjet.client.rollout import RolloutQueue
from agentjet.errors import Conflict
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.types import Task
from tests.client.test_real_server import ask, client
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

TASKS = [Task(f"t{number}", payload=number) for number in range(4)]


class Chosen(Grpo):
    """Two of three episodes with one turn each, hot; tasks without a success are skipped after the first group."""

    name: str = f"{__name__}:Chosen"
    skip_all: bool = False

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        skip = "hopeless" if self.skip_all or task.mean_reward == 0 else ""
        return replace(default, episodes=2, temperature=1.5, max_turns=1, skip=skip)


def job(**recipe: bool) -> dict[str, object]:
    return {"group_size": 3, "batch_size": 2, "recipe": {"name": f"{__name__}:Chosen", **recipe}}


async def agent(task: Task, episode: AsyncEpisode) -> float:
    """Only the task t2 can be solved."""
    for _ in range(episode.max_turns):
        (await ask(episode, "1 + 1?", temperature=0.3)).raise_for_status()
    return float(task.payload == 2)


@pytest.mark.parametrize(("concurrency", "spare"), [(1, 0), (8, 0), (1, 1)])
async def test_training_follows_the_recipe(tmp_path: Path, concurrency: int, spare: int) -> None:
    """Also with spare episodes, which do not wait for the group of a skipped task."""
    async with (
        serving(tmp_path / "data", job={**job(), "spare_episodes": spare}) as served,
        client(served) as swarm,
    ):
        async with asyncio.timeout(60):
            report = await swarm.train(agent, TASKS, steps=6, concurrency=concurrency, progress=False)
        assert report.num_aborted == 0 and len(report.steps) == 6
        for step in report.steps:
            names = ("batch/episodes", "rollout/temperature", "rollout/max_turns", "episode/num_turns")
            assert [step.metrics[name] for name in names] == [4, 1.5, 1, 1]
        visits = Counter(result.task_id for result in report.results if result.outcome == "finished")
        assert all(visits[name] <= 4 for name in ("t0", "t1", "t3")) and visits["t2"] >= 12
        assert {one.params.temperature for one in served.run.compute.asked} == {1.5}


async def test_training_goes_on_if_every_task_is_skipped(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", job=job(skip_all=True)) as served, client(served) as swarm:
        async with asyncio.timeout(60):
            report = await swarm.train(agent, TASKS, steps=2, concurrency=8, progress=False)
        assert len(report.steps) == 2
        with pytest.raises(Conflict, match="skips task 't1' at policy version 2: hopeless"):
            body = swarm.episode_request("t1").model_copy(update={"unless_skipped": True})
            await swarm.connection.request("POST", "/episodes", body=body)
        async with swarm.episode("t1") as episode:
            assert (episode.begun.group_size, episode.max_turns) == (2, 1)


async def test_a_turn_beyond_the_limit_is_refused_and_the_episode_can_end(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", job=job()) as served, client(served) as swarm:
        episode = await swarm.begin("t1")
        first, second = [await ask(episode, "1 + 1?", temperature=0.3) for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 400)
        assert second.json()["error"]["code"] == "turn_limit" and "its 1 turns" in second.text
        assert second.headers["x-should-retry"] == "false"
        view = await episode.finish(0.0)
        assert (view.num_calls, view.unscorable) == (1, False)
        assert view.noted == {f"temperature overridden by the recipe {Chosen.__module__}:Chosen": 1}
        async with swarm.episode("t1", mode="eval") as evaluated:
            assert evaluated.max_turns == 0
            assert [(await ask(evaluated, "1 + 1?")).status_code for _ in range(2)] == [200, 200]


def test_sets_whose_tasks_are_all_skipped_come_last() -> None:
    tasks = [Task("a1", "a"), Task("a2", "a"), Task("b1", "b")]
    queue = RolloutQueue.training(tasks, 1, seed=0)

    def sets(number: int, *full: str) -> set[str]:
        return {spec.task.task_set for _ in range(number) if (spec := queue.next(full)) is not None}

    queue.skip(tasks[0])
    assert not queue.is_skipped("a") and sets(9) == {"a", "b"}
    queue.skip(tasks[1])
    assert queue.is_skipped("a") and sets(9) == {"b"}
    assert sets(3, "b") == {"a"}, "no other set has room"
    queue.skip(tasks[2])
    assert sets(9) == {"a", "b"}
    queue.forget_skipped()
    assert not queue.is_skipped("a") and not queue.is_skipped("b")
