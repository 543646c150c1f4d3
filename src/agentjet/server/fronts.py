"""The front processes of a server: `Fronts` starts and watches them, `FrontedCalls` are the calls of one run there.

Invariants:

* a call belongs to the front of its episode, and no other process records it;
* a finished episode has all of its calls on disk before its reward is. The front reports their counts;
* a front that dies or hangs is replaced. Its calls that are under way end with a retryable error, or with the end of
  their connection. The leases of its episodes stand still until the next one answers;
* what the gate of a run lets in, it lets in on all fronts: `FrontGate` waits for an answer of each.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentjet.compute.backend import ProcessCompute
from agentjet.config import JobConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, Later, RequestError, Unavailable, WorkerDied
from agentjet.front.concurrency import Gate
from agentjet.front.process import SOCKET, FrontReport, FrontSettings, RunReport, RunState
from agentjet.front.segment import front_of
from agentjet.processes.guardian import Launch
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import LocalPlacement, Supervisor, Watchdog, first_of
from agentjet.protocol import FrontView
from agentjet.server.run_policies import RunPolicies, all_of
from agentjet.swarm import EpisodeRecord, Journal, SwarmState
from agentjet.swarm.journal import Slice
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import PolicyId

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "agentjet.front")
REPORT_SECONDS = 0.5
"""Seconds between two reports of a front."""
HUNG_SECONDS = 20.0
"""A front that does not report for so long is killed and replaced."""
SETTLE_SECONDS = 0.02
"""A fleet changes several times in a row."""
CLOSE_SECONDS = 5.0
"""Time for a front to mark the answers that a stop cuts off."""
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

    @property
    def is_silent(self) -> bool:
        return not self.ready.is_set() or time.monotonic() - self.reported > 4 * REPORT_SECONDS


class Fronts:
    """The fronts of a server."""

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
        """The open runs, the default one first."""
        self._changed: set[PolicyId] = set()
        """Policies whose replicas changed a moment ago."""
        compute.on_replicas = self._replicas_changed

    def __len__(self) -> int:
        return len(self._handles)

    def start(self) -> None:
        """Starts the processes. The default run must be in `runs`."""
        self._supervisor = Supervisor("127.0.0.1", LocalPlacement(list))
        lives = [asyncio.create_task(self._live(handle)) for handle in self._handles]
        self._tasks = [*lives, asyncio.create_task(self._keep_leases())]

    async def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._closing = True
        for task in (*self._tasks, *self._sending):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._sending, return_exceptions=True)
        if self._supervisor is not None:
            await self._supervisor.close()

    def address(self, front: int, url: str) -> str:
        """Returns the base URL of a front. `url` is a URL of this server, as the client reaches it."""
        if template := self._config.server.front_url:
            return template.replace("{front}", str(front)).rstrip("/")
        scheme, _, rest = url.partition("://")
        host = rest.partition("/")[0]
        host = host.rpartition(":")[0] if host.rpartition("]")[2].count(":") else host
        return f"{scheme}://{host}:{self._handles[front].listener.getsockname()[1]}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """The base URLs of the fronts, as this machine reaches them if `server.front_url` is empty."""
        return tuple(self.address(one.index, self._url(one)) for one in self._handles)

    def views(self) -> list[FrontView]:
        return [
            FrontView(
                front=one.index,
                ready=one.ready.is_set(),
                calls=one.calls,
                load=one.load,
                lag=one.lag,
                starts=one.starts,
            )
            for one in self._handles
        ]

    # ---- messages ---------------------------------------------------------------------------------------------------

    async def ask(self, front: int, op: str, *args: Any) -> Any:
        """Returns the answer of a front. If it dies before that, the next one is asked."""
        handle = self._handles[front]
        while True:
            await handle.ready.wait()
            if (peer := handle.peer) is not None:
                with suppress(WorkerDied):
                    return await peer.ask(op, None, *args)
            if self._closing:
                raise Unavailable("The server is being stopped.", code="server_stopping", retry_after=10.0)
            await asyncio.sleep(0)

    def tell(self, op: str, *args: Any) -> None:
        """Sends a message to all fronts that are up, in order. Others get the present state when they start."""
        for handle in self._handles:
            if handle.peer is not None:
                self._send(handle.peer, op, *args)

    async def ask_all(self, op: str, *args: Any) -> None:
        """Returns when all fronts that are up have answered a message or ended."""

        async def ask(peer: Peer) -> None:
            with suppress(WorkerDied):
                await peer.ask(op, None, *args)

        await all_of(ask(one.peer) for one in self._handles if one.peer is not None)

    def later(self, work: Awaitable[Any]) -> None:
        """Does some work in the background. Its failure is logged."""
        task = asyncio.ensure_future(work)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    async def batch(self, run: str, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        """Returns forests and metrics of a batch, built by the front with the least load."""
        front = min(self._handles, key=lambda one: (one.is_silent, one.load)).index
        found: tuple[dict[str, TrainingBatch], dict[str, float]] = await self.ask(front, "batch", run, batch_id)
        return found

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
            reported = handle.reported
            try:
                await self._serve(handle)
            except Exception as error:
                is_known = isinstance(error, AgentJetError | OSError | TimeoutError)
                text = str(error) or type(error).__name__
                log.warning("front %d: %s; it is replaced", handle.index, text, exc_info=None if is_known else error)
            finally:
                handle.ready.clear()
                peer, handle.peer = handle.peer, None
                if peer is not None:
                    await peer.stop()
                self._compute.front_gone(handle.index)
                for run in self.runs.values():
                    run.gone(handle.index)
            delay = 0.0 if handle.reported != reported else min(MAX_DELAY, max(0.25, 2 * delay))
            await asyncio.sleep(delay)

    async def _serve(self, handle: FrontHandle) -> None:
        """Starts a process and reads its reports until it ends or hangs. Raises `WorkerDied`, or `TimeoutError`."""
        assert self._supervisor is not None
        name = f"front-{handle.index}"
        number = handle.listener.fileno()
        path = self._config.server.data_dir.resolve() / "logs" / f"{name}.log"
        launch = Launch(name, COMMAND, path, {SOCKET: str(number)}, sockets=[number])
        handle.starts += 1
        peer = await self._supervisor.start(launch)
        handle.peer = peer
        offset = self._clock() - time.monotonic()
        settings = FrontSettings(handle.index, self.addresses, without_job(self._config), offset)
        async with asyncio.timeout(HUNG_SECONDS * 3):
            await peer.ask("begin", None, settings)
            for run in list(self.runs.values()):  # Runs and policies come and go meanwhile: all fronts are told.
                if run in self.runs.values():
                    await peer.ask("open", None, *run.opening())
            for policy in list(self._compute.policies):
                await peer.ask("replicas", None, self._compute.replicas(policy))
            await peer.ask("listen", None)
        handle.reported = time.monotonic()
        handle.ready.set()
        reading = asyncio.create_task(self._read_reports(handle, peer))
        hang = asyncio.create_task(Watchdog(HUNG_SECONDS).hang(lambda: peer.num_messages, lambda: bool(peer.pending)))
        try:
            await first_of(reading, hang)
            if not reading.done():
                raise WorkerDied(f"{name} sent nothing for {HUNG_SECONDS:g} s")
            reading.result()
        finally:
            reading.cancel()
            hang.cancel()
            await asyncio.gather(reading, hang, return_exceptions=True)

    async def _read_reports(self, handle: FrontHandle, peer: Peer) -> None:
        """Raises `WorkerDied` when the process ends."""
        used = 0.0
        while True:
            report: FrontReport = await peer.ask("report", None, self._compute.others(handle.index))
            now = time.monotonic()
            elapsed = max(1e-3, now - handle.reported)
            handle.load, handle.lag = max(0.0, report.cpu_seconds - used) / elapsed, report.lag
            handle.reported, used = now, report.cpu_seconds
            handle.calls = sum(run.num_calls for run in report.runs.values())
            self._compute.heard(handle.index, report.work)
            for name, found in report.runs.items():
                if name in self.runs:
                    self.runs[name].heard(handle.index, found)
            await asyncio.sleep(REPORT_SECONDS)

    def _url(self, handle: FrontHandle) -> str:
        host = handle.listener.getsockname()[0]
        return f"{'https' if self._config.server.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}"

    async def _keep_leases(self) -> None:
        """Renews the leases of episodes whose front is silent: their agents may be active."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            silent = {handle.index for handle in self._handles if handle.is_silent}
            for run in self.runs.values() if silent else ():
                run.renew_leases(silent)


