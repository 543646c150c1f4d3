"""Mistakes of a caller: each is one sentence that names it, before anything is begun.

1. Arguments. 2. The identities of tasks: a repeated one in a list is refused, a stream may visit a task again, and no
group mixes tasks. 3. Tasks from a generator:

* an endless one trains; few tasks are read ahead, and memory does not grow with those that were read;
* tasks come in the generator's order; one that ends is repeated, and one that is too long to repeat ends the run;
* a wrong task, and the same id with another payload, end the run by name;
* a task set without room is passed over, and the visits that wait are bounded; skipped tasks do not stop training.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from agentjet.client import Episode, rollout
from agentjet.client.inputs import checked_tasks, listed_tasks
from agentjet.client.rollout import LOOKAHEAD, MOST_SKIPPED, Groups, RolloutSpec, StreamQueue, TaskStream
from agentjet.errors import InvalidRequest
from agentjet.types import Task
from tests.client.server import FakeServer

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


RUN: dict[str, Any] = {"agent": agent, "tasks": TASKS, "progress": False}
USUAL: dict[str, dict[str, Any]] = {"train": {**RUN, "steps": 1}, "evaluate": RUN}
"""Arguments of a method, by default."""
WRONG_RUNS = (
    ({"agent": "x"}, r"agent = 'x': give a function"),
    ({"agent": without_episode}, r"without_episode.* cannot be called as agent\(task, episode\)"),
    ({"tasks": []}, "there are no tasks"),
    ({"tasks": ["a"]}, r"tasks\[0\] = 'a': give a Task"),
    ({"tasks": "abc"}, r"tasks\[0\] = 'a': give a Task"),
    ({"tasks": Task("a")}, r"tasks = Task\(.*give a list, such as \[Task"),
    ({"tasks": {Hashable("a")}}, r"tasks is a set, whose order differs from run to run: .*sorted\(tasks"),
    ({"tasks": 3}, "tasks = 3: give a list, such as"),
    ({"concurrency": 0}, "concurrency = 0: .*at least 1"),
)
REPEATED = (
    ([Task("q1", payload=0), Task("q2"), Task("q1", payload=10)], r"tasks\[0\] and {}tasks\[2\] .*'q1'.*task_set"),
    ([Task("q1"), Task("q1")], r"tasks\[0\] and {}tasks\[1\]"),
    ([Task("1", "algebra"), Task("1", "geometry"), Task("1", "algebra")], r"tasks\[0\] and {}tasks\[2\].*'algebra'"),
)
"""Lists with a repeated identity."""


@pytest.mark.parametrize(
    ("method", "given", "sentence"),
    [
        ("begin", {"task_id": ""}, "task_id = '': .*at least 1 character"),
        ("begin", {"task_id": "t" * 3000}, "task_id = 't{58}…: .*at most 256 characters"),
        ("begin", {"task_id": "t", "mode": "zz"}, "mode = 'zz': .*'train' or 'eval'"),
        ("begin", {"task_id": "t", "group": 3}, "group = 3: .*string"),
        *((method, given, sentence) for method in USUAL for given, sentence in WRONG_RUNS),
        *((method, {"tasks": tasks}, sentence.format("")) for method in USUAL for tasks, sentence in REPEATED),
        *(
            ("train", {"steps": steps}, f"steps = {steps!r}: it must be a whole number")
            for steps in (0, "3", True, 1.5)
        ),
        ("train", {"eval_tasks": Task("a"), "eval_every": 1}, "eval_tasks = Task"),
        ("train", {"eval_tasks": [3], "eval_every": 1}, r"eval_tasks\[0\] = 3"),
        ("train", {"eval_tasks": {1}, "eval_every": 1}, "eval_tasks is a set"),
        *(
            ("train", {"eval_tasks": tasks, "eval_every": 1}, "eval_" + sentence.format("eval_"))
            for tasks, sentence in REPEATED
        ),
        ("train", {"eval_tasks": TASKS}, "eval_tasks needs eval_every"),
        ("train", {"eval_every": 5}, "eval_every = 5 needs eval_tasks"),
        ("train", {"stop_after": 3}, "stop_after = 3 counts evaluations"),
        ("train", {"eval_tasks": TASKS, "eval_every": -1}, "eval_every = -1: it must be a whole number"),
        ("train", {"eval_tasks": TASKS, "eval_every": 1, "eval_repeats": 0}, "eval_repeats = 0"),
        ("evaluate", {"repeats": 0}, "repeats = 0: .*at least 1"),
        ("evaluate", {"at_version": "old"}, "at_version = 'old': .*'newest'"),
        ("evaluate", {"at_version": -1}, "at_version = -1: .*from 0 on"),
        ("evaluate", {"temperature": "hot"}, "temperature = 'hot': .*0 .greedy., or 0.01 to 10"),
        ("evaluate", {"temperature": 1e-44}, "temperature = 1e-44: .*0 .greedy., or 0.01 to 10"),
        ("evaluate", {"record": True}, "record = True needs at_version"),
        ("tag", {"policy_version": 10**25, "name": "x"}, r"policy_version = 1000.*less than"),
        ("tag", {"policy_version": -1, "name": "x"}, r"policy_version = -1: .*greater than or equal to 0"),
        ("tag", {"policy_version": 1, "name": ""}, "'' is not the name of a tag"),
        ("tag", {"policy_version": 1, "name": "../x"}, r"'\.\./x' is not the name of a tag: give a letter"),
        ("tag", {"policy_version": 1, "name": "a/b"}, "'a/b' is not the name of a tag"),
        ("episodes", {"status": "broken"}, "'broken': .*'live', 'finished', 'aborted', 'expired' or 'not_needed'"),
        ("episodes", {"min_reward": float("nan")}, "min_reward = nan: .*finite"),
        ("episodes", {"batch": "x"}, "batch = 'x': .*integer"),
        ("episodes", {"limit": 0}, "limit = 0: .*greater than or equal to 1"),
        ("episodes", {"statsu": "live"}, "statsu = 'live': this name is unknown; known are .*status"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_asked_for(method: str, given: dict[str, Any], sentence: str) -> None:
    server = FakeServer()
    ask = getattr(server.connect(), method)
    with pytest.raises(ValueError if method in USUAL else InvalidRequest, match=sentence):
        asyncio.run(ask(**USUAL.get(method, {}) | given))
    assert not server.requests


def test_tasks_may_come_from_an_iterator() -> None:
    server = FakeServer()
    tasks = (Task(name) for name in "ab")
    report = asyncio.run(server.connect().evaluate(agent, tasks, repeats=2, progress=False))
    assert [result.task_id for result in report.results] == ["a", "a", "b", "b"]
    trained = asyncio.run(server.connect().train(agent, iter(TASKS * 3), steps=1, progress=False))
    assert len(trained.steps) == 1


def test_an_object_may_be_the_agent() -> None:
    server = FakeServer()
    assert len(asyncio.run(server.connect().evaluate(Holding(), TASKS, progress=False)).finished) == 1


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


LONG = "x" * 200


@dataclass
class Problem:
    question: str
    answer: str


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("an open connection")


@pytest.mark.parametrize(
    ("first", "again", "is_same"),
    [
        (None, None, True),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        (0, 10, False),
        (Problem("2 + 2", "4"), Problem("2 + 2", "4"), True),
        (Problem("2 + 2", "4"), Problem("2 + 2", "5"), False),
        ({(1, 2): "a"}, {(1, 2): "a"}, True),
        (Unpicklable(), Unpicklable(), True),
        (Unpicklable(), 1, False),
    ],
)
def test_a_stream_may_visit_a_task_again(first: Any, again: Any, is_same: bool) -> None:
    stream = (Task("q", payload=payload) for payload in (first, again))
    if is_same:
        assert [task.id for task in checked_tasks(stream, "tasks")] == ["q", "q"]
    else:
        with pytest.raises(ValueError, match=r"tasks\[0\] and tasks\[1\].*with another payload"):
            checked_tasks(stream, "tasks")


def random_tasks(draw: random.Random) -> list[Task]:
    ids = [f"{draw.choice(['', LONG, LONG + 'y' * 40])}{draw.randrange(20)}" for _ in range(12)]
    tasks = [Task(task_id, draw.choice(["", "a", "b"]), payload=number) for number, task_id in enumerate(ids)]
    return list({(task.task_set, task.id): task for task in tasks}.values())


@pytest.mark.parametrize("seed", range(5))
def test_no_group_mixes_tasks(seed: int) -> None:
    payloads: defaultdict[str, set[int]] = defaultdict(set)

    def agent(task: Task, episode: Episode) -> float:
        payloads[episode.group].add(task.payload)
        return 1.0

    server = FakeServer(batch_size=3, group_size=2)
    with server.client() as swarm:
        swarm.train(agent, random_tasks(random.Random(seed)), steps=6, concurrency=4, progress=False)
    assert len(payloads) >= 18
    assert [group for group, seen in payloads.items() if len(seen) > 1] == []


def endless() -> Iterator[Task]:
    return (Task(f"t{number}", payload=number) for number in itertools.count())


def queue(tasks: Iterator[Task], base: str = "") -> StreamQueue:
    return StreamQueue(TaskStream(tasks, "tasks"), Groups(1, 0, base), seed=0)


def taken(number: int, of: StreamQueue, *full: str) -> list[RolloutSpec]:
    return [spec for _ in range(number) if (spec := of.next(full)) is not None]


def ids(specs: list[RolloutSpec]) -> list[str]:
    return [spec.task.id for spec in specs]


def test_an_endless_generator_trains_and_is_read_as_needed() -> None:
    drawn = itertools.count()
    server = FakeServer(batch_size=2, group_size=2)
    with server.client() as swarm:
        report = swarm.train(agent, (Task(f"t{number}") for number in drawn), steps=5, concurrency=4, progress=False)
    assert len(report.steps) == 5
    begun = list(dict.fromkeys(request.task_id for request in server.begun))
    assert begun == [f"t{number}" for number in range(len(begun))]
    assert 10 <= next(drawn) <= len(begun) + 5


def test_tasks_that_were_read_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Payload:
        """Counted by the garbage collector."""

    monkeypatch.setattr(rollout, "TASKS_REPEATED", 20)
    monkeypatch.setattr("agentjet.client.inputs.IDENTITIES_KEPT", 30)
    made = queue(Task(f"t{number}", payload=Payload()) for number in itertools.count())
    for spec in itertools.islice(iter(made.next, None), 2_000):
        assert spec.task.payload
    gc.collect()
    assert sum(isinstance(one, Payload) for one in gc.get_objects()) < 30
    assert sum(isinstance(one, RolloutSpec) for one in gc.get_objects()) < 30


@pytest.mark.parametrize(("num_tasks", "num_repeated", "num_visits"), [(3, 10, 30), (10, 10, 30), (11, 10, 11)])
def test_a_generator_that_ends(
    num_tasks: int, num_repeated: int, num_visits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "TASKS_REPEATED", num_repeated)
    visits = ids(taken(30, queue(itertools.islice(endless(), num_tasks))))
    epoch = [f"t{number}" for number in range(num_tasks)]
    assert visits[:num_tasks] == epoch and len(visits) == num_visits
    assert all(
        sorted(visits[at : at + num_tasks]) == sorted(epoch) for at in range(0, num_visits - num_tasks + 1, num_tasks)
    )


def test_the_end_of_a_long_generator_is_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "TASKS_REPEATED", 3)
    with FakeServer(batch_size=2, group_size=1).client() as swarm:
        report = swarm.train(agent, itertools.islice(endless(), 8), steps=50, concurrency=1, progress=False)
    assert report.stopped_early and len(report.results) == 8


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (lambda: "not a task", r"tasks\[5\] = 'not a task': give a Task"),
        (lambda: Task("t0", payload="other"), r"tasks\[0\] and tasks\[5\] both have the id 't0' with another payload"),
        (lambda: 1 / 0, "division by zero"),
    ],
)
def test_an_error_of_a_generator_ends_the_run(second: Callable[[], Any], sentence: str) -> None:
    def tasks() -> Iterator[Any]:
        yield from itertools.islice(endless(), 5)
        yield second()
        yield from endless()

    server = FakeServer()
    with server.client() as swarm, pytest.raises((ValueError, ZeroDivisionError), match=sentence):
        swarm.train(agent, tasks(), steps=50, concurrency=2, progress=False)


@pytest.mark.parametrize("tasks", [iter([]), iter(["no task"])])
def test_a_generator_without_a_task_is_refused_before_the_run(tasks: Iterator[Any]) -> None:
    server = FakeServer()
    with server.client() as swarm, pytest.raises(ValueError, match=r"there are no tasks|tasks\[0\] = 'no task'"):
        swarm.train(agent, tasks, steps=1, progress=False)
    assert not server.begun


def test_a_task_set_without_room_is_passed_over_within_a_limit() -> None:
    drawn = itertools.count()
    made = queue(Task(f"t{number}", "b" if number % 100 == 99 else "a") for number in drawn)
    [first] = taken(1, made)
    made.put_back(first)
    assert made.has_other({"a"}) and ids(taken(2, made, "a")) == ["t99", "t199"]
    [first] = taken(1, made, "a")
    made.put_back(first)
    assert first.task.task_set == "a", "too many wait"
    assert next(drawn) <= LOOKAHEAD + 3 and not made.has_other({"a"})
    assert ids(taken(3, made)) == ["t0", "t1", "t2"], "none was missed, and the order holds"


def test_a_stream_of_which_all_is_skipped_goes_on() -> None:
    made = queue(endless())
    for spec in taken(MOST_SKIPPED + 1, made):
        assert not made.is_skipped("")
        made.skip(spec.task)
    assert made.is_skipped("")
    made.forget_skipped()
    assert not made.is_skipped("")


def test_a_reproducible_stream() -> None:
    def repeated() -> Iterator[Task]:
        return (Task(f"t{number % 3}") for number in itertools.count())

    seeds = [[spec.seed for spec in taken(20, queue(repeated(), base="5/0"))] for _ in range(2)]
    assert seeds[0] == seeds[1] and len({*seeds[0]}) == 20, "another visit has other seeds"
    made = queue((Task("t", name) for name in "ab"), base="5/0")
    with pytest.raises(ValueError, match="tasks of one task set"):
        taken(3, made)
