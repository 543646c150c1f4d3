"""The learner group: the ranks of one policy as the gateway uses them, from their start to their end. No torch.

Every request goes to every rank. The answer of rank 0 counts, and an error of any. Ranks wait for each other, so the
death of one ends all; the policy then gets a new group.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from agentjet.compute.channel import LargeRequest, WorkerRequest, encode
from agentjet.compute.cluster.hub import Peer
from agentjet.compute.cluster.site import REASON_SECONDS, Site
from agentjet.compute.embedded.backend import Watchdog
from agentjet.config import ComputeConfig, ModelConfig
from agentjet.errors import AgentJetError, CheckpointError, HookHung, PolicyRemoved, WorkerDied, WorkerHung
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import ModelInfo, PolicyId

Send = Callable[[Peer], Coroutine[Any, Any, Any]]
"""Sends a rank a request; returns its answer."""
Launch = Callable[[str, int], Coroutine[Any, Any, Peer]]
"""Starts the rank of that name and number; returns its connection. Raises `ConfigError` or `WorkerDied`."""

ANSWER_SECONDS = 10.0
"""Time for the other ranks to answer after one failed. One that waits for the failed rank would wait for ever."""
HUNG = "the ranks did no work for {:g} s (server.worker_timeout); this one fell silent first"


class LearnerGroup:
    """The ranks of a policy. `died` is done when they ended unexpectedly."""

    def __init__(
        self,
        policy: PolicyId,
        names: Sequence[str],
        launch: Launch,
        site: Site,
        *,
        timeout: float,
        hook_timeout: float = math.inf,
    ) -> None:
        """`names` are those of the processes at `site`, by rank.

        If none works for `timeout` seconds at a request, all end.
        """
        self.names = tuple(names)
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self.request = ""
        """The request that the ranks work on, or ''."""
        self._policy = policy
        self._launch = launch
        self._site = site
        self._timeout = timeout
        self._hook_timeout = hook_timeout
        self._watching: asyncio.Task[None] | None = None
        self._hung = False
        self._peers: list[Peer] = []
        self._fallen: Peer | None = None
        """The first rank that ended."""
        self._end: WorkerDied | None = None
        self._ending: asyncio.Task[None] | None = None
        self._launches: list[asyncio.Task[Peer]] = []
        self._ids = itertools.count(1)

    async def start(self, model: ModelConfig, settings: ComputeConfig) -> ModelInfo:
        """Start the ranks and load the model. Raises `ConfigError`, and `WorkerDied` if a rank ends."""
        self._launches = [asyncio.create_task(self._launch(name, rank)) for rank, name in enumerate(self.names)]
        try:
            self._peers = await asyncio.gather(*self._launches)
        except BaseException:
            for launch in self._launches:
                launch.cancel()
            await asyncio.gather(*self._launches, return_exceptions=True)
            raise
        if self._end is not None:
            raise copy.copy(self._end)
        for peer in self._peers:
            peer.died.add_done_callback(partial(self._on_death, peer))
        watchdog, count = Watchdog(self._timeout), len(self._peers)
        self._watching = asyncio.create_task(self._watch(watchdog))
        address = await self._ask_all("rendezvous", [self._send("rendezvous")])
        joins = [self._send("join", n, count, address, watchdog.interval, self._hook_timeout) for n in range(count)]
        await self._ask_all("join", joins)
        info: ModelInfo = await self.ask("add", model, settings)
        return info

    async def ask(self, op: str, *args: Any) -> Any:
        """Send a request to every rank; returns the answer of rank 0. Raises the error of any, or `WorkerDied`."""
        return await self._ask_all(op, [self._send(op, *args)] * len(self._peers))

    async def load_batch(self, batch: TrainingBatch) -> None:
        """Send a batch to every rank, encoded once."""
        request = WorkerRequest("load_batch", next(self._ids), self._policy, (batch,))
        large = await LargeRequest.encoded(request)
        await self._ask_all(request.op, [lambda peer: peer.send_large(large)] * len(self._peers))

    async def close(self) -> None:
        """End the ranks and wait for the end of their processes. Idempotent."""
        if self._end is None:
            self._end = PolicyRemoved(f"the policy {self._policy} was removed")
        for task in (*self._launches, self._watching):
            if task is not None:
                task.cancel()
        for peer in self._peers:
            peer.close()
        await asyncio.gather(*(self._site.stop(name) for name in self.names))

    def _send(self, op: str, *args: Any) -> Send:
        """Returns a function that sends a request, which is encoded once for all ranks."""
        request = WorkerRequest(op, next(self._ids), self._policy, args)
        message = encode(request)
        return lambda peer: peer.send(request, message)

    async def _ask_all(self, op: str, sends: Sequence[Send]) -> Any:
        """Send the first ranks a request each; returns the answer of rank 0."""
        if self._end is not None:
            raise copy.copy(self._end)
        self.request = op
        asked = {asyncio.create_task(send(peer)): peer for peer, send in zip(self._peers, sends, strict=False)}
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in asked):
                await asyncio.wait(asked, timeout=ANSWER_SECONDS)
                raise await self._failure(asked)
            return next(iter(asked)).result()
        finally:
            self.request = ""
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _failure(self, asked: dict[asyncio.Task[Any], Peer]) -> Exception:
        """Returns the error of a request. Ends the group if the ranks do not agree."""
        errors = {
            peer: error
            for task, peer in asked.items()
            if task.done() and isinstance(error := task.exception(), AgentJetError)
        }
        own = {peer: error for peer, error in errors.items() if not isinstance(error, WorkerDied)}
        if len(errors) == len(asked) == len(own):
            return next(iter(own.values()))
        if self._fallen is None and self._end is not None:  # `close` was called.
            return copy.copy(self._end)
        if self._fallen is None:  # Some succeeded or wait for ever: their states may differ.
            self._fall(next(iter(own or errors)))
        assert self._fallen is not None and self._ending is not None
        await asyncio.shield(self._ending)
        assert self._end is not None
        error = own.get(self._fallen)
        # A checkpoint that one rank cannot read is not damaged: other ranks read it.
        return copy.copy(self._end) if error is None or isinstance(error, CheckpointError) else error

    async def _watch(self, watchdog: Watchdog) -> None:
        """End the group if it hangs. Ranks wait for each other, so one that hangs makes all silent."""
        now = asyncio.get_running_loop().time
        while self._fallen is None:
            checked = now()
            await asyncio.sleep(watchdog.interval)
            has_work = any(peer.pending for peer in self._peers)
            if watchdog.hangs(now() - checked, self._num_messages, has_work=has_work):
                self._hung = True
                self._fall(min(self._peers, key=lambda peer: peer.heard_at))

    def _num_messages(self) -> float:
        return sum(peer.num_messages for peer in self._peers)

    def _on_death(self, peer: Peer, died: asyncio.Future[WorkerDied]) -> None:
        self._fall(peer)

    def _fall(self, peer: Peer) -> None:
        """End the group, because a rank ended or cannot go on."""
        if self._fallen is None and self._end is None:
            self._fallen = peer
            self._ending = asyncio.create_task(self._end_all(peer))

    async def _end_all(self, fallen: Peer) -> None:
        reason = f"{fallen.name}: its connection ended"
        if fallen.died.done() and (ended := self._site.ended(fallen.name)) is not None:
            done, _ = await asyncio.wait([ended], timeout=REASON_SECONDS)
            reason = f"{fallen.name} {ended.result()}" if done else reason
        elif self._hung:
            reason = f"{fallen.name}: {HUNG.format(self._timeout)}"
        elif not fallen.died.done():
            reason = f"{fallen.name} failed alone, so the ranks do not agree"
        if self._end is None and isinstance(fallen.fatal, HookHung):
            self._end = fallen.fatal
        if self._end is None:
            kind = WorkerHung if self._hung else WorkerDied
            self._end = kind(reason, during=str(self._policy))
        for peer in self._peers:
            peer.close()
        if not self.died.done():
            self.died.set_result(self._end)
