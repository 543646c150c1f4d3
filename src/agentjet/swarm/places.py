"""The places for groups in the present batch: `Mixture` shares them among task sets, `Places` among clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from statistics import fmean

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest, PlacesStatus, TaskSetStatus
from agentjet.swarm.state import MAX_CLIENTS_SHOWN, EpisodeRecord, Group, Leases, Store

RETRY_SECONDS = 1.0
OTHERS = "*"
"""The name in `job.task_weights` of every set that it does not name."""
MAX_CARRY = 2.0
"""Groups that a set may be owed, or be ahead, at most. Rounding owes about one. More comes from sets that join or leave
in the middle of a batch, and is not made up for."""


# ---- arithmetic --------------------------------------------------------------------------------------------


def deal(weights: Mapping[str, float], carry: Mapping[str, float]) -> Iterator[str]:
    """Yields the set of each next group, without end. Equal claims go by name. `weights` has at least one set."""
    total = sum(weights.values())
    owed = {name: carry.get(name, 0.0) for name in sorted(weights)}
    while True:
        for name in owed:
            owed[name] += weights[name] / total
        name = max(owed, key=owed.__getitem__)
        owed[name] -= 1
        yield name


def quotas(
    weights: Mapping[str, float], carry: Mapping[str, float], held: Mapping[str, int], num_places: int
) -> dict[str, int]:
    """Groups that each set of `weights` may have, of `num_places` in all.

    Places that are taken are not given back: `held` may be above a set's due, and counts sets without a weight, too.
    """
    due = dict.fromkeys(weights, 0)
    taken = sum(held.values())
    dealer = deal(weights, carry) if weights else iter(())
    while taken < num_places and (name := next(dealer, None)) is not None:
        due[name] += 1
        taken += due[name] > held.get(name, 0)
    return {name: max(number, held.get(name, 0)) for name, number in due.items()}


def needs(
    weights: Mapping[str, float], carry: Mapping[str, float], limits: Mapping[str, int], size: int
) -> dict[str, int] | None:
    """Groups of each set among the next `size`, within the set's limit. None if the limits allow fewer than `size`."""
    if sum(limits.values()) < size:
        return None
    needed = dict.fromkeys(weights, 0)
    dealer = deal(weights, carry) if weights else iter(())
    while sum(needed.values()) < size and (name := next(dealer, None)) is not None:
        needed[name] += needed[name] < limits[name]
    return needed


def carried(weights: Mapping[str, float], carry: Mapping[str, float], used: Mapping[str, int]) -> dict[str, float]:
    """Groups that each set of `weights` is owed after a batch with `used` groups of each. The sum is 0."""
    total, size = sum(weights.values()), sum(used.get(name, 0) for name in weights)
    owed = {name: carry.get(name, 0.0) + size * w / total - used.get(name, 0) for name, w in weights.items()}
    excess = sum(owed.values()) / max(1, len(owed))
    return {name: min(MAX_CARRY, max(-MAX_CARRY, value - excess)) for name, value in owed.items()}


def weight(job: JobConfig, task_set: str) -> float | None:
    return job.task_weights.get(task_set, job.task_weights.get(OTHERS))


# ---- task sets ---------------------------------------------------------------------------------------------


