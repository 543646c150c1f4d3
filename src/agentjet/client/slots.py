"""`Slots`: which episode of a run is next, and which instead while the server has no room for a task set."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentjet.types import Task


@dataclass(frozen=True, slots=True)
class Slot:
    """One episode to be had: a task, the group it is compared in, and its place in the order."""

    task: Task
    group: str
    index: int
    spare: bool = False
    """Beyond what its group needs: not begun when the group has all it needs by then."""
    opened: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Common to a group's slots, set when one of them has begun. A spare one joins a group, and so waits for it."""


class Slots:
    """The slots of a run, in order. One that found no room is put back, and is the next of its task set."""

    def __init__(self, slots: Mapping[str, Iterator[Slot]], order: Iterator[str]) -> None:
        """`slots` are by task set, `order` says which set is next."""
        self._slots = slots
        self._order = order
        self._put_back: dict[str, deque[Slot]] = {task_set: deque() for task_set in slots}
        self.task_sets = frozenset(slots)

    @classmethod
    def training(cls, tasks: Sequence[Task], group_size: int, seed: int, spare: int = 0) -> Slots:
        """Tasks for ever, in an order that `seed` determines, anew each epoch; `group_size` slots a visit, and `spare`.

        Every task set has an order of its own, so that one that is passed over misses none of its tasks.
        """
        members = [number >= group_size for number in range(group_size + spare)]
        run, index = uuid.uuid4().hex[:8], itertools.count()

        def slots(own: Sequence[Task]) -> Iterator[Slot]:
            for epoch, task in _epochs(own, seed):
                group, opened = f"{task.id[:200]}/{run}/{epoch}", asyncio.Event()
                for is_spare in members:
                    yield Slot(task, group, next(index), is_spare, opened)

        task_sets = dict.fromkeys(task.task_set for task in tasks)
        by_set = {name: slots([task for task in tasks if task.task_set == name]) for name in task_sets}
        return cls(by_set, (task.task_set for _, task in _epochs(tasks, seed) for _ in members))

    @classmethod
    def once(cls, tasks: Sequence[Task]) -> Slots:
        """Each task once, in no group; room does not depend on the task set."""
        slots = (Slot(task, "", index) for index, task in enumerate(tasks))
        return cls({"": slots}, itertools.repeat(""))

    def next(self, full: Collection[str] = ()) -> Slot | None:
        """The next slot of a task set that is not in `full`; None after the last. Some set is not in `full`."""
        task_set = next(name for name in self._order if name not in full)
        waiting = self._put_back[task_set]
        return waiting.popleft() if waiting else next(self._slots[task_set], None)

    def put_back(self, slot: Slot) -> None:
        """There was no room for it."""
        self._put_back[slot.task.task_set].append(slot)


def _epochs(tasks: Sequence[Task], seed: int) -> Iterator[tuple[int, Task]]:
    order = random.Random(seed)
    for epoch in itertools.count():
        for task in order.sample(tasks, len(tasks)):
            yield epoch, task
