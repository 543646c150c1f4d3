"""The sampler replicas of one policy, as the gateway uses them: completions go to replicas, and outlive them.

If a replica ends, each of its completions continues on another one: from the exact tokens that were received, with the
remaining `max_tokens` and a seed derived from its own and the position. Tokens that were not received were not passed
on either. While no replica can take a completion, it waits. Tokens carry the version that sampled them, so a completion
may have several versions; a piece has one.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from agentjet.compute.cluster.fleet import Changed, Fleet
from agentjet.compute.cluster.routing import ReplicaHandle, RoutedCompletion, choose
from agentjet.errors import AgentJetError, ComputeError, WorkerDied
from agentjet.types import ProcessStatus, Sampled, SamplingParams, TokenScore

MAX_BLAME, MAX_LOSSES = 4, 12
"""A completion fails if it crashed so many replicas in a row, or lost so many, without a token between them.

It may have crashed a replica that ended alone. If others ended with it, or if it hung, there is another cause. Three
crashes are not enough: in a run of `bench.scaling.faults`, three replicas were killed in three seconds.
"""
LOSS_SECONDS = 0.25
"""Replicas that end within this time end together. A completion waits longer before it tries its next replica."""
MAX_WAIT = 8
"""Longest such wait, as a multiple."""
SILENT_SECONDS = 2.0
"""A replica that has work and was silent for so long gets more only if there is no other: its machine may be gone."""


class Replicas:
    """Routes the completions of a policy to its replicas. Its methods are those of `Sampler` for one policy."""

    def __init__(self, make_fleet: Callable[[Changed], Fleet]) -> None:
        self._waiting: OrderedDict[RoutedCompletion, asyncio.Future[ReplicaHandle]] = OrderedDict()
        """Work that no replica has a place for, in the order in which it gets one."""
        self._num_resumed = 0
        self.fleet = make_fleet(self._assign)

    async def sample(self, token_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Sampled, None]:
        """See `Sampler.sample`. Raises `ComputeError` for a completion that several replicas died of."""
        work, version = RoutedCompletion(np.asarray(token_ids, np.int32)), 0
        while len(work.sampled) < params.max_tokens:
            replica, received = await self._place(work), len(work.sampled)
            assert replica.peer is not None
            try:
                pieces = replica.peer.sample(self.fleet.policy, work.tokens, _rest(params, received), received)
                async with aclosing(pieces):
                    async for piece in pieces:
                        await self.fleet.confirm(replica, piece.policy_version)
                        work.sampled += piece.tokens
                        version = piece.policy_version
                        work.losses = work.blame = 0
                        yield piece
                return
            except WorkerDied:
                await self._leave_dead(replica, work, has_progressed=len(work.sampled) > received)
            finally:
                self._leave(replica, work)
        yield Sampled((), (), version, "length")  # The replica died between the last token and its finish reason.

    async def score(self, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """See `Sampler.score`."""
        work = RoutedCompletion(np.asarray(token_ids, np.int32), uses_cache=False)
        while True:
            replica = await self._place(work)
            assert replica.peer is not None
            try:
                found: list[TokenScore] = await replica.peer.ask("score", self.fleet.policy, work.prompt, num_likeliest)
                return found
            except WorkerDied:
                await self._leave_dead(replica, work, has_progressed=False)
            finally:
                self._leave(replica, work)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the policy's sampling."""
        serving = [replica for replica in self.fleet.replicas if replica.version is not None]
        return {
            "sampler/replicas": float(len(serving)),
            "sampler/replicas_wanted": float(self.fleet.count),
            "sampler/resumed": float(self._num_resumed),
            "sampler/publish_seconds": self.fleet.publish_seconds,
            "sampler/pause_seconds": self.fleet.pause_seconds,
            "sampler/probe_error": self.fleet.probe_error,
        }

    @property
    def num_running(self) -> int:
        """Completions and scorings that replicas have."""
        return sum(len(replica.load.running) for replica in self.fleet.replicas)

    @property
    def num_waiting(self) -> int:
        """Completions and scorings that wait for a place at a replica."""
        return len(self._waiting)

    def status(self) -> list[ProcessStatus]:
        """Returns the replicas, oldest first, without their places."""
        return [_status(replica) for replica in self.fleet.replicas]

    # ---- placement --------------------------------------------------------------------------------------------------

    async def _place(self, work: RoutedCompletion) -> ReplicaHandle:
        """Wait for a place at a live replica; returns it. Raises the failure of the policy, or `PolicyRemoved`."""
        while True:
            replica = await self._next_place(work)
            if replica.is_ready:
                return replica
            self._leave(replica, work)  # It died since it got the work.

    async def _next_place(self, work: RoutedCompletion) -> ReplicaHandle:
        self.fleet.check()
        work.update_keys()
        future: asyncio.Future[ReplicaHandle] = asyncio.get_running_loop().create_future()
        self._waiting[work] = future
        if work.sampled or work.losses:
            self._waiting.move_to_end(work, last=False)
        self._assign()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._leave(future.result(), work)
            raise
        finally:
            self._waiting.pop(work, None)

    def _assign(self) -> None:
        """Give waiting work the places that there are, oldest first."""
        if not self._waiting:
            return
        try:
            self.fleet.check()
        except AgentJetError as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(copy.copy(error))
            return
        now = asyncio.get_running_loop().time()
        ready = [replica for replica in self.fleet.replicas if replica.is_ready]
        heard = [replica for replica in ready if replica.silence(now) < SILENT_SECONDS]
        loads = {replica: replica.load for replica in heard or ready}
        placed: list[RoutedCompletion] = []
        for work, future in self._waiting.items():
            if future.done():
                continue
            if (replica := choose(loads, work)) is not None:
                if not replica.load.running:
                    replica.busy_since = now
                replica.load.add(work)
                future.set_result(replica)
                placed.append(work)
            elif not work.losses:  # Work that lost a replica may be waiting for a place of its own kind.
                break
        for work in placed:
            del self._waiting[work]

    def _leave(self, replica: ReplicaHandle, work: RoutedCompletion) -> None:
        replica.load.remove(work)
        self._assign()

    async def _leave_dead(self, replica: ReplicaHandle, work: RoutedCompletion, *, has_progressed: bool) -> None:
        """Prepare work for another replica. Raises `ComputeError` if it probably kills replicas."""
        self.fleet.check()
        self._num_resumed += 1
        end = await asyncio.shield(replica.end)  # Its requests fail just before.
        if has_progressed or end.cause == "unwanted":
            return
        work.losses += 1
        self._leave(replica, work)
        await asyncio.sleep(LOSS_SECONDS * min(2 * work.losses, MAX_WAIT))
        work.blame += end.cause == "work" and self.fleet.ended_alone(end, LOSS_SECONDS)
        if work.blame >= MAX_BLAME or work.losses >= MAX_LOSSES:
            raise ComputeError(f"{work.losses} replicas in a row ended before they sent a token of this completion")


def _status(replica: ReplicaHandle) -> ProcessStatus:
    running = len(replica.load.running)
    if replica.peer is None:
        state = "starts"
    elif replica.is_adopting:
        state = "loads weights"
    elif replica.version is None:
        state = replica.problem or "waits for weights"
    elif replica.is_suspended:
        state = replica.problem or "is suspended until the next publish"
    else:
        state = replica.problem or ("samples" if running else "idle")
    is_ready = replica.version is not None
    return ProcessStatus(
        replica.name, "replica", state, version=replica.version, completions=running, is_ready=is_ready
    )


def derived_seed(seed: int, position: int) -> int:
    """Returns the seed of a completion that continues at a position: number of tokens received before."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _rest(params: SamplingParams, received: int) -> SamplingParams:
    """Returns the parameters of a completion after the received tokens."""
    if not received:
        return params
    return replace(params, max_tokens=params.max_tokens - received, seed=derived_seed(params.seed, received))
