"""The ranks that host policies, as the server uses them, from their start to their end. No torch.

Several ranks learn one policy. Every request goes to every rank. The answer of rank 0 counts, and an error of any.
Ranks wait for each other, so the death of one ends all; the policy then gets new ranks.

One rank alone may also sample, for several policies. It handles requests in order, so the oldest one without an answer
is the one that it works on.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentjet.errors import AgentJetError, CheckpointError, HookHung, PolicyRemoved, WorkerDied, WorkerHung
from agentjet.processes.rpc import IDS, REASON_SECONDS, SENDING, LargeRequest, Peer, ProcessRequest, encode
from agentjet.processes.supervisor import Supervisor, Watchdog, first_of, time_limit
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import PolicyId, Sampled, SlowWork

Send = Callable[[Peer], Coroutine[Any, Any, Any]]
"""Sends a rank a request; returns its answer."""
Launch = Callable[[str], Coroutine[Any, Any, Peer]]
"""Starts the rank of that name; returns its connection. Raises `ConfigError` or `WorkerDied`."""

COMPUTE_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment of a process that computes. In a worker the user's own variables take precedence; ranks and replicas
always get these.

Threads sleep while they wait for each other. OpenMP's default spins for 7 ms, which makes everything several times
slower if agents or a second worker need the cores. cuBLAS is deterministic only with a workspace of fixed size.
"""
ANSWER_SECONDS = 10.0
"""Time for the other ranks to answer after one failed. One that waits for the failed rank would wait for ever."""
RESUMING = ("publish", "load", "add", "remove")
"""Requests after which no completion of the policy pauses."""
STATES = {
    "rendezvous": "meets the other ranks",
    "join": "meets the other ranks",
    "add": "loads the model",
    "load_batch": "receives a batch",
    "forward_backward": "computes gradients",
    "optim_step": "updates the weights",
    "publish": "writes the weights for the samplers",
    "save": "writes a checkpoint",
    "load": "loads a checkpoint",
    "export": "writes an export",
}
"""The states of a rank, by request."""


@dataclass(frozen=True, slots=True)
class Room:
    """The place of a policy's processes."""

    supervisor: Supervisor
    log_folder: Path
    gpus: int = 0
    """GPUs of each rank: 1, or 0 without GPUs."""

    def log_path(self, name: str) -> Path:
        return self.log_folder / f"{name.replace('/', '-')}.log"


