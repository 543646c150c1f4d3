"""`FrontProcesses`: starts and watches the front processes of a server, and carries messages to them."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agentjet.compute.backend import ProcessCompute
from agentjet.config import ServeConfig
from agentjet.errors import AgentJetError, Unavailable, WorkerDied
from agentjet.fronts.process import SOCKET, FrontReport, FrontSettings, ask_for_batch
from agentjet.processes.guardian import Launch
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import LocalPlacement, Supervisor, Watchdog, first_of, time_limit
from agentjet.protocol import FrontView
from agentjet.server.fronts import FrontedCalls, without_job
from agentjet.server.run_policies import all_of
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import PolicyId

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "agentjet.fronts")
REPORT_SECONDS = 0.5
"""Seconds between two reports of a front."""
START_SECONDS = 60.0
"""Time for a front to connect, and to answer each message before it serves agents. Its imports take 2 s of CPU time."""
SILENT_SECONDS = 2.0
"""Time without a report from which a front is called silent."""
HUNG_SECONDS = 20.0
"""A front that does not report for so long is killed and replaced."""
SETTLE_SECONDS = 0.02
"""A fleet changes several times in a row."""
RETRY_SECONDS = 0.05
"""Pause before a request that a front did not answer is sent again."""
MAX_BATCH_DEATHS = 2
"""Fronts that may end while they build the forests of a batch, before that is a failure of the batch."""
MAX_DELAY = 10.0
"""Longest wait in seconds before a front is started again. It is doubled with each end before the first report."""


@dataclass(eq=False)
class FrontHandle:
    """A front, from the first start of its process to the end of the server."""

    index: int
    listener: socket.socket
    peer: Peer | None = None
    """The connection to the present process; None while there is none."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the process answers calls."""
    starts: int = 0
    reported: float = 0.0
    """Time of the last report, by the monotonic clock."""
    calls: int = 0
    load: float = 0.0
    """CPU seconds a second between the last two reports."""
    lag: float = 0.0
    refusal: str = ""
    """The reason why the file of a run takes no calls, in the last report; empty if all take them."""

    @property
    def present_lag(self) -> float:
        """Longest delay in seconds of the event loop in the last report, or that of the next report."""
        overdue = time.monotonic() - self.reported - REPORT_SECONDS
        return max(self.lag, overdue) if self.ready.is_set() else 0.0

    @property
    def problem(self) -> str:
        """The reason why it answers no calls now, in words; empty if it answers."""
        if not self.ready.is_set():
            return "starts"
        seconds = time.monotonic() - self.reported
        return f"silent for {seconds:.0f} s" if seconds >= SILENT_SECONDS else self.refusal


