"""Tasks: 1. a repeated identity in a list is refused, with its positions. 2. A stream may visit a task again, with the
same payload. 3. No group mixes tasks, with whatever ids."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from agentjet.client import Episode, Swarm
from agentjet.client.inputs import checked_tasks
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer

LONG = "x" * 200


@dataclass
class Problem:
    question: str
    answer: str


class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("an open connection")


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ([Task("q1", payload=0), Task("q2"), Task("q1", payload=10)], r"tasks\[0\] and tasks\[2\] .*'q1'.*task_set"),
        ([Task("q1"), Task("q1")], r"tasks\[0\] and tasks\[1\]"),
        ([Task("1", "algebra"), Task("1", "geometry"), Task("1", "algebra")], r"tasks\[0\] and tasks\[2\].*'algebra'"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "evaluate", "eval_tasks"])
def test_a_list_with_a_repeated_identity_is_refused(tasks: list[Task], sentence: str, verb: str) -> None:
    def agent(task: Task, episode: Episode) -> float:
        raise AssertionError("nothing begins")

    with (
        Swarm(URL, TOKEN, transport=FakeServer().transport()) as swarm,
        pytest.raises(
            ValueError, match=sentence.replace("tasks", "eval_tasks" if verb == "eval_tasks" else "tasks", 2)
        ),
    ):
        if verb == "train":
            swarm.train(agent, tasks, steps=1)
        elif verb == "evaluate":
            swarm.evaluate(agent, tasks)
        else:
            swarm.train(agent, [Task("a")], steps=1, eval_tasks=tasks, eval_every=1)


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
    with Swarm(URL, TOKEN, transport=server.transport()) as swarm:
        swarm.train(agent, random_tasks(random.Random(seed)), steps=6, concurrency=4, progress=False)
    assert len(payloads) >= 18
    assert [group for group, seen in payloads.items() if len(seen) > 1] == []
