"""Reproducible runs: equal seeds give equal groups in the same order, with equal seeds of episodes. Other
seeds give others.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from agentjet.client import AsyncEpisode, Episode, Swarm
from agentjet.protocol import BeginRequest
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer

TASKS = [Task(f"t{number}", payload=number) for number in range(5)]


def client(server: FakeServer) -> Swarm:
    return Swarm(URL, TOKEN, transport=server.transport())


def agent_of_tasks(task: Task, episode: Episode) -> float:
    return float(task.payload)


def reproducible(
    concurrency: int, seed: int, fails_at: int = -1, steps: int = 3
) -> tuple[list[str], list[tuple[str, int]]]:
    """The tasks of the groups in the order they began, and each episode's task and seed in the order of the groups.
    Agents take different times.
    """
    server = FakeServer()
    calls = itertools.count()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        number = next(calls)
        for _ in range((7 * number) % 11):
            await asyncio.sleep(0)
        if number == fails_at:
            raise OSError("away")
        return task.payload / 10

    with client(server) as swarm:
        swarm.train(agent, TASKS, steps=steps, concurrency=concurrency, seed=seed, progress=False, reproducible=True)
    groups: dict[str, list[BeginRequest]] = {}
    for request in server.begun:
        groups.setdefault(request.group, []).append(request)
    learned = list(groups.values())[: steps * server.batch_size]
    members = [(one.task_id, one.seed or 0) for group in learned for one in sorted(group, key=lambda one: one.place)]
    return [group[0].task_id for group in learned], members


def test_a_reproducible_run_has_the_same_groups_and_seeds() -> None:
    order, members = reproducible(3, seed=1)
    assert [reproducible(concurrency, seed=1) for concurrency in (4, 16)] == [(order, members)] * 2
    assert len({seed for _, seed in members}) == len(members)
    assert not {seed for _, seed in members} & {seed for _, seed in reproducible(3, seed=2)[1]}
    again = reproducible(3, seed=1, fails_at=0)[1]
    assert {*members} < {*again}, "a failed episode is attempted again with another seed"
    with client(FakeServer()) as swarm, pytest.raises(ValueError, match="tasks of one task set"):
        swarm.train(agent_of_tasks, [Task("a"), Task("b", task_set="x")], steps=1, reproducible=True, progress=False)


def test_the_order_holds_over_many_batches() -> None:
    """Answers may differ by rounding of the model; groups, seeds and order may not."""
    assert reproducible(8, seed=1, steps=60) == reproducible(1, seed=1, steps=60)


def test_an_evaluation_has_the_seeds_of_its_tasks_and_repeats() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        server = FakeServer()
        with client(server) as swarm:
            swarm.evaluate(agent_of_tasks, TASKS, repeats=2, seed=seed, progress=False)
        return sorted((one.seed for one in server.begun), key=lambda one: one or 0)

    assert seeds(3) == seeds(3) != seeds(4) and len({*seeds(3)}) == 2 * len(TASKS)
    assert {*seeds(None)} == {None}
