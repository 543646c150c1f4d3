"""`Places`: the groups that each client may open, so that the clients that want places share them.

* A client **waits** from a refusal until it opens a group, or until `KEPT_SECONDS` after it last asked.
* The **share** of a client is the number of places divided by the number of clients that hold groups or wait. Groups of
  this batch that were lost count, too. While another client below its share waits, a client at its share opens none.
  Otherwise the longest wait comes first.
* An open group is **silent** after a lease without a call, or if it finishes nothing for long: see `_is_silent`. Others
  may open groups in its place. It lives on. The batch takes the groups that complete first. The next groups of its
  client are silent from the start, until one makes a call.

With `job.task_weights`, the clients of a task set share the places of the set. Nothing of this is journaled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile

from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest, PlacesStatus
from agentjet.swarm.mixture import RETRY_SECONDS, Mixture, places
from agentjet.swarm.state import Group
from agentjet.swarm.store import MAX_CLIENTS_SHOWN, Leases, Store

KEPT_SECONDS = RETRY_SECONDS + 2.0
"""A refused client asks again after `RETRY_SECONDS`."""
REFUSALS = frozenset({"batch_full", "task_set_full", "not_sampling"})
"""Codes of refusals after which a client waits."""


class Places:
    """The clients of one run that hold groups of the present batch, or wait to open one. Reads the store."""

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
        """Record that the client waits."""
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

        self._store.undo_with(restore)

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
        kept = self._silent_clients.intersection(
            {group.client_id for group in groups} | {client for client, _ in self._waits}
        ) - {group.client_id for group in groups if self._is_calling(group)}
        silent = [
            group for group in groups if self._is_silent(group) or (group.client_id in kept and group.state == "open")
        ]
        self._silent = frozenset(group.id for group in silent)
        self._silent_clients = kept | {group.client_id for group in silent}
        self._opened = Counter({key: n for key, n in self._opened.items() if key[0] == self._store.next_batch})
        is_moved, self._is_moved = self._is_moved or before != (self._silent, len(self._waits)), False
        return is_moved and len(groups) - len(self._silent) < places(self._store)

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
        num_places = places(store)
        if len(counted) >= num_places:
            text = f"The batch has its {store.job.batch_size} groups."
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
