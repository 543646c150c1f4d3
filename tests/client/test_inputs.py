"""Mistakes of a caller: each is one sentence that names it, before anything is begun."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest

from agentjet.client import AsyncSwarm
from agentjet.client.inputs import listed_tasks
from agentjet.errors import ConfigError, InvalidRequest
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime

TASKS = [Task("a")]


async def agent(task: Task, episode: object) -> float:
    return 1.0


async def without_episode(task: Task) -> float:
    return 1.0


class Holding:
    """An agent may be an object that is called."""

    async def __call__(self, task: Task, episode: object) -> float:
        return 1.0


class Hashable(Task):
    """A task that can be in a set, although its payload has no hash."""

    def __hash__(self) -> int:
        return 0


def connect(server: FakeServer) -> AsyncSwarm:
    return AsyncSwarm(URL, TOKEN, retry=FakeTime().retry(), transport=server.transport())


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"task_id": ""}, "task_id = '': .*at least 1 character"),
        ({"task_id": "t" * 3000}, "task_id = 't{58}…: .*at most 256 characters"),
        ({"task_id": "t", "mode": "zz"}, "mode = 'zz': .*'train' or 'eval'"),
        ({"task_id": "t", "group": 3}, "group = 3: .*string"),
    ],
)
def test_an_episode_that_cannot_be_asked_for(asked: dict[str, Any], sentence: str) -> None:
    server = FakeServer()
    with pytest.raises(InvalidRequest, match=sentence):
        asyncio.run(connect(server).begin(**asked))
    assert not server.requests


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"agent": "x"}, r"agent = 'x': give a function"),
        ({"agent": without_episode}, r"without_episode.* cannot be called as agent\(task, episode\)"),
        ({"tasks": []}, "there are no tasks"),
        ({"tasks": ["a"]}, r"tasks\[0\] = 'a': give a Task"),
        ({"tasks": "abc"}, r"tasks\[0\] = 'a': give a Task"),
        ({"tasks": Task("a")}, r"tasks = Task\(.*give a list, such as \[Task"),
        ({"tasks": {Hashable("a")}}, r"tasks is a set, whose order differs from run to run: .*sorted\(tasks"),
        ({"tasks": 3}, "tasks = 3: give a list, such as"),
        ({"concurrency": 0}, "concurrency = 0: .*at least 1"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_a_run_that_cannot_be_begun(verb: str, given: dict[str, Any], sentence: str) -> None:
    server = FakeServer()
    steps = {"steps": 1} if verb == "train" else {}
    call = {"agent": agent, "tasks": TASKS, "progress": False, **steps, **given}
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(getattr(connect(server), verb)(**call))
    assert not server.requests


def test_held_out_tasks_are_checked_by_their_name() -> None:
    for given, sentence in (
        (Task("a"), "eval_tasks = Task"),
        ([3], r"eval_tasks\[0\] = 3"),
        ({1}, "eval_tasks is a set"),
    ):
        with pytest.raises(ValueError, match=sentence):
            asyncio.run(connect(FakeServer()).train(agent, TASKS, steps=1, eval_tasks=given, eval_every=1))  # type: ignore[arg-type]


def test_tasks_may_come_from_an_iterator() -> None:
    server = FakeServer()
    tasks = (Task(name) for name in "ab")
    report = asyncio.run(connect(server).evaluate(agent, tasks, repeats=2, progress=False))
    assert [result.task_id for result in report.results] == ["a", "a", "b", "b"]
    trained = asyncio.run(connect(server).train(agent, iter(TASKS * 3), steps=1, progress=False))
    assert len(trained.steps) == 1


@pytest.mark.parametrize(
    ("version", "name", "sentence"),
    [
        (10**25, "x", r"policy_version = 1000.*less than"),
        (-1, "x", r"policy_version = -1: .*greater than or equal to 0"),
        (1, "", "'' is not the name of a tag"),
        (1, "../x", r"'\.\./x' is not the name of a tag: give a letter"),
        (1, "a/b", "'a/b' is not the name of a tag"),
    ],
)
def test_a_tag_that_cannot_be(version: int, name: str, sentence: str) -> None:
    server = FakeServer()
    with pytest.raises(InvalidRequest, match=sentence):
        asyncio.run(connect(server).tag(version, name))
    assert not server.requests


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ({"temperature": float("nan")}, r"job\.temperature = nan: it must be a finite number"),
        ({"optimizer": {"lr": float("inf")}}, r"job\.optimizer\.lr = inf: it must be a finite number"),
    ],
)
def test_a_job_has_finite_numbers(job: dict[str, Any], sentence: str) -> None:
    server = FakeServer()
    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(connect(server).start_run("x", job=job))
    assert not server.requests


@pytest.mark.parametrize("steps", [0, "3", True, 1.5])
def test_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"steps = {steps!r}: it must be a whole number"):
        asyncio.run(connect(FakeServer()).train(agent, TASKS, steps=steps))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"repeats": 0}, "repeats = 0: .*at least 1"),
        ({"at_version": "old"}, "at_version = 'old': .*'newest'"),
        ({"at_version": -1}, "at_version = -1: .*from 0 on"),
        ({"temperature": "hot"}, "temperature = 'hot': .*0 .greedy., or 0.01 to 10"),
        ({"temperature": 1e-44}, "temperature = 1e-44: .*0 .greedy., or 0.01 to 10"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_an_evaluation_that_cannot_be_had(given: dict[str, Any], sentence: str) -> None:
    server = FakeServer()
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(connect(server).evaluate(agent, TASKS, **given))
    assert not server.requests


def test_an_object_may_be_the_agent() -> None:
    server = FakeServer()
    assert len(asyncio.run(connect(server).evaluate(Holding(), TASKS, progress=False)).finished) == 1


@pytest.mark.parametrize("given", [3, "", "t" * 257, None])
def test_a_task_has_an_id(given: Any) -> None:
    with pytest.raises(ValueError, match=r"the task id .* 1 to 256 characters"):
        Task(given)


def test_the_identity_of_tasks_keeps_no_second_copy_of_their_payloads() -> None:
    """It is computed on the loop of the client: the payloads may be images."""
    tasks = listed_tasks([Task(f"t{number}", payload={"image": "a" * 1_000_000}) for number in range(20)])
    tracemalloc.start()
    try:
        assert tasks.identity.startswith("20 tasks, ")
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
