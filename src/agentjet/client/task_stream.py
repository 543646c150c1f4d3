"""Tasks from a generator, which may be endless: they are read as the run goes on, and few of them are kept.

Memory is bounded by these numbers:

* `inputs.IDENTITIES_KEPT` different tasks are compared with later ones: the same id with another payload is refused.
* `TASKS_REPEATED` tasks are kept. A generator with at most so many is repeated when it ends, as a list is.
* `LOOKAHEAD` visits are read ahead while the task sets of those before have no room.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator

from agentjet.client.inputs import ONE_TASK_SET, TaskIdentities
from agentjet.client.rollout import Groups, RolloutQueue, RolloutSpec, Visit, epochs
from agentjet.types import Task

TASKS_REPEATED = 10_000
LOOKAHEAD = 256
MOST_SKIPPED = 256
"""Visits that the recipe skips at one policy version. Further ones are begun nevertheless, so that training goes on."""


class TaskStream:
    """The tasks of a generator in its order."""

    def __init__(self, tasks: Iterable[Task], named: str) -> None:
        """`named` is the argument with the tasks. Raises `ValueError` if there are none, or for a wrong first one."""
        identities = TaskIdentities(named, are_visits=True)
        checked = (identities.checked(task) for task in tasks)
        if (first := next(checked, None)) is None:
            raise ValueError("there are no tasks: give at least one")
        self._tasks = itertools.chain([first], checked)

    def visits(self, seed: int) -> Iterator[Task]:
        """The tasks. After the last one they are repeated, each epoch in another order, if they are few enough. Raises
        `ValueError` for a wrong task.
        """
        kept: list[Task] = []
        for number, task in enumerate(self._tasks):
            if number < TASKS_REPEATED:
                kept.append(task)
            elif kept:
                kept = []
            yield task
        if kept:
            yield from (task for _, task in epochs(kept, seed))


class StreamQueue(RolloutQueue):
    """The episodes of a training run on a stream. Its end is the end of the run."""

    def __init__(self, stream: TaskStream, groups: Groups, seed: int) -> None:
        super().__init__({}, iter(()))
        self.has_sets = True
        self._visits, self._groups = enumerate(stream.visits(seed)), groups
        self._last: Visit | None = None
        self._num_skipped = 0

    def next(self, full: Collection[str] = ()) -> RolloutSpec | None:
        """The next episode of a task set that is not in `full`, or None after the last. Reads visits of full sets
        ahead; when they are too many, their first episode is next. Members of begun groups come first.
        """
        if (begun := self._of_begun_group()) is not None:
            return begun
        while (waiting := self._first(full)) is None and self._can_read_ahead:
            number, task = next(self._visits, (0, None))
            if task is None:
                break
            if self._groups.base and {*self._waiting} - {task.task_set}:
                raise ValueError(ONE_TASK_SET)
            group = self._groups.visit(task, number, self._last)
            self._last = group[0].visit
            self._waiting.setdefault(task.task_set, deque()).extend(group)
        waiting = waiting or self._first(())
        return waiting.popleft() if waiting else None

    def has_other(self, full: Collection[str]) -> bool:
        return self._first(full) is not None or self._can_read_ahead

    def skip(self, task: Task) -> None:
        self._num_skipped += 1

    def is_skipped(self, task_set: str) -> bool:
        return self._num_skipped > MOST_SKIPPED

    def forget_skipped(self) -> None:
        self._num_skipped = 0

    @property
    def _can_read_ahead(self) -> bool:
        return len({spec.group for waiting in self._waiting.values() for spec in waiting}) < LOOKAHEAD