class Ranks:
    """Ranks that start and end together. `died` is done when they ended unexpectedly."""

    def __init__(
        self, names: Sequence[str], launch: Launch, watchdog: Watchdog, policy: PolicyId | None = None
    ) -> None:
        """`names` are those of the processes, by rank. `policy` is the one that they learn; None for several.

        If none of them works at a request for the time of the watchdog, all end.
        """
        self.names = tuple(names)
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self.request = ""
        """The request that the ranks work on, or ''."""
        self._policy = policy
        self._launch = launch
        self._watchdog = watchdog
        self._watching: asyncio.Task[None] | None = None
        self._hung = False
        self._starting = asyncio.Lock()
        self._launches: list[asyncio.Task[Peer]] = []
        self._peers: list[Peer] = []
        self._fallen: Peer | None = None
        """The first rank that ended."""
        self._end: WorkerDied | None = None
        self._ending: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._unpublished: set[PolicyId] = set()
        """Policies that were asked for an `optim_step` and not published since: their completions and scores wait."""
        self._pulse = asyncio.Event()
        """Wakes scores that wait."""

    @property
    def has_ended(self) -> bool:
        """True after the end of a rank, and after `close`."""
        return self._end is not None or self._fallen is not None

    @property
    def work(self) -> SlowWork | None:
        """Progress of slow work of rank 0, if it reported any."""
        return self._peers[0].work if self._peers else None

    async def start(self) -> None:
        """Start the ranks. Idempotent. Raises the errors of a launch, and `PolicyRemoved` after `close`."""
        async with self._starting:
            if self._peers or self._end is not None:
                return self._check()
            self._launches = [asyncio.create_task(self._launch(name)) for name in self.names]
            try:
                peers = await asyncio.gather(*self._launches)
            except BaseException as error:
                for launch in self._launches:
                    launch.cancel()
                done = await asyncio.gather(*self._launches, return_exceptions=True)
                await asyncio.gather(*(peer.stop() for peer in done if isinstance(peer, Peer)))
                if self._end is None and isinstance(error, AgentJetError):
                    self._end = WorkerDied(str(error))
                if self._end is not None and isinstance(error, asyncio.CancelledError):
                    raise copy.copy(self._end) from None  # `close` cancelled the launches.
                raise
            self._peers = peers
            for peer in peers:
                peer.died.add_done_callback(partial(self._fall, peer))
            self._watching = asyncio.create_task(self._watch())

    async def join(self) -> None:
        """Let the ranks meet as a group of `torch.distributed`, before anything else is requested."""
        address = await self._ask_all("rendezvous", [self._send("rendezvous", self._policy)])
        count, timeout = len(self._peers), self._watchdog.timeout
        await self._ask_all(
            "join", [self._send("join", self._policy, n, count, address, timeout) for n in range(count)]
        )

    async def ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """Send a request to every rank; returns the answer of rank 0. Raises the error of any, or `WorkerDied`."""
        if op == "optim_step":
            self._unpublished.add(policy)
        while op == "score" and policy in self._unpublished and not self.has_ended:
            await self._pulse.wait()
        result = await self._ask_all(op, [self._send(op, policy, *args)] * len(self._peers))
        if op in RESUMING:
            self._unpublished.discard(policy)
            self._wake()
        return result

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        """Send a batch to every rank, encoded once."""
        request = ProcessRequest("load_batch", next(IDS), policy, (batch,))
        large = await LargeRequest.encoded(request)
        await self._ask_all(request.op, [lambda peer: peer.send_large(large)] * len(self._peers))

    async def sample(self, policy: PolicyId, *args: Any) -> AsyncGenerator[Sampled, None]:
        """See `Peer.sample`. Raises `WorkerDied` with the reason of the end."""
        self._check()
        try:
            async with contextlib.aclosing(self._peers[0].sample(policy, *args)) as pieces:
                async for piece in pieces:
                    yield piece
        except WorkerDied as error:
            raise error if _is_answer(error) else await self._reason(self._peers[0]) from None

    async def close(self) -> None:
        """End the ranks and wait for the end of their processes. Idempotent."""
        if self._end is None:
            what = f"the policy {self._policy} was removed" if self._policy else f"{self.names[0]} was ended"
            self._end = PolicyRemoved(what)
            self._wake()
        for task in (*self._launches, self._watching):
            if task is not None:
                task.cancel()
        async with self._starting:  # Launches that were cancelled stop their processes.
            await self._stop()

    def _wake(self) -> None:
        self._pulse.set()
        self._pulse.clear()

    async def _stop(self) -> None:
        """Kill the processes that have not ended, and wait for their end."""
        await asyncio.gather(*(peer.stop() for peer in self._peers))

    def _check(self) -> None:
        """Raises the reason of the end if they ended, and `WorkerDied` if they have not started."""
        if self._end is not None:
            raise copy.copy(self._end)
        if not self._peers:
            raise WorkerDied(f"{self.names[0]} is not running")

    def _send(self, op: str, policy: PolicyId | None, *args: Any) -> Send:
        """Returns a function that sends a request, which is encoded once for all ranks."""
        request = ProcessRequest(op, next(IDS), policy, args)
        message = encode(request)
        return lambda peer: peer.send(request, message)

    async def _ask_all(self, op: str, sends: Sequence[Send]) -> Any:
        """Send the first ranks a request each; returns the answer of rank 0."""
        self._check()
        self.request = op
        asked = {asyncio.create_task(send(peer)): peer for peer, send in zip(self._peers, sends, strict=False)}
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in asked):
                with contextlib.suppress(TimeoutError):
                    async with time_limit(ANSWER_SECONDS, [peer.process for peer in self._peers]):
                        await asyncio.wait(asked)
                raise await self._failure(asked)
            return next(iter(asked)).result()
        finally:
            self.request = ""
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _failure(self, asked: dict[asyncio.Task[Any], Peer]) -> Exception:
        """Returns the error of a request. Ends the ranks if they do not agree."""
        errors = {
            peer: error
            for task, peer in asked.items()
            if task.done() and isinstance(error := task.exception(), AgentJetError)
        }
        own = {peer: error for peer, error in errors.items() if _is_answer(error)}
        if len(errors) == len(asked) == len(own):
            return next(iter(own.values()))
        # Some succeeded or wait for ever: their states may differ.
        end = await self._reason(next(iter(own or errors)))
        error = own.get(self._fallen) if self._fallen is not None else None
        # A checkpoint that one rank cannot read is not damaged: other ranks read it.
        return end if error is None or isinstance(error, CheckpointError) else error

    async def _reason(self, peer: Peer) -> WorkerDied:
        """End the ranks because of this one, unless they end already; returns the reason of the end."""
        self._fall(peer)
        if self._ending is not None:
            await asyncio.shield(self._ending)
        assert self._end is not None
        return copy.copy(self._end)

    async def _watch(self) -> None:
        """End the ranks if they hang. Ranks wait for each other, so one that hangs makes all silent."""

        def has_work() -> bool:
            # Paused completions may hold the places of others, so no completion counts meanwhile.
            found = (one for peer in self._peers for one in peer.pending.values())
            return any(one.op != "sample" or not self._unpublished for one in found)

        processes = [peer.process for peer in self._peers]
        await self._watchdog.hang(lambda: sum(peer.num_messages for peer in self._peers), has_work, processes)
        self._hung = True
        self._fall(min(self._peers, key=lambda peer: peer.heard_at))

    def _fall(self, peer: Peer, _: object = None) -> None:
        """End the ranks, because one ended or cannot go on."""
        if self._fallen is None and self._end is None:
            self._fallen = peer
            self._wake()
            self._ending = asyncio.create_task(self._end_all(peer))

    async def _end_all(self, fallen: Peer) -> None:
        reason = f"{fallen.name}: its connection ended"
        if self._hung:
            silent = f"made no progress for {self._watchdog.timeout:g} s (server.worker_timeout)"
            reason = f"{fallen.name}: the ranks {silent}; this one did so first"
            if len(self.names) == 1:
                reason = f"{fallen.name} {silent} and was killed"
            reason += f"; see {fallen.process.log_path}" if fallen.process is not None else ""
        elif not fallen.died.done():
            reason = f"{fallen.name} failed alone, so the ranks do not agree"
        elif fallen.process is not None:
            ended = fallen.process.ended
            await first_of(ended, timeout=REASON_SECONDS, processes=[fallen.process])
            reason = f"{fallen.name} {ended.result().reason}" if ended.done() else reason
        for peer in self._peers:
            peer.close()
        self._stopping = asyncio.create_task(self._stop())  # One that hangs does not notice the end of its connection.
        if self._end is None and isinstance(fallen.fatal, HookHung):
            self._end = fallen.fatal
        if self._end is None:
            self._end = (WorkerHung if self._hung else WorkerDied)(reason, during=self._during(fallen))
        if not self.died.done() and not isinstance(self._end, PolicyRemoved):
            self.died.set_result(self._end)

    def _during(self, fallen: Peer) -> str:
        """Returns the policy whose request the rank handled, or a policy of the only run that it sampled for, or ''."""
        if self._policy is not None:
            return str(self._policy)
        unanswered = [one for one in fallen.unanswered if one.policy is not None and one.op != SENDING]
        if (operation := next((one for one in unanswered if one.op != "sample"), None)) is not None:
            return str(operation.policy)
        policies = [one.policy for one in unanswered if one.policy is not None]
        return str(policies[0]) if len({policy.run for policy in policies}) == 1 else ""


def _is_answer(error: AgentJetError) -> bool:
    """True for the error of a request, and False for that of a connection or process that ended."""
    return not isinstance(error, WorkerDied) or isinstance(error, PolicyRemoved)
