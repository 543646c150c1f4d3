"""Tasks from a generator. Pins:

1. an endless one trains; few tasks are read ahead, and memory does not grow with those that were read;
2. tasks come in the generator's order; one that ends is repeated, and one that is too long to repeat ends the run;
3. a wrong task, and the same id with another payload, end the run by name;
4. a task set without room is passed over, and the visits that wait are bounded; skipped tasks do not stop training.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from agentjet.client import Episode, Swarm, task_stream
from agentjet.client.rollout import Groups, RolloutSpec
from agentjet.client.task_stream import LOOKAHEAD, MOST_SKIPPED, StreamQueue, TaskStream
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer


def client(server: FakeServer) -> Swarm:
    return Swarm(URL, TOKEN, transport=server.transport())


def agent(task: Task, episode: Episode) -> float:
    return 1.0


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
    with client(server) as swarm:
        report = swarm.train(agent, (Task(f"t{number}") for number in drawn), steps=5, concurrency=4, progress=False)
    assert len(report.steps) == 5
    begun = list(dict.fromkeys(request.task_id for request in server.begun))
    assert begun == [f"t{number}" for number in range(len(begun))]
    assert 10 <= next(drawn) <= len(begun) + 5


def test_tasks_that_were_read_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Payload:
        """Counted by the garbage collector."""

    monkeypatch.setattr(task_stream, "TASKS_REPEATED", 20)
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
    monkeypatch.setattr(task_stream, "TASKS_REPEATED", num_repeated)
    visits = ids(taken(30, queue(itertools.islice(endless(), num_tasks))))
    epoch = [f"t{number}" for number in range(num_tasks)]
    assert visits[:num_tasks] == epoch and len(visits) == num_visits
    assert all(
        sorted(visits[at : at + num_tasks]) == sorted(epoch) for at in range(0, num_visits - num_tasks + 1, num_tasks)
    )


def test_the_end_of_a_long_generator_is_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_stream, "TASKS_REPEATED", 3)
    with client(FakeServer(batch_size=2, group_size=1)) as swarm:
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
    with client(server) as swarm, pytest.raises((ValueError, ZeroDivisionError), match=sentence):
        swarm.train(agent, tasks(), steps=50, concurrency=2, progress=False)


@pytest.mark.parametrize("tasks", [iter([]), iter(["no task"])])
def test_a_generator_without_a_task_is_refused_before_the_run(tasks: Iterator[Any]) -> None:
    server = FakeServer()
    with client(server) as swarm, pytest.raises(ValueError, match=r"there are no tasks|tasks\[0\] = 'no task'"):
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