class FrontProcesses:
    """See `server.fronts.Fronts`."""

    def __init__(
        self,
        config: ServeConfig,
        compute: ProcessCompute,
        listeners: Sequence[socket.socket],
        clock: Callable[[], float],
    ) -> None:
        """`listeners` are the open sockets of the fronts' ports."""
        self._config = config
        self._compute = compute
        self._clock = clock
        self._handles = [FrontHandle(index, listener) for index, listener in enumerate(listeners)]
        self._supervisor: Supervisor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.runs: dict[str, FrontedCalls] = {}
        self._changed: set[PolicyId] = set()
        """Policies whose replicas changed a moment ago."""
        compute.on_replicas = self._replicas_changed

    def __len__(self) -> int:
        return len(self._handles)

    def start(self) -> None:
        self._supervisor = Supervisor("127.0.0.1", LocalPlacement(list))
        lives = [asyncio.create_task(self._live(handle)) for handle in self._handles]
        self._tasks = [*lives, asyncio.create_task(self._keep_leases())]

    async def close(self) -> None:
        self._closing = True
        for task in (*self._tasks, *self._sending):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._sending, return_exceptions=True)
        if self._supervisor is not None:
            await self._supervisor.close()

    def address(self, front: int, url: str) -> str:
        if template := self._config.server.front_url:
            return template.replace("{front}", str(front)).rstrip("/")
        scheme, _, rest = url.partition("://")
        host = rest.partition("/")[0]
        host = host.rpartition(":")[0] if host.rpartition("]")[2].count(":") else host
        return f"{scheme}://{host}:{self._handles[front].listener.getsockname()[1]}"

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self.address(one.index, self._url(one)) for one in self._handles)

    def views(self) -> list[FrontView]:
        return [
            FrontView(
                front=one.index,
                ready=one.ready.is_set(),
                calls=one.calls,
                load=one.load,
                lag=one.present_lag,
                starts=one.starts,
                problem=one.problem,
            )
            for one in self._handles
        ]

    # ---- messages ---------------------------------------------------------------------------------------------------

    async def ask(self, front: int, op: str, *args: Any) -> Any:
        handle = self._handles[front]
        while True:
            await handle.ready.wait()
            if (peer := handle.peer) is not None:
                with suppress(WorkerDied):
                    return await peer.ask(op, None, *args)
            if self._closing:
                raise Unavailable("The server is being stopped.", code="server_stopping", retry_after=10.0)
            await asyncio.sleep(RETRY_SECONDS)

    def tell(self, op: str, *args: Any) -> None:
        for handle in self._handles:
            if handle.peer is not None:
                self._send(handle.peer, op, *args)

    async def ask_all(self, op: str, *args: Any) -> None:
        async def ask(peer: Peer) -> None:
            with suppress(WorkerDied):
                await peer.ask(op, None, *args)

        await all_of(ask(one.peer) for one in self._handles if one.peer is not None)

    def later(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    async def batch(self, run: str, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        """Raises `WorkerDied` if `MAX_BATCH_DEATHS` fronts end during it: it may need more memory than there is."""
        dead: set[Peer] = set()
        while True:
            handle = min(self._handles, key=lambda one: (bool(one.problem), one.load))
            if (peer := handle.peer) is not None and handle.ready.is_set():  # While all start, any may be the first.
                try:
                    return await ask_for_batch(peer.ask, run, batch_id)
                except WorkerDied as error:
                    dead.add(peer)
                    if len(dead) == MAX_BATCH_DEATHS:
                        raise WorkerDied(f"{error}, while it built the forests of batch {batch_id}") from error
            await asyncio.sleep(RETRY_SECONDS)

    def _send(self, peer: Peer, op: str, *args: Any) -> None:
        async def send() -> None:
            with suppress(WorkerDied):
                await peer.ask(op, None, *args)

        self.later(send())

    def _sent(self, task: asyncio.Task[Any]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a message to or from a front failed: %s", error, exc_info=error)

    def _replicas_changed(self, policy: PolicyId) -> None:
        """Sends the fronts the replicas of a policy, after further changes of the same moment."""
        if policy not in self._changed:
            self._changed.add(policy)
            asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._tell_replicas, policy)

    def _tell_replicas(self, policy: PolicyId) -> None:
        self._changed.discard(policy)
        self.tell("replicas", self._compute.replicas(policy))

    # ---- one front --------------------------------------------------------------------------------------------------

    async def _live(self, handle: FrontHandle) -> None:
        """Keeps a front alive. Boundary: a failure ends one process."""
        delay = 0.0
        while True:
            reported, why, bug = handle.reported, "", None
            try:
                await self._serve(handle)
            except Exception as error:
                why, bug = str(error), None if isinstance(error, AgentJetError | OSError) else error
            finally:
                handle.ready.clear()
                handle.calls, handle.load, handle.refusal = 0, 0.0, ""
                peer, handle.peer = handle.peer, None
                if peer is not None:
                    has_ended, how = peer.died.done(), await peer.stop()
                    why = f"{peer.name} {how}" if has_ended else why
                self._compute.front_gone(handle.index)
                for run in self.runs.values():
                    run.gone(handle.index)
            log.warning("front %d: %s; it is replaced", handle.index, why or type(bug).__name__, exc_info=bug)
            delay = 0.0 if handle.reported != reported else min(MAX_DELAY, max(0.25, 2 * delay))
            await asyncio.sleep(delay)

    async def _serve(self, handle: FrontHandle) -> None:
        """Starts a process and reads its reports until it ends or hangs, which raises `WorkerDied`."""
        assert self._supervisor is not None
        name = f"front-{handle.index}"
        number = handle.listener.fileno()
        path = self._config.server.data_dir.resolve() / "logs" / f"{name}.log"
        launch = Launch(name, COMMAND, path, {SOCKET: str(number)}, sockets=[number])
        handle.starts += 1
        peer = await self._supervisor.start(launch, timeout=START_SECONDS)
        handle.peer = peer

        async def prepare(op: str, *args: Any) -> Any:
            try:
                async with time_limit(START_SECONDS, [peer.process]):
                    return await peer.ask(op, None, *args)
            except TimeoutError:
                raise WorkerDied(f"{name} did not answer {op!r} for {START_SECONDS:g} s") from None

        offset = self._clock() - time.monotonic()
        settings = FrontSettings(handle.index, self.addresses, without_job(self._config), offset)
        await prepare("begin", settings)
        for run in list(self.runs.values()):  # Runs and policies come and go meanwhile: all fronts are told.
            if run in self.runs.values():
                await prepare("open", *run.opening())
        for policy in list(self._compute.policies):
            await prepare("replicas", self._compute.replicas(policy))
        await prepare("listen")
        handle.reported = time.monotonic()
        handle.ready.set()
        reading = asyncio.create_task(self._read_reports(handle, peer))
        watching = Watchdog(HUNG_SECONDS).hang(lambda: peer.num_messages, lambda: bool(peer.pending), [peer.process])
        hang = asyncio.create_task(watching)
        try:
            await first_of(reading, hang, peer.died)  # A report may be due in half a second only.
            if reading.done():
                reading.result()
            raise peer.died.result() if peer.died.done() else WorkerDied(f"{name} sent nothing for {HUNG_SECONDS:g} s")
        finally:
            reading.cancel()
            hang.cancel()
            await asyncio.gather(reading, hang, return_exceptions=True)

    async def _read_reports(self, handle: FrontHandle, peer: Peer) -> None:
        """Raises `WorkerDied` when the process ends."""
        used = math.inf  # The first report has the CPU time of the start.
        while True:
            report: FrontReport = await peer.ask("report", None, self._compute.others(handle.index))
            now = time.monotonic()
            elapsed = max(1e-3, now - handle.reported)
            handle.load, handle.lag = max(0.0, report.cpu_seconds - used) / elapsed, report.lag
            handle.reported, used = now, report.cpu_seconds
            handle.calls = sum(run.num_calls for run in report.runs.values())
            handle.refusal = next((run.refusal for run in report.runs.values() if run.refusal), "")
            self._compute.heard(handle.index, report.work)
            for name, found in report.runs.items():
                if name in self.runs:
                    self.runs[name].heard(handle.index, found)
            await asyncio.sleep(REPORT_SECONDS)

    def _url(self, handle: FrontHandle) -> str:
        host = handle.listener.getsockname()[0]
        return f"{'https' if self._config.server.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}"

    async def _keep_leases(self) -> None:
        """Renews the leases of episodes whose front answers no calls: their agents may be active."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            silent = {handle.index for handle in self._handles if handle.problem}
            for run in self.runs.values() if silent else ():
                run.renew_leases(silent)