class Mixture:
    """The groups that make the next batch, and the task set that may begin more of them.

    Without `job.task_weights` groups train in the order of completion. With weights every batch has groups of all
    present task sets by weight, so that a fast set cannot crowd out a slow one.

    * A set is present while it has live episodes, or asked for one within `lease_seconds`. An absent set keeps no
      places. Presence is not journaled: after a restart every known set stays present for one lease.
    * A set is stalled if it finished nothing for as long as an episode may last while the batch waited for it. The
      present batch is filled without it.

    Places are dealt in turns: each turn every set is owed its share of a group, and the set that is owed the most
    gets one. The rest is carried over to the next batch, so small batches and small weights come out right in the
    long run. The first `n` turns are the same for every batch size above `n`, so groups that are begun ahead fit
    the next batch.

    Reads the store, and emits `task_set` events in its transactions.
    """

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        now = clock()
        self._active = dict.fromkeys({*store.carry, *self._held()}, now)
        """Time at which each set last began or ended an episode."""
        self._progress: dict[str, float] = {}
        """Time at which each set joined or last finished an episode."""
        self._filling_since = now
        self._stalled: set[str] = set()
        """The sets that the present batch is filled without."""

    def register(self, task_set: str) -> None:
        """Record that a client asks for a training episode of this set.

        Raises `Conflict` (`task_set_unknown`) when the weights have no place for it.
        """
        job = self._store.job
        if not job.task_weights:
            return
        if weight(job, task_set) is None:
            named = ", ".join(sorted(job.task_weights))
            raise Conflict(
                f"job.task_weights has no weight for task set {task_set!r}, only for {named}: add "
                f"job.task_weights.{task_set or OTHERS}, or '{OTHERS}' for every set that is not named.",
                code="task_set_unknown",
            )
        if task_set in self._active:
            self._active[task_set] = self._clock()
            return
        with self._store.transaction():
            self._mark_active(task_set)
            self._store.emit("task_set", {"task_set": task_set, "state": "joined"})

    def quota(self, task_set: str, groups: Sequence[Group]) -> int:
        """Returns the number of groups that the set may have by `job.task_weights`, if these are all groups.

        Raises `Later` (`task_set_full`) when the set has its share of the groups and others wait for theirs.
        """
        held = Counter(group.task_set for group in groups)
        quota = self._quotas(held)
        if held[task_set] >= quota.get(task_set, 0):
            short = [f"{name!r} ({held[name]} of {number})" for name, number in quota.items() if held[name] < number]
            raise Later(
                f"Task set {task_set!r} has its {held[task_set]} of {self._store.num_places} groups, by "
                f"job.task_weights; the rest is for {', '.join(short) or 'no set'}.",
                code="task_set_full",
                retry_after=RETRY_SECONDS,
            )
        return quota[task_set]

    def record_end(self, episode: EpisodeRecord) -> None:
        """Record that a client finished or aborted an episode: its set is present."""
        if episode.mode == "train":
            self._mark_active(episode.task_set, progress=episode.status == "finished")

    def start_batch(self) -> None:
        """The next batch begins to be filled, with the stalled sets."""
        self._restore_if_undone()
        self._filling_since, self._stalled = self._clock(), set()

    # ---- the next batch ------------------------------------------------------------------------------------

    def chosen(self) -> list[Group] | None:
        """The groups of the next batch in the order they were completed; None while some are missing."""
        job = self._store.job
        complete = sorted(self._complete(), key=lambda group: (group.closed, group.id))
        if len(complete) < job.batch_size:
            return None
        if not job.task_weights:
            return complete[: job.batch_size]
        needed = self._needed()
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

    def _needed(self) -> dict[str, int] | None:
        """Number of groups of each set in the next batch, by weight; None when it cannot be filled yet.

        Complete groups of absent sets come first, so that they are not lost.
        """
        weights, size = self._weights(), self._store.job.batch_size
        left_behind = Counter(group.task_set for group in self._complete() if group.task_set not in weights)
        first: Counter[str] = Counter()
        for name, number in sorted(left_behind.items()):
            first[name] = min(number, size - first.total())
        rest = needs(weights, self._store.carry, self._quotas(self._held()), size - first.total())
        return None if rest is None else {**first, **rest}

    def carry(self, chosen: Sequence[Group]) -> dict[str, float]:
        """Groups that each present set is owed after a batch of these groups."""
        if not self._store.job.task_weights:
            return {}
        return carried(self._weights(), self._store.carry, Counter(group.task_set for group in chosen))

    # ---- time ----------------------------------------------------------------------------------------------

    def remove_absent(self) -> None:
        if not self._store.job.task_weights:
            return
        now, lease = self._clock(), self._store.job.lease_seconds
        idle = sorted(self._active.keys() - self._busy())
        for name in [name for name in idle if self._active[name] + lease <= now]:
            with self._store.transaction():
                self._restore_if_undone()
                del self._active[name]
                self._progress.pop(name, None)
                self._stalled.discard(name)
                self._store.emit("task_set", {"task_set": name, "state": "left"})

    def late(self) -> list[str]:
        """The sets that the batch has waited for too long. One set at least stays."""
        now, job = self._clock(), self._store.job
        if not job.task_weights:
            return []
        # A set that the batch waits for has the time of a whole episode and one lease.
        patience = job.max_episode_seconds + job.lease_seconds
        waited_for = self._waited_for() if now >= self._filling_since + patience else []
        late = [name for name in waited_for if self._progress.get(name, 0.0) + patience <= now]
        return late[: len(self._weights()) - 1]

    def stall(self, late: Sequence[str]) -> list[Group]:
        """Fill this batch without these sets. Returns their open groups."""
        self._restore_if_undone()
        for name in late:
            self._stalled.add(name)
            self._store.emit("task_set", {"task_set": name, "state": "stalled"})
        return [group for group in self._store.groups.values() if group.state == "open" and group.task_set in late]

    def _waited_for(self) -> list[str]:
        """The present sets whose groups the batch lacks; empty while there is only one set."""
        weights = self._weights()
        if len(weights) < 2 or self._store.pending is not None:
            return []
        have = Counter(group.task_set for group in self._complete())
        return [name for name, number in (self._needed() or {}).items() if name in weights and have[name] < number]

    # ---- views ---------------------------------------------------------------------------------------------

    def waiting_for(self) -> str:
        """A phrase for the sets whose groups the next batch lacks; empty without weights."""
        needed = self._needed() if self._store.job.task_weights else None
        have = Counter(group.task_set for group in self._complete())
        short = [f"{n!r} ({have[n]} of {number} groups)" for n, number in (needed or {}).items() if have[n] < number]
        return f"task set{'s' if len(short) > 1 else ''} {' and '.join(short)}" if short else ""

    def shares(self) -> dict[str, TaskSetStatus]:
        """Every named set that has a weight, or groups in the present or a recent batch."""
        recent, prefix = [step.metrics for step in self._store.steps], "batch/share/"
        seen = {name.removeprefix(prefix) for step in recent for name in step if name.startswith(prefix)}
        names = seen | {group.task_set for group in self._store.groups.values()} | set(self._store.job.task_weights)
        return {name: self._share(name, recent) for name in sorted(names - {"", OTHERS})}

    def _share(self, name: str, recent: Sequence[Mapping[str, float]]) -> TaskSetStatus:
        states = Counter(group.state for group in self._store.groups.values() if group.task_set == name)
        rewards = [step[key] for step in recent if (key := f"reward/{name}/mean") in step]
        return TaskSetStatus(
            weight=weight(self._store.job, name),
            share=fmean(step.get(f"batch/share/{name}", 0.0) for step in recent) if recent else 0.0,
            groups_open=states["open"],
            groups_complete=states["complete"],
            reward_mean=fmean(rewards) if rewards else None,
        )

    # ---- inside --------------------------------------------------------------------------------------------

    def _mark_active(self, task_set: str, *, progress: bool = False) -> None:
        self._restore_if_undone()
        if task_set not in self._active or progress:
            self._progress[task_set] = self._clock()
        self._active[task_set] = self._clock()

    def _restore_if_undone(self) -> None:
        """Keep the present facts for the case that the transaction is undone."""
        before = dict(self._active), dict(self._progress), self._filling_since, set(self._stalled)

        def restore() -> None:
            self._active, self._progress, self._filling_since, self._stalled = before

        self._store.restores.append(restore)

    def _busy(self) -> set[str]:
        return {episode.task_set for episode in self._store.live() if episode.mode == "train"}

    def _weights(self) -> dict[str, float]:
        """Weights of the present sets that have not stalled, or of all present sets if every one has."""
        present = self._active.keys() | self._busy()
        weights = {name: found for name in present if (found := weight(self._store.job, name)) is not None}
        return {name: found for name, found in weights.items() if name not in self._stalled} or weights

    def _held(self) -> Counter[str]:
        return Counter(group.task_set for group in self._store.groups.values())

    def _complete(self) -> list[Group]:
        return [group for group in self._store.groups.values() if group.state == "complete"]

    def _quotas(self, held: Mapping[str, int]) -> dict[str, int]:
        return quotas(self._weights(), self._store.carry, held, self._store.num_places)


