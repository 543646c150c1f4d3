"""The order of episodes: 1. Tasks are visited in an order that the seed determines. 2. A task set without room is
passed over, and misses nothing. 3. The members of begun groups come first. 4. A task set has at most as many live
episodes as its agent has room for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import ClassVar

import pytest

from agentjet.client import AsyncEpisode, Endpoint, EvalReport, TrainReport
from agentjet.client.rollout import Agent, Groups, RolloutQueue, RolloutSpec, Runner, StreamQueue, TaskStream
from agentjet.protocol import BeginRequest
from agentjet.types import Task
from tests.client.server import FakeServer

pytestmark = pytest.mark.anyio

TASKS = [Task(f"t{number}", payload=number) for number in range(5)]


def first(number: int, slots: RolloutQueue) -> list[RolloutSpec]:
    return [slot for _ in range(number) if (slot := slots.next()) is not None]


def test_tasks_are_visited_in_an_order_the_seed_determines() -> None:
    def visits(seed: int) -> list[str]:
        return [slot.task.id for slot in first(20, RolloutQueue.training(TASKS, 2, seed))]

    assert visits(1) == visits(1)
    assert visits(1) != visits(2)
    assert sorted(visits(1)[:10:2]) == sorted(task.id for task in TASKS)
    groups = [slot.group for slot in first(4, RolloutQueue.training(TASKS[:1], 2, 0))]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_a_task_set_without_room_is_passed_over_and_misses_nothing() -> None:
    tasks = [Task(f"{task_set}{number}", task_set) for number in range(4) for task_set in ("a", "b")]

    def order_of(task_set: str, slots: list[RolloutSpec]) -> list[str]:
        return [slot.task.id for slot in slots if slot.task.task_set == task_set]

    undisturbed = first(200, RolloutQueue.training(tasks, 2, seed=3))
    slots, begun, full = RolloutQueue.training(tasks, 2, seed=3), list[RolloutSpec](), set[str]()
    for number in range(150):
        slot = slots.next(full)
        assert slot is not None and slot.task.task_set not in full
        if number % 3 == 0:
            slots.put_back(slot)
            full = {slot.task.task_set}
        else:
            begun.append(slot)
            full = set()
    assert len(begun) == len({slot.index for slot in begun}) == 100
    for task_set in ("a", "b"):
        had = order_of(task_set, begun)
        assert len(had) > 30 and had == order_of(task_set, undisturbed)[: len(had)]


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("under_way", [0, 1, 3, 9])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (3, 1)])
def test_task_sets_are_mixed_by_their_visits(sizes: tuple[int, int], under_way: int, spare: int) -> None:
    """In each epoch each set begins one group for each of its tasks, however many members begin before the first has
    begun."""
    tasks = [Task(f"{name}{number}", name) for name, size in zip("ab", sizes, strict=True) for number in range(size)]
    queue = RolloutQueue.training(tasks, 4, 0, spare)
    specs: list[RolloutSpec] = []
    for spec in iter(queue.next, None):
        specs.append(spec)
        if len(specs) > under_way:
            specs[-under_way - 1].visit.opened.set()
        if len(specs) == 6 * len(tasks) * (4 + spare):
            break
    groups = list({spec.group: spec.task for spec in specs}.values())
    assert set(Counter(spec.group for spec in specs).values()) == {4 + spare}
    each_epoch = [groups[at : at + len(tasks)] for at in range(0, len(groups), len(tasks))]
    assert [Counter(epoch) for epoch in each_epoch] == [Counter(tasks)] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_the_members_of_a_begun_group_come_first_also_of_a_full_set(stream: bool) -> None:
    """A worker that was refused for the set, before the group began, takes its members: it completes no other group."""
    tasks = [Task(f"{name}{number}", task_set=name) for number in range(2) for name in "ab"]
    queue = RolloutQueue.training(tasks, 3, 0)
    if stream:
        queue = StreamQueue(TaskStream(iter(tasks), "tasks"), Groups(3, 0, ""), 0)
    first = queue.next({"b"})
    assert first is not None
    queue.put_back(first)
    assert queue.next({"b"}) == first
    first.visit.opened.set()
    members = [queue.next({"a"}) for _ in range(2)]
    assert [spec and (spec.group, spec.place) for spec in members] == [(first.group, 1), (first.group, 2)]
    last = members[1] or first
    queue.put_back(last)
    other = queue.next({"a"})
    assert other is not None and other.task.task_set == "b", "the server has dropped the group"
    assert queue.next({"b"}) == last


def queue_of(kind: str, tasks: list[Task], capacity: dict[str, int]) -> RolloutQueue:
    if kind == "evaluation":
        return RolloutQueue.once(tasks, 8, capacity=capacity)
    if kind == "generator":
        return StreamQueue(TaskStream(itertools.cycle(tasks), "tasks"), Groups(4, 0, ""), 0)
    return RolloutQueue.training(tasks, 4, 0)


@pytest.mark.parametrize("kind", ["list", "generator", "evaluation"])
async def test_a_task_set_that_hangs_takes_its_capacity_only(kind: str) -> None:
    """Its groups have begun, so their other members would come first."""
    begun, done = Counter[str](), Counter[str]()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        begun[task.task_set] += 1
        await asyncio.sleep(600 if task.task_set == "hanging" else 0)
        return 1.0

    async def start(spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
        request = BeginRequest(client_id="c", task_id=spec.task.id, task_set=spec.task.task_set)
        return Endpoint("http://127.0.0.1:9/v1", "m").begin(request), agent

    def report(spec: RolloutSpec, result: object, last: bool) -> None:
        done[spec.task.task_set] += 1

    tasks = [Task(f"{name}-{number}", name) for name in ("hanging", "sound") for number in range(4)]
    capacity = {"hanging": 2, "elsewhere": 1}
    runner = Runner(start, report, capacity=capacity)
    running = asyncio.create_task(runner.run(queue_of(kind, tasks, capacity), 4))
    async with asyncio.timeout(20):
        while done["sound"] < 20:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert (begun["hanging"], done["hanging"]) == (2, 0)


class Narrow:
    """An agent with room for two episodes of the task set "a"."""

    capacity: ClassVar = {"a": 2}

    def __init__(self) -> None:
        self.live, self.most = Counter[str](), Counter[str]()

    async def __call__(self, task: Task, episode: AsyncEpisode) -> float:
        self.live[task.task_set] += 1
        self.most[task.task_set] = max(self.most[task.task_set], self.live[task.task_set])
        for _ in range(20):
            await asyncio.sleep(0)
        self.live[task.task_set] -= 1
        return 1.0


@pytest.mark.parametrize("kind", ["list", "generator", "evaluation"])
def test_a_run_keeps_to_the_capacity_of_its_agent_and_misses_no_task(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other tasks have ended when the last ones of the narrow set wait for room."""
    monkeypatch.setattr("agentjet.client.rollout.TASKS_REPEATED", 3)
    agent, tasks = Narrow(), [Task(f"{name}{number}", name) for number in range(8) for name in "ab"]
    with FakeServer(batch_size=8, group_size=1).client() as swarm:
        if kind == "evaluation":
            report: EvalReport | TrainReport = swarm.evaluate(agent, tasks, progress=False)
        else:
            source = tasks if kind == "list" else iter(tasks)
            report = swarm.train(agent, source, steps=3 if kind == "list" else 99, concurrency=8, progress=False)
    assert agent.most["a"] == 2 < agent.most["b"]
    if kind != "list":
        assert sorted(result.task_id for result in report.finished) == sorted(task.id for task in tasks)
