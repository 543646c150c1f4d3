"""The samplers of a front: it sends completions to every replica itself, and the server keeps the replicas.

The server pushes `RoutingFacts` at each change of a fleet. The front connects to new replicas, and leaves those that
are no longer listed; their completions continue elsewhere. Routing, continuation and the search for completions that
crash replicas are those of the server (`compute.samplers.Replicas`).

A token counts when the facts say that its replica passed the probe of its version. A replica that lost its connection
to the front, and is still listed, gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from agentjet.compute.fleet import (
    MAX_RECENT,
    Cause,
    Changed,
    FrontWork,
    Load,
    Others,
    ReplicaFacts,
    ReplicaWork,
    RoutedFleet,
    RoutedReplica,
    RoutingFacts,
    backoff,
)
from agentjet.compute.samplers import Replicas
from agentjet.errors import ComputeError, PolicyRemoved
from agentjet.processes.rpc import UNANSWERED_SECONDS, Peer, dial, tune
from agentjet.types import PolicyId, Sampled, SamplingParams, TokenScore

log = logging.getLogger(__name__)

MAX_DIALS = 8
"""Replicas to which a front connects at a time. One on a machine that vanished takes 10 s."""
CLAIM_SECONDS = 5.0
"""Longest wait of a completion that lost its replica until the server lets it risk another one."""


class RemoteReplica(RoutedReplica):
    """A replica that the server keeps, from a connection to its end."""

    def __init__(self, facts: ReplicaFacts, load: Load, peer: Peer) -> None:
        super().__init__(facts.name, load)
        self.peer = peer
        self.is_adopting = True  # Its tokens may be here before the facts about their version.
        self.facts = facts
        self.verified = set(facts.verified)

    @property
    def is_ready(self) -> bool:
        return self.is_connected and self.facts.is_ready

    def update(self, facts: ReplicaFacts, recent: frozenset[int]) -> None:
        """Take new facts, and the `RoutingFacts.recent`. The cache is empty after a change of weights."""
        if self.facts.version != facts.version:
            self.load.forget()
        old = self.verified - recent  # Tokens of these may still wait here.
        self.facts, self.verified = facts, set(facts.verified) | (old if len(old) < MAX_RECENT else set())


class RemoteFleet(RoutedFleet):
    """The replicas of a policy as the facts list them. Keeps a connection to each."""

    def __init__(self, policy: PolicyId, connect: Callable[[ReplicaFacts], Awaitable[Peer]], changed: Changed) -> None:
        super().__init__(policy, changed)
        self.facts = RoutingFacts(policy)
        self.faults: dict[str, str] = {}
        """Listed replicas that must be ended, and why."""
        self._others: Mapping[str, Others] = {}
        """The work of other processes at replicas, by name."""
        self._connect = connect
        self._listed: dict[tuple[str, str], ReplicaFacts] = {}
        """By name and address: another fleet of the policy may use a name again."""
        self._connected: dict[tuple[str, str], RemoteReplica] = {}
        self._lives: dict[tuple[str, str], asyncio.Task[None]] = {}

    @property
    def replicas(self) -> list[RemoteReplica]:
        return [replica for replica in self._connected.values() if not replica.end.done()]

    def update(self, facts: RoutingFacts) -> None:
        self.facts, self.routes, self._failure = facts, facts.routes, facts.failure
        self._listed = {(one.name, one.address): one for one in facts.replicas}
        self.faults = {name: why for name, why in self.faults.items() if any(name == one for one, _ in self._listed)}
        for key in [key for key in self._lives if key not in self._listed]:
            self._lives.pop(key).cancel()
            if (gone := self._connected.pop(key, None)) is not None:
                self.end(gone, "is no longer listed", cause="work" if gone.name in facts.crashed else "unwanted")
        for key, one in self._listed.items():
            if (replica := self._connected.get(key)) is not None:
                replica.update(one, facts.recent)
            if key not in self._lives:
                self._lives[key] = asyncio.create_task(self._live(key))
        self._change()

    def set_others(self, others: Mapping[str, Others]) -> None:
        """Take the work that other processes have at replicas, by name."""
        self._others = others
        for replica in self.replicas:
            replica.load.others = self._others_at(replica.name).running
        self._change()

    def _others_at(self, name: str) -> Others:
        return self._others.get(name, Others())

    async def claim(self, replica: RoutedReplica) -> None:
        """Wait until the server granted the replica: else a completion that crashes replicas harms those of others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_SECONDS):
                while not (self._others_at(replica.name).may_risk or replica.end.done()):
                    await self._pulse.wait()

    def end(self, replica: RoutedReplica, why: str, *, cause: Cause, hung: bool = False) -> None:
        """Leave a replica. One that is at fault is reported, and the server ends it."""
        if cause == "replica" and not replica.end.done():
            self.faults[replica.name] = why
        super().end(replica, why, cause=cause, hung=hung)

    def work(self) -> dict[str, ReplicaWork]:
        return {
            one.name: ReplicaWork(len(one.load.running), one.load.num_suspects, one.peer.num_messages)
            for one in self.replicas
            if one.peer is not None
        }

    async def _live(self, key: tuple[str, str]) -> None:
        """Keep a connection to a replica until this is cancelled, or the replica is at fault."""
        failures = 0
        while key[0] not in self.faults:
            await asyncio.sleep(backoff(failures))
            failures += 1
            try:
                facts = self._listed[key]
                peer = await self._connect(facts)
            except (OSError, ComputeError) as error:
                if failures > 1:  # The first time, the facts that it ended are probably on their way.
                    log.warning("%s cannot be reached at %s: %s", *key, error)
                continue
            load = Load(facts.num_places, facts.cache_tokens)
            load.others = self._others_at(key[0]).running
            replica = self._connected[key] = RemoteReplica(self._listed[key], load, peer)
            peer.died.add_done_callback(partial(self._lost, replica))
            self._change()
            await asyncio.shield(replica.end)
            if peer.num_messages:
                failures = 0

    def _lost(self, replica: RemoteReplica, _: object) -> None:
        self.end(replica, "lost its connection", cause="work")