KEPT_SECONDS = RETRY_SECONDS + 2.0
"""A refused client asks again after `RETRY_SECONDS`."""
REFUSALS = frozenset({"batch_full", "task_set_full", "not_sampling"})
"""Codes of refusals after which a client waits."""


class Places:
    """The groups that each client may open, so that the clients that want places share them. Reads the store.

    * A client **waits** from a refusal until it opens a group, or until `KEPT_SECONDS` after it last asked.
    * The **share** of a client is the number of places divided by the number of clients that hold groups or wait.
      Groups of this batch that were lost count, too. While another client below its share waits, a client at its
      share opens none. Otherwise the longest wait comes first.
    * An open group is **silent** after a lease without a call, or if it finishes nothing for long: see
      `_is_silent`. Others may open groups in its place. It lives on. The batch takes the groups that complete
      first. The next groups of its client are silent from the start, until one makes a call.

    With `job.task_weights`, the clients of a task set share the places of the set. Nothing of this is journaled.
    """

    def __init__(self, store: Store, leases: Leases, mixture: Mixture, clock: Callable[[], float]) -> None:
        self._store = store
        self._leases = leases
        self._mixture = mixture
        self._clock = clock
        self._waits: dict[tuple[str, str], float] = {}
        """Time until which each client waits, by client and scope; the longest wait first."""
        self._held: Counter[tuple[str, str]] = Counter()
        """Refused requests that the server holds, by client and scope."""
        self._silent: frozenset[int] = frozenset()
        self._silent_clients: frozenset[str] = frozenset()
        self._opened: Counter[tuple[int, str, str]] = Counter()
        """Groups that were opened while a batch was filled, by batch, client and scope."""
        self._is_moved = False
        """True if a client opened a group since the last `refresh`."""

    def check(self, request: BeginRequest) -> None:
        """Raises `Later` (`batch_full`, `task_set_full`) if the client may not open a group now.

        Raises `Conflict` (`task_set_full`) instead for a request with `unless_full`.
        """
        try:
            self._check_share(request, *self._check_room(request))
        except Later as full:
            if request.unless_full and full.code == "task_set_full":
                raise Conflict(str(full), code=full.code) from None
            self.refused(request)
            raise

    def refused(self, request: BeginRequest) -> None:
        self._waits[request.client_id, self._scope(request.task_set)] = self._clock() + KEPT_SECONDS

    def opened(self, request: BeginRequest) -> None:
        """Record that the client opened a group. If it wants more, it waits behind the others."""
        key = request.client_id, self._scope(request.task_set)
        opened, waits = (self._store.next_batch, *key), dict(self._waits)
        self._waits.pop(key, None)
        self._opened[opened] += 1
        self._is_moved = True

        def restore() -> None:
            self._opened -= Counter([opened])
            self._waits = waits | self._waits  # In the order of before.

        self._store.restores.append(restore)

    @contextmanager
    def held(self, request: BeginRequest, refusal: Later) -> Iterator[None]:
        """Context in which the server holds a refused request, so that its client waits."""
        key = request.client_id, self._scope(request.task_set)
        self._held[key] += refusal.code in REFUSALS
        try:
            yield
        finally:
            self._held[key] -= refusal.code in REFUSALS
            self._held += Counter()  # Without zeros.

    def refresh(self) -> bool:
        """Find the silent groups and the clients that wait no more. Returns True if a refused request may have room.

        Call it often: no event shows these changes.
        """
        before = self._silent, len(self._waits)
        groups = self._store.groups.values()
        self._waits = {key: until for key, until in self._waits.items() if self._is_waiting(*key)}
        kept: frozenset[str] = self._silent_clients
        if kept:
            present = {group.client_id for group in groups} | {client for client, _ in self._waits}
            kept = kept & present - {group.client_id for group in groups if self._is_calling(group)}
        silent = [
            group for group in groups if self._is_silent(group) or (group.client_id in kept and group.state == "open")
        ]
        self._silent = frozenset(group.id for group in silent)
        self._silent_clients = kept | {group.client_id for group in silent}
        self._opened = Counter({key: n for key, n in self._opened.items() if key[0] == self._store.next_batch})
        is_moved, self._is_moved = self._is_moved or before != (self._silent, len(self._waits)), False
        return is_moved and len(groups) - len(self._silent) < self._store.num_places

    def holders(self) -> dict[str, PlacesStatus]:
        """The clients that hold groups or wait, those with the most open groups first."""
        waiting = {client for client, scope in self._waits if self._is_waiting(client, scope)}
        groups = self._store.groups.values()
        num_groups = Counter(group.client_id for group in groups)
        num_open = Counter(group.client_id for group in groups if group.state == "open")
        num_silent = Counter(group.client_id for group in groups if group.id in self._silent)
        clients = sorted(num_groups.keys() | waiting, key=lambda name: (-num_open[name], name))
        return {
            name: PlacesStatus(
                num_open=num_open[name],
                num_silent=num_silent[name],
                num_complete=num_groups[name] - num_open[name],
                waits=name in waiting,
            )
            for name in clients[:MAX_CLIENTS_SHOWN]
        }

    # ---- inside --------------------------------------------------------------------------------------------

    def _check_room(self, request: BeginRequest) -> tuple[int, int]:
        """Returns the places of the scope, and the free ones. Raises `Later` if there are none."""
        store, client = self._store, request.client_id
        counted = [one for one in store.groups.values() if one.client_id == client or one.id not in self._silent]
        num_places = store.num_places
        if len(counted) >= num_places:
            text = (
                f"The batch has its {store.job.batch_size} groups (job.batch_size): wait for the next batch, as the "
                "AgentJet client does by itself, or raise job.batch_size."
            )
            raise Later(text, code="batch_full", retry_after=RETRY_SECONDS)
        if not store.job.task_weights:
            return num_places, num_places - len(counted)
        quota = self._mixture.quota(request.task_set, counted)
        return quota, quota - sum(group.task_set == request.task_set for group in counted)

    def _check_share(self, request: BeginRequest, num_places: int, num_free: int) -> None:
        """Raises `Later` if the free places are for other clients that wait."""
        client, scope = request.client_id, self._scope(request.task_set)
        groups = [one for one in self._store.groups.values() if self._scope(one.task_set) == scope]
        held = Counter(group.client_id for group in groups)
        waiting = [name for name, of in self._waits if of == scope and self._is_waiting(name, of)]
        share = max(1, num_places // len({client, *held, *waiting}))
        # Lost groups count: clients whose episodes fail would take the place that the batch lacks from each other.
        opened = {name: self._opened[self._store.next_batch, name, scope] for name in (client, *waiting)}
        at_share = {name for name, num_opened in opened.items() if max(held[name], num_opened) >= share}
        # Silent groups count against their own client: it may have no room for the place that it waits for.
        silent = {group.client_id for group in groups if group.id in self._silent}
        others = [name for name in waiting if name not in {client, *silent}]
        below = [name for name in others if name not in at_share]
        earlier = set(takewhile(client.__ne__, waiting))
        ahead = [name for name in (others if client in at_share else below) if name in earlier]
        if (client in at_share and below) or len(ahead) >= num_free:
            first = (below or ahead)[0]
            raise Later(
                f"The next place is for client {first!r}, which waits longer, or has less than its share of {share}.",
                code="task_set_full" if self._store.job.task_weights else "batch_full",
                retry_after=RETRY_SECONDS,
            )

    def _scope(self, task_set: str) -> str:
        """Clients of the same scope share places."""
        return task_set if self._store.job.task_weights else ""

    def _is_waiting(self, client: str, scope: str) -> bool:
        return self._waits[client, scope] > self._clock() or self._held[client, scope] > 0

    def _is_calling(self, group: Group) -> bool:
        """True if a member made a call in the last lease."""
        members = (self._store.episodes[member] for member in group.members)
        return any(
            member.num_calls and self._leases.silent_seconds(member) < self._store.job.lease_seconds
            for member in members
        )

    def _is_silent(self, group: Group) -> bool:
        """True if nothing finished and no live member made a call for a lease, or if nothing finished for as long as an
        episode may last, and a lease.
        """
        if group.state != "open":
            return False
        job, members = self._store.job, [self._store.episodes[member] for member in group.members]
        ends = [member.ended for member in members if member.ended is not None]
        if self._clock() >= max([group.opened, *ends]) + job.max_episode_seconds + job.lease_seconds:
            return True
        silence = [self._leases.silent_seconds(member, since=group.opened) for member in members]
        return not ends and min(silence) >= job.lease_seconds