# ---- the calls of a run ----------------------------------------------------------------------------------------------


class FrontGate(Gate):
    """The gate of a run on its fronts."""

    def __init__(self, fronts: Fronts, run: str) -> None:
        super().__init__()
        self._fronts = fronts
        self._run = run

    @property
    def _calls(self) -> FrontedCalls | None:
        """None while the run is not open on the fronts."""
        return self._fronts.runs.get(self._run)

    def _set(self, is_open: bool, refusal: Callable[[], Later] | None = None) -> None:
        super()._set(is_open, refusal)
        if self._calls is not None:
            self._calls.push()

    async def drained(self) -> None:
        await super().drained()
        if self._calls is not None:
            await self._calls.drained()

    def busy_seconds(self) -> float:
        return super().busy_seconds() + (0.0 if self._calls is None else self._calls.busy_seconds())


class FrontedCalls:
    """The calls of a run on the fronts, for the run's gateway."""

    def __init__(
        self, fronts: Fronts, policies: RunPolicies, swarm: SwarmState, gate: Gate, clock: Callable[[], float]
    ) -> None:
        self.began = clock()
        self._fronts = fronts
        self._policies = policies
        self._swarm = swarm
        self._gate = gate
        self._calling: dict[int, dict[str, AbstractContextManager[Any]]] = {}
        """Open contexts of `SwarmState.calling`, by front and episode."""
        self._busy: dict[int, tuple[float, float]] = {}
        """Seconds with calls inside the gate, by front: those of earlier processes, and of the present one."""
        self._num_calls: dict[int, int] = {}
        self._finished: set[str] = set()
        """Episodes that their fronts finished, before the event about their end."""

    @property
    def num_active(self) -> int:
        """Calls whose answers are not delivered yet."""
        return sum(self._num_calls.values())

    def fronts(self) -> list[FrontView]:
        return self._fronts.views()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The base URLs of the fronts."""
        return self._fronts.addresses

    def busy_seconds(self) -> float:
        """Returns the seconds in which the busiest front sampled a call."""
        return max((sum(parts) for parts in self._busy.values()), default=0.0)

    def open(self) -> None:
        """Opens the run on all fronts."""
        self._fronts.runs[self._policies.run] = self
        self.push()

    def opening(self) -> tuple[str, ServeConfig, RunState]:
        """Returns the message that opens the run, or changes its state."""
        policies, gate = self._policies, self._gate
        models = {name: renderer.model for name, renderer in policies.renderers.items()}
        state = RunState(
            policies.names, policies.model_name, gate.is_open, gate.refusal(), models, self._swarm.job_revision
        )
        return policies.run, without_job(policies.config), state

    def push(self) -> None:
        """Sends the present state to the fronts."""
        if self._policies.run in self._fronts.runs:
            self._fronts.tell("open", *self.opening())

    async def drained(self) -> None:
        """Waits until no call is inside the gate on any front."""
        if self._policies.run in self._fronts.runs:
            await self._fronts.ask_all("drained", self._policies.run)

    async def close(self) -> None:
        """Ends all answers. Recorded calls whose answers were not taken are undelivered."""
        if self._fronts.runs.pop(self._policies.run, None) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._fronts.ask_all("close", self._policies.run)
        for front in list(self._calling):
            self.gone(front)

    # ---- episodes ---------------------------------------------------------------------------------------------------

    def front(self, episode: EpisodeRecord) -> int:
        return front_of(episode, len(self._fronts))

    def address(self, episode: EpisodeRecord, url: str) -> str:
        """Returns the base URL of the front of an episode. `url` is a URL of this server."""
        return self._fronts.address(self.front(episode), url)

    @asynccontextmanager
    async def ending(self, episode_id: str) -> AsyncIterator[None]:
        """Context in which an episode is ended: its calls are on disk and counted, and no further one is recorded.

        If the end fails, calls are recorded again.
        """
        episode = self._swarm.up_to_date(episode_id)
        if episode.status != "live":
            yield
            return
        await self._finish(episode)
        self._finished.add(episode_id)
        try:
            yield
        except BaseException:
            self._finished.discard(episode_id)
            self._fronts.later(self._fronts.ask(self.front(episode), "resume", self._policies.run, episode_id))
            raise

    def episode_ended(self, episode_id: str) -> None:
        """Ends the calls of an episode that has ended."""
        if episode_id in self._finished:
            self._finished.discard(episode_id)
        else:
            self._fronts.later(self._finish_ended(self._swarm.episode(episode_id)))

    def undelivered(self, episode_id: str) -> list[str]:
        """Returns nothing: the front of an episode marks them at its end."""
        return []

    async def _finish(self, episode: EpisodeRecord) -> None:
        counts = await self._fronts.ask(self.front(episode), "finish", self._policies.run, episode.id)
        if counts is not None:
            self._swarm.account(episode.id, counts)

    async def _finish_ended(self, episode: EpisodeRecord) -> None:
        with suppress(Later, ComputeError):  # A disk refuses writes, or the run was closed. It trains nothing.
            await self._finish(episode)

    async def prune(self, rows: Slice) -> bool:
        """Deletes rows of a front's file. Returns False if the server has no such front any more."""
        front = int(self._swarm.file.segments[rows.schema].stem.rpartition("-")[2])
        if front >= len(self._fronts):
            return False
        await self._fronts.ask(front, "prune", self._policies.run, rows)
        return True

    async def training_batches(self, batch_id: int) -> tuple[dict[str, TrainingBatch], dict[str, float]]:
        return await self._fronts.batch(self._policies.run, batch_id)

    # ---- reports ----------------------------------------------------------------------------------------------------

    def heard(self, front: int, report: RunReport) -> None:
        """Records the activity of episodes that a front reports."""
        swarm, activity = self._swarm, report.activity
        with suppress(Later):  # The journal has logged it; the next report of an episode has its counts again.
            for episode_id, counts in activity.counts.items():
                if (known := swarm.episodes.get(episode_id)) is not None and known.status == "live":
                    swarm.account(episode_id, counts)
        for episode_id, is_call in activity.heard.items():
            if (known := swarm.episodes.get(episode_id)) is not None and known.status == "live":
                (swarm.leases.active if is_call else swarm.leases.renew)(known)
        calling = self._calling.setdefault(front, {})
        for episode_id in calling.keys() - activity.calling:
            calling.pop(episode_id).__exit__(None, None, None)
        for episode_id in activity.calling - calling.keys():
            with suppress(RequestError):  # It has ended.
                context = swarm.calling(episode_id)
                context.__enter__()
                calling[episode_id] = context
        self._busy[front] = self._busy.get(front, (0.0, 0.0))[0], report.busy_seconds
        self._num_calls[front] = report.num_calls

    def gone(self, front: int) -> None:
        """Ends the calls of a front that is gone."""
        for context in self._calling.pop(front, {}).values():
            context.__exit__(None, None, None)
        self._busy[front] = sum(self._busy.get(front, (0.0, 0.0))), 0.0
        self._num_calls[front] = 0

    def renew_leases(self, fronts: set[int]) -> None:
        """Renews the leases of the episodes of these fronts."""
        for episode in self._swarm.live():
            if self.front(episode) in fronts:
                self._swarm.leases.renew(episode)


def without_job(config: ServeConfig) -> ServeConfig:
    """Returns settings for a front. It reads those of the job in the journal: they may have a recipe of a plug-in."""
    return config.model_copy(update={"job": JobConfig()})


def prune_file(path: Path, rows: Slice) -> None:
    """Deletes rows of the file of a front that is gone. Raises `ConfigError` if another process has it open."""
    journal = Journal.open(path)
    try:
        journal.delete(rows.of_own_file())
    finally:
        journal.close()