@dataclass(eq=False)
class RemotePolicy:
    """A policy whose facts the front got."""

    replicas: Replicas[RemoteFleet]
    num_tokens: int = 0
    """Tokens received since the last report."""
    num_reported: int = 0
    """Resumed completions that were reported."""


class RemoteSamplers:
    """Implements `compute.protocol.Sampler` for a front."""

    def __init__(self, name: str) -> None:
        """`name` is that of the front, as replicas see it."""
        self._name = name
        self._policies: dict[PolicyId, RemotePolicy] = {}
        self._threads = ThreadPoolExecutor(MAX_DIALS, "dial")

    # ---- from the server --------------------------------------------------------------------------------------------

    def update(self, facts: RoutingFacts) -> None:
        """Take the facts about a policy. One with the failure `PolicyRemoved` is forgotten, and its completions fail
        with that. Must be called in the event loop.
        """
        if facts.policy not in self._policies:
            make_fleet = partial(RemoteFleet, facts.policy, self._connect)
            self._policies[facts.policy] = RemotePolicy(Replicas(make_fleet))
        self._policies[facts.policy].replicas.fleet.update(facts)
        if isinstance(facts.failure, PolicyRemoved):
            del self._policies[facts.policy]

    def others(self, policy: PolicyId, others: Mapping[str, Others]) -> None:
        """Take the work that other processes have at each replica, by its name."""
        if policy in self._policies:
            self._policies[policy].replicas.fleet.set_others(others)

    def report(self) -> dict[PolicyId, FrontWork]:
        """Returns the present work, and what was counted since the last report."""
        return {policy: _work(found) for policy, found in self._policies.items()}

    async def close(self) -> None:
        """Leave all replicas; completions fail with `PolicyRemoved`. Idempotent."""
        for policy in list(self._policies):
            self.update(RoutingFacts(policy, failure=_removed(policy)))
        self._threads.shutdown(wait=False)

    # ---- completions ------------------------------------------------------------------------------------------------

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        """See `Sampler.sample`. Raises `WorkerDied` if no replica can be had."""
        found = self._policy(policy)
        async with aclosing(found.replicas.sample(token_ids, params)) as pieces:
            async for piece in pieces:
                found.num_tokens += len(piece.tokens)
                yield piece

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        return await self._policy(policy).replicas.score(token_ids, num_likeliest)

    def _policy(self, policy: PolicyId) -> RemotePolicy:
        if policy not in self._policies:
            raise _removed(policy)
        return self._policies[policy]

    async def _connect(self, facts: ReplicaFacts) -> Peer:
        """Connect to a replica. Raises `OSError`, and `ComputeError` for a refusal."""
        loop = asyncio.get_running_loop()
        dialled = loop.run_in_executor(self._threads, dial, facts.address, self._name, facts.secret)
        try:
            connection = await asyncio.shield(dialled)
        except asyncio.CancelledError:
            dialled.add_done_callback(_close)
            raise
        tune(connection, unanswered_seconds=UNANSWERED_SECONDS)
        return Peer(facts.name, *await asyncio.open_connection(sock=connection))


def _close(dialled: asyncio.Future[socket.socket]) -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()


def _removed(policy: PolicyId) -> PolicyRemoved:
    return PolicyRemoved(f"the server listed no replicas of policy {policy}")


def _work(found: RemotePolicy) -> FrontWork:
    replicas = found.replicas
    tokens, resumed = found.num_tokens, replicas.num_resumed - found.num_reported
    found.num_tokens, found.num_reported = 0, replicas.num_resumed
    fleet = replicas.fleet
    return FrontWork(replicas.num_waiting, tokens, resumed, fleet.work(), dict(fleet.faults))
