"""`Presence`: which task sets take part just now. Like leases it is not journaled: a restart grants everybody known one
lease to show up again.

A set is present while it has undecided episodes or asked for one within `lease_seconds`. One that has finished nothing
for as long as an episode may last, while the batch waits for it, has stalled: that batch is filled without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentjet.config import JobConfig


class Presence:
    """Task sets by name, and when each last gave a sign. Times are the clock's, in Unix seconds."""

    def __init__(self, clock: Callable[[], float], known: Iterable[str]) -> None:
        self._clock = clock
        now = clock()
        self._shown = dict.fromkeys(known, now)
        self._progress: dict[str, float] = {}
        self._filling_since = now
        self.stalled: set[str] = set()
        """Those that the present batch is filled without."""

    def shown(self, task_set: str, *, progress: bool = False) -> bool:
        """It wants an episode, or ended one, with a reward if that is `progress`. Returns whether it was away."""
        joined = task_set not in self._shown
        self._shown[task_set] = self._clock()
        if joined or progress:
            self._progress[task_set] = self._clock()
        return joined

    def refilling(self) -> None:
        """The next batch begins to be filled: everybody has another chance."""
        self._filling_since = self._clock()
        self.stalled.clear()

    def present(self, busy: Iterable[str]) -> set[str]:
        """The sets that take part; `busy` have undecided episodes."""
        return self._shown.keys() | set(busy)

    def leaves_at(self, task_set: str, job: JobConfig) -> float:
        return self._shown[task_set] + job.lease_seconds

    def stalls_at(self, task_set: str, job: JobConfig) -> float:
        """When a set that the batch waits for has had the time of a whole episode and a lease more."""
        begun = max(self._filling_since, self._progress.get(task_set, 0.0))
        return begun + job.max_episode_seconds + job.lease_seconds

    def away(self, job: JobConfig, busy: set[str]) -> list[str]:
        """The sets that have shown nothing for a lease; from here on they are not present."""
        now = self._clock()
        gone = [name for name in self._shown.keys() - busy if self.leaves_at(name, job) <= now]
        for name in gone:
            del self._shown[name]
            self._progress.pop(name, None)
            self.stalled.discard(name)
        return sorted(gone)

    def next_departure(self, job: JobConfig, busy: set[str]) -> float | None:
        return min((self.leaves_at(name, job) for name in self._shown.keys() - busy), default=None)
