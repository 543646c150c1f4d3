"""`Presence`: which task sets take part just now. Like leases it is not journaled: a restart grants everybody known one
lease to show up again.

A set is present while it has undecided episodes or asked for one within `lease_seconds`. One that has finished nothing
for as long as an episode may last, while the batch waits for it, has stalled: that batch is filled without it.

`Mixture`: which groups make the next batch, and which task set may begin more of them.

Without `job.task_weights` it is first come, first served. With them every batch is made up by weight, of the sets that
are present, so that a fast set cannot crowd out a slow one; a set that left keeps no places. The arithmetic is
`quotas`', who is there is `presence`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.swarm import quotas
from agentjet.swarm.records import Episode, Group, TaskSetShare
from agentjet.swarm.state_store import Store


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


RETRY_SECONDS = 1.0
OTHERS = "*"
"""The name in `job.task_weights` of every set that it does not name."""


class Mixture:
    """The task sets of one swarm. Reads the ledger; what it emits is in the ledger's transactions."""

    def __init__(self, ledger: Store, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._presence = Presence(clock, {*ledger.carry, *self._held()})

    # ---- beginning -----------------------------------------------------------------------------------------

    def asked(self, job: JobConfig, task_set: str) -> None:
        """A client wants a training episode of this set.

        Raises `Conflict` (`task_set_unknown`) when the weights have no place for it.
        """
        if not job.task_weights:
            return
        if weight(job, task_set) is None:
            named = ", ".join(sorted(job.task_weights))
            raise Conflict(
                f"job.task_weights has no weight for task set {task_set!r}, only for {named}: add "
                f"job.task_weights.{task_set or OTHERS}, or '{OTHERS}' for every set that is not named.",
                code="task_set_unknown",
            )
        if self._presence.shown(task_set):
            self._ledger.emit("task_set", {"task_set": task_set, "state": "joined"})

    def check_room(self, job: JobConfig, task_set: str) -> None:
        """Raises `Later` (`task_set_full`) when the set has its share of the groups and others wait for theirs."""
        if not job.task_weights:
            return
        quota, held = self._quotas(job), self._held()
        if held[task_set] >= quota.get(task_set, 0):
            short = [f"{name!r} ({held[name]} of {number})" for name, number in quota.items() if held[name] < number]
            raise Later(
                f"Task set {task_set!r} has its {held[task_set]} of {places(self._ledger, job)} groups, by "
                f"job.task_weights; the rest is for {', '.join(short) or 'nobody'}.",
                code="task_set_full",
                retry_after=RETRY_SECONDS,
            )

    def ended(self, episode: Episode) -> None:
        """A client finished or aborted an episode: its set is there."""
        if episode.mode == "train":
            self._presence.shown(episode.task_set, progress=episode.status == "finished")

    # ---- composing -----------------------------------------------------------------------------------------

    def chosen(self, job: JobConfig) -> list[Group] | None:
        """The groups of the next batch in the order they were completed; None while it has not all it needs."""
        complete = sorted(self._complete(), key=lambda group: (group.closed, group.id))
        if len(complete) < job.batch_size:
            return None
        if not job.task_weights:
            return complete[: job.batch_size]
        needed = self.needed(job)
        have = Counter(group.task_set for group in complete)
        if needed is None or any(have[name] < number for name, number in needed.items()):
            return None
        left = Counter(needed)
        chosen = []
        for group in complete:
            if left[group.task_set] > 0:
                left[group.task_set] -= 1
                chosen.append(group)
        return chosen

    def needed(self, job: JobConfig) -> dict[str, int] | None:
        """How many groups of each set the next batch has, by weight. None when it cannot be filled yet.

        Complete groups of sets that are away come first: nothing will be added to them, and they are not lost.
        """
        weights = self._weights(job)
        orphaned = Counter(group.task_set for group in self._complete() if group.task_set not in weights)
        from_those_away: Counter[str] = Counter()
        for name, number in sorted(orphaned.items()):
            from_those_away[name] = min(number, job.batch_size - from_those_away.total())
        rest = quotas.needs(weights, self._ledger.carry, self._quotas(job), job.batch_size - from_those_away.total())
        return None if rest is None else {**from_those_away, **rest}

    def carry(self, job: JobConfig, chosen: Sequence[Group]) -> dict[str, float]:
        """What each set present is owed after a batch of these groups."""
        if not job.task_weights:
            return {}
        return quotas.carried(self._weights(job), self._ledger.carry, Counter(group.task_set for group in chosen))

    def refilling(self) -> None:
        """The next batch begins to be filled."""
        self._presence.refilling()

    # ---- time ----------------------------------------------------------------------------------------------

    def reap(self, job: JobConfig) -> list[Group]:
        """Let go of the sets that left, and for this batch of those that stalled; returns the latter's open groups."""
        if not job.task_weights:
            return []
        for name in self._presence.away(job, self._busy()):
            self._ledger.emit("task_set", {"task_set": name, "state": "left"})
        late = [name for name in self._waited_for(job) if self._presence.stalls_at(name, job) <= self._clock()]
        late = late[: len(self._weights(job)) - 1]  # somebody must be left to fill the batch
        for name in late:
            self._presence.stalled.add(name)
            self._ledger.emit("task_set", {"task_set": name, "state": "stalled"})
        return [group for group in self._ledger.groups.values() if group.state == "open" and group.task_set in late]

    def next_deadline(self, job: JobConfig) -> float | None:
        """When `reap` next has something to do, as things stand."""
        if not job.task_weights:
            return None
        departure = self._presence.next_departure(job, self._busy())
        deadlines = [self._presence.stalls_at(name, job) for name in self._waited_for(job)]
        return min(deadlines + ([] if departure is None else [departure]), default=None)

    def _waited_for(self, job: JobConfig) -> list[str]:
        """The sets that others wait for: none while there is only one."""
        weights = self._weights(job)
        if len(weights) < 2 or self._ledger.pending is not None:
            return []
        have = Counter(group.task_set for group in self._complete())
        return [name for name, number in (self.needed(job) or {}).items() if name in weights and have[name] < number]

    # ---- what others may know ------------------------------------------------------------------------------

    def waiting_for(self, job: JobConfig) -> str:
        """In words: the sets whose groups the next batch lacks; empty without weights."""
        needed = self.needed(job) if job.task_weights else None
        have = Counter(group.task_set for group in self._complete())
        short = [f"{n!r} ({have[n]} of {number} groups)" for n, number in (needed or {}).items() if have[n] < number]
        return f"task set{'s' if len(short) > 1 else ''} {' and '.join(short)}" if short else ""

    def shares(self, job: JobConfig) -> dict[str, TaskSetShare]:
        """Every set that has a weight of its own, or groups in the present or a recent batch; unnamed ones apart."""
        recent, prefix = self._ledger.recent_steps, "batch/share/"
        seen = {name.removeprefix(prefix) for step in recent for name in step if name.startswith(prefix)}
        names = seen | {group.task_set for group in self._ledger.groups.values()} | set(job.task_weights)
        return {name: self._share(job, name, recent) for name in sorted(names - {"", OTHERS})}

    def _share(self, job: JobConfig, name: str, recent: Sequence[Mapping[str, float]]) -> TaskSetShare:
        states = Counter(group.state for group in self._ledger.groups.values() if group.task_set == name)
        rewards = [step[key] for step in recent if (key := f"reward/{name}/mean") in step]
        return TaskSetShare(
            weight=weight(job, name),
            share=fmean(step.get(f"batch/share/{name}", 0.0) for step in recent) if recent else 0.0,
            groups_open=states["open"],
            groups_complete=states["complete"],
            reward_mean=fmean(rewards) if rewards else None,
        )

    # ---- inside --------------------------------------------------------------------------------------------

    def _busy(self) -> set[str]:
        return {episode.task_set for episode in self._ledger.undecided() if episode.mode == "train"}

    def _weights(self, job: JobConfig) -> dict[str, float]:
        """Of the sets that are present and have not stalled; of all that are present when every one has."""
        present = self._presence.present(self._busy())
        weights = {name: found for name in present if (found := weight(job, name)) is not None}
        return {name: found for name, found in weights.items() if name not in self._presence.stalled} or weights

    def _held(self) -> Counter[str]:
        return Counter(group.task_set for group in self._ledger.groups.values())

    def _complete(self) -> list[Group]:
        return [group for group in self._ledger.groups.values() if group.state == "complete"]

    def _quotas(self, job: JobConfig) -> dict[str, int]:
        return quotas.quotas(self._weights(job), self._ledger.carry, self._held(), places(self._ledger, job))


def places(ledger: Store, job: JobConfig) -> int:
    """How many groups may be open or complete at a time.

    One that waits behind whole batches grows older by one version with each: so many may wait that none gets too old.
    """
    batches_ahead = job.max_staleness + 1 - (ledger.pending is not None)
    return job.batch_size * batches_ahead + job.spare_groups


def weight(job: JobConfig, task_set: str) -> float | None:
    """The weight of a set; None when it has none."""
    return job.task_weights.get(task_set, job.task_weights.get(OTHERS))
