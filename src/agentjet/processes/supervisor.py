"""Where processes run, and `Supervisor`: starts them, connects them, and finds those that hang.

`LocalPlacement` starts subprocesses of this machine. A process ends with this one: its guardian kills it and its
children when the server is gone, also after SIGKILL. `RayPlacement` asks the conductor process, and imports no Ray. The
conductor starts with the first process, and again after its death. If it dies, every process has ended: Ray ends their
actors.

The watchdog counts messages: a process sends a sign of work after each interval in which it made `progress`. Time in
which a process waits for a core is not silence: its end would break what it does, and the next one would be as slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from agentjet.errors import ComputeError, ConfigError, Later, WorkerDied, counted, install_extra, queued_seconds
from agentjet.processes import guardian
from agentjet.processes.guardian import STOP_SECONDS, Launch, ProcessEnd, end_of
from agentjet.processes.rpc import UNANSWERED_SECONDS, Link, Listener, Peer, Process, host_and_port, tune, uninterrupted

CONNECT_SECONDS = 300.0
"""Time for a started process to connect. It imports torch or vLLM first."""
CHECKS_PER_TIMEOUT = 10
MOST_TIMEOUTS = 10
"""Threads that spin keep each other from a core, also in a process that hangs."""


class NotStarted(WorkerDied):
    """A process ended during its start, or was ended because the start took too long."""

    def __init__(self, name: str, end: ProcessEnd) -> None:
        super().__init__(f"{name} {end.reason}")
        self.end = end


class Supervisor:
    """Starts processes, which end with this one. Two processes of one name never start at the same time."""

    def __init__(self, host: str, placement: Placement) -> None:
        """Listens on `host`, the address of this machine at which the processes reach it. Raises `OSError`."""
        self.placement = placement
        self.secret = secrets.token_hex(32).encode()
        """For connections to the processes that it starts, and between them."""
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, asyncio.Future[socket.socket]] = {}
        self._processes: dict[str, Process] = {}
        """Those that have not ended, by name."""
        self._listener = Listener(host, self.secret, self._claim)

    async def start(self, launch: Launch, *, sign_seconds: float = 0.0, timeout: float = CONNECT_SECONDS) -> Peer:
        """Start a process and wait until it connects, `timeout` seconds at most. `sign_seconds`: the interval of its
        signs of work, if above 0.

        Raises the errors of `Placement.start`, or `NotStarted` if it ends before. Then no process is left.
        """
        name = launch.name
        connection = self._expected[name] = self._loop.create_future()
        variables = dict(zip(Link.VARIABLES, (self._listener.address, name, self.secret.decode()), strict=True))
        if sign_seconds:
            variables[Link.SIGNS] = str(sign_seconds)
        try:
            process = await self.placement.start(replace(launch, environment={**launch.environment, **variables}))
            self._processes[name] = process
            process.ended.add_done_callback(lambda _: self._forget(name, process))
            try:
                await first_of(connection, process.ended, timeout=timeout, processes=[process])
                if not connection.done():
                    late = ProcessEnd(f"did not connect for {timeout:g} s; see {launch.log_path}")
                    raise NotStarted(name, process.ended.result() if process.ended.done() else late)
                tune(connection.result(), unanswered_seconds=UNANSWERED_SECONDS)
                return Peer(name, *await asyncio.open_connection(sock=connection.result()), process)
            except BaseException:
                await uninterrupted(process.stop())
                raise
        except BaseException:
            if not (connection.cancel() or connection.cancelled()):  # It may have come while the process was stopped.
                connection.result().close()
            raise
        finally:
            if self._expected.get(name) is connection:
                del self._expected[name]

    def place(self, name: str) -> str:
        """Returns the machine and the process id of a process; "" if they are unknown."""
        process = self._processes.get(name)
        return "" if process is None else process.place

    async def close(self) -> None:
        """End all processes and stop listening. Idempotent."""
        await self.placement.close()
        self._listener.close()
        for connection in self._expected.values():
            connection.cancel()

    def _claim(self, name: str) -> Callable[[socket.socket], object]:
        """See `rpc.Claim`. Removing the name is one step, so of two connections with it one is refused."""
        connection = self._expected.pop(name, None)
        if connection is None:
            raise ComputeError(f"{name!r}: no process of that name is expected")
        return lambda found: self._loop.call_soon_threadsafe(_deliver, connection, found)

    def _forget(self, name: str, process: Process) -> None:
        if self._processes.get(name) is process:
            del self._processes[name]


def _deliver(connection: asyncio.Future[socket.socket], found: socket.socket) -> None:
    if connection.done():  # Its start was cancelled.
        found.close()
    else:
        found.setblocking(False)
        connection.set_result(found)


class Watchdog:
    """Measures how long processes that have work sent nothing."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self.timeout = timeout
        self.interval = timeout / CHECKS_PER_TIMEOUT
        """Seconds between two checks, and between two signs of work."""
        self._silence = 0.0
        self._total = 0.0
        """The silence with the time without a core."""
        self._num_messages = -1

    def hangs(self, elapsed: float, num_messages: int, *, has_work: bool, queued: float = 0.0) -> bool:
        """Check, `elapsed` seconds after the last check; True after `timeout` seconds with work and without a message.

        `queued`: seconds since the last check for which the processes waited for a core. They do not count, up to
        `MOST_TIMEOUTS`. A late check counts as two intervals at most. It means that this process was stopped, too, so
        messages of that time may still be unread.
        """
        if not has_work or num_messages != self._num_messages:
            self._silence, self._total, self._num_messages = 0.0, 0.0, num_messages
            return False
        elapsed = min(elapsed, 2 * self.interval)
        # A wait counts when it ends, so it may be longer than the time between two checks.
        self._silence = max(0.0, self._silence + elapsed - queued)
        self._total += elapsed
        return self._silence >= self.timeout or self._total >= MOST_TIMEOUTS * self.timeout

    async def hang(
        self, num_messages: Callable[[], int], has_work: Callable[[], bool], processes: Sequence[Process | None]
    ) -> None:
        """Return when the processes hang."""
        loop, pids = asyncio.get_running_loop(), [one.pid for one in processes if one is not None]
        checked, queues = loop.time(), dict[int, float]()
        self.hangs(0.0, num_messages(), has_work=has_work())
        while True:
            await asyncio.sleep(self.interval)
            before, checked = checked, loop.time()
            is_silent = has_work() and num_messages() == self._num_messages
            known, queues = queues, core_queues(*pids) if is_silent else {}  # It takes 3 ms for 100 threads.
            queued = longest_queued(known, queues)
            if self.hangs(checked - before, num_messages(), has_work=has_work(), queued=queued):
                return


def core_queues(*pids: int) -> dict[int, float]:
    """Returns the `queued_seconds` of each thread of these processes and their children, by the id of the thread.

    Without threads that never waited, or cannot be read. Empty for processes of other machines.
    """
    found: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                if seconds := queued_seconds(task):
                    found[int(task.name)] = seconds
                with contextlib.suppress(OSError):  # It ended.
                    found |= core_queues(*map(int, (task / "children").read_text().split()))
    return found


def longest_queued(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Returns the longest time for which a thread waited for a core between two `core_queues`.

    The sum of all threads would hide a hang: several that wait at the same time take longer than the time that passes.
    So would the whole life of a thread that the first one lacks.
    """
    return max([0.0, *(seconds - before[thread] for thread, seconds in now.items() if thread in before)])


@contextlib.asynccontextmanager
async def time_limit(seconds: float, processes: Sequence[Process | None] = ()) -> AsyncIterator[None]:
    """As `asyncio.timeout`, for answers of processes: the delays that `Watchdog` leaves out do not count.

    After a delay of this event loop, the answers that came in that time are read first.
    """
    async with asyncio.timeout(None) as limit:

        async def expire() -> None:
            await Watchdog(seconds).hang(int, lambda: True, processes)
            limit.reschedule(0.0)

        expiry = asyncio.create_task(expire())
        try:
            yield
        finally:
            expiry.cancel()


async def first_of(
    *futures: asyncio.Future[Any], timeout: float | None = None, processes: Sequence[Process | None] = ()
) -> None:
    """Wait until one of these is done, or until the `time_limit`."""
    waiting = asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if timeout is None:
        await waiting
        return
    with contextlib.suppress(TimeoutError):
        async with time_limit(timeout, processes):
            await waiting


# ---- processes of this machine ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """GPUs of `size` processes of a group of `Launch`, `gpus` for each, which they get together or not at all."""

    name: str
    size: int
    gpus: int


class Placement(Protocol):
    """Starts processes, which end with it. Two processes of one name never live at the same time.

    No process is left of a start that failed or was cancelled.
    """

    async def num_gpus(self) -> int | None:
        """Returns the number of GPUs that processes can get. None if there are none: processes run on the CPU."""
        ...

    async def reserve(self, groups: Sequence[GpuGroup]) -> None:
        """Take GPUs for groups whose processes start next: all of them, or none. Raises as `start`."""
        ...

    async def release(self, names: Set[str]) -> None:
        """Give back reserved GPUs of the groups of these names that no process uses. Idempotent."""
        ...

    async def start(self, launch: Launch) -> Process:
        """Start a process. Raises `ConfigError` if that is impossible, and `ComputeError` if its GPUs are in use."""
        ...

    async def close(self) -> None:
        """Stop all processes. Idempotent."""
        ...


def visible_gpus() -> list[str]:
    """Returns the ids of this machine's GPUs, as in `CUDA_VISIBLE_DEVICES`, which may hide some. No torch."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        ids = [one.strip() for one in visible.split(",")]
        return [one for one in ids if one and one != "-1"]
    return [index for index, *_ in _query_gpus("index")]


def visible_gpu_memory() -> tuple[int, ...]:
    """Returns the bytes of memory of each of the `visible_gpus`. Those that nvidia-smi does not list are left out."""
    memory: dict[str, int] = {}
    for index, name, size in _query_gpus("index", "uuid", "memory.total"):
        memory |= dict.fromkeys((index, name), int(size) * 2**20)
    return tuple(memory[gpu] for gpu in visible_gpus() if gpu in memory)


def _query_gpus(*facts: str) -> list[list[str]]:
    """Returns these facts of each GPU of this machine; nothing without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(facts)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


class LocalProcess:
    """A process of this machine."""

    def __init__(self, launch: Launch, guardian: asyncio.subprocess.Process, gpus: Sequence[str]) -> None:
        """`guardian` is its parent. `gpus` are the ids of its GPUs."""
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self.pid = guardian.pid
        self.group = launch.group
        self.gpus = gpus
        self.log_path = launch.log_path
        self._guardian = guardian
        self._place = ""
        self._watching = asyncio.create_task(self._watch())

    @property
    def place(self) -> str:
        if not self._place and not self.ended.done():
            with contextlib.suppress(psutil.Error):  # It reads the process table, so only until the child is found.
                if children := psutil.Process(self.pid).children():
                    self._place = f"this machine, process {children[0].pid}"
        return self._place

    async def stop(self) -> None:
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        await asyncio.wait([self.ended], timeout=STOP_SECONDS)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._guardian.kill()
            await asyncio.wait([self.ended])

    async def _watch(self) -> None:
        self.ended.set_result(end_of(await self._guardian.wait(), self.log_path))


class LocalPlacement:
    """Starts subprocesses of this machine. Each GPU belongs to one process at a time, or to two that share it."""

    def __init__(self, find_gpus: Callable[[], list[str]] = visible_gpus) -> None:
        self._find_gpus = find_gpus
        self._gpus: list[str] | None = None
        """All GPUs, once known."""
        self._starting = asyncio.Lock()
        """Held from the choice of a process's GPUs until they are its own."""
        self._processes: set[LocalProcess] = set()
        """Those that have not ended."""

    async def num_gpus(self) -> int | None:
        if self._gpus is None:
            self._gpus = await asyncio.to_thread(self._find_gpus)
        return len(self._gpus) or None

    async def reserve(self, groups: Sequence[GpuGroup]) -> None:
        """Does nothing: no other program divides the GPUs of this machine, and the server has compared the numbers."""

    async def release(self, names: Set[str]) -> None:
        """Does nothing."""

    async def start(self, launch: Launch) -> LocalProcess:
        async with self._starting:
            chosen = await self._choose_gpus(launch)
            if shutil.which(launch.command[0]) is None:
                raise ConfigError(f"{launch.name}: {launch.command[0]} is not a program")
            create_log(launch.log_path)
            devices = {} if launch.shares_gpus else {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
            if devices and "CUDA_VISIBLE_DEVICES" not in os.environ:  # The numbers are those of nvidia-smi.
                devices["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            with launch.log_path.open("ab") as log:
                started = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guardian.__file__, *launch.command),
                    stdin=asyncio.subprocess.PIPE,  # Nothing is written. It closes with this process.
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **launch.environment, **devices},
                    start_new_session=True,  # Ctrl-C is for the server.
                    pass_fds=launch.sockets,
                )
            process = LocalProcess(launch, started, chosen)
            self._processes.add(process)
            process.ended.add_done_callback(lambda _: self._processes.discard(process))
            return process

    async def close(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def _choose_gpus(self, launch: Launch) -> list[str]:
        """Returns the ids of free GPUs. Raises `ConfigError`, and `ComputeError` if they are in use at present."""
        if not launch.gpus:
            return []
        await self.num_gpus()
        groups: dict[str, set[str]] = {gpu: set() for gpu in self._gpus or ()}
        for process in self._processes:
            for gpu in process.gpus:
                groups[gpu].add(process.group)
        number = launch.gpus
        shared = [gpu for gpu, users in groups.items() if launch.beside and users == {launch.beside}]
        free = shared + [gpu for gpu, users in groups.items() if not users]
        if len(free) < number:
            total = len(self._gpus or ())
            # Those of a process that is being killed become free.
            raise (ConfigError if number > total else ComputeError)(
                f"{launch.name} needs {counted(number, 'GPU')}, and {len(free)} of {total} are free"
            )
        return free[:number]


def create_log(path: Path) -> None:
    """Create an empty log that only this user can read, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)


# ---- processes of a Ray cluster --------------------------------------------------------------------------------------

AWAY_SECONDS = 10.0
"""Pause before a cluster that went away is asked again. Its head may be restarted with the same address."""
PROBE_SECONDS = 5.0
"""Limit of a connection to Ray's head."""
STATISTICS = "RAY_USAGE_STATS_ENABLED"
"""Ray sends statistics of its use unless this variable is 0."""


def check_ray(address: str, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raises `ConfigError` if Ray is not installed. Does not import it."""
    if find("ray") is None:
        raise ConfigError(
            f"compute.address = {address!r} needs Ray: {install_extra('cluster')}. Or leave the address empty for "
            "processes of this machine"
        )


def check_address(address: str) -> None:
    """Raises `ConfigError` unless `address` is `HOST:PORT` at which something listens."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            f"compute.address = {address!r} is not an address of a Ray cluster: give HOST:PORT of its head, such as "
            "10.0.0.1:6379, or auto on one of its nodes"
        )
    if not accepts(address):
        raise ConfigError(
            f"compute.address = {address!r}: nothing listens there; `ray start --head` prints the address, and "
            "`ray status` on a node shows the cluster"
        )


def accepts(address: str) -> bool:
    try:
        socket.create_connection(host_and_port(address), timeout=PROBE_SECONDS).close()
    except OSError:
        return False
    return True


class RayProcess:
    """A process on a node of the Ray cluster. `place` is the node and the process id."""

    pid = 0

    def __init__(self, conductor: Peer, launch: Launch, place: str, lost: str) -> None:
        """`lost` is the reason if the conductor ends first."""
        self.place = place
        self.log_path = launch.log_path
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self._conductor = conductor
        self._name = launch.name
        self._watching = asyncio.create_task(self._watch(lost))

    async def stop(self) -> None:
        if not self.ended.done():
            with contextlib.suppress(ComputeError):
                await self._conductor.ask("stop", None, self._name)
            await asyncio.wait([self.ended])

    async def _watch(self, lost: str) -> None:
        try:
            self.ended.set_result(await self._conductor.ask("ended", None, self._name))
        except ComputeError as error:
            self.ended.set_result(ProcessEnd(f"ended with the conductor ({error}; {lost})"))


class RayPlacement:
    """Starts processes on the nodes of a Ray cluster."""

    def __init__(self, host: str, address: str, log_folder: Path) -> None:
        """`host` and `address` as in `compute`. The conductor logs to `conductor.log` in `log_folder`.

        Raises `ConfigError` if Ray is missing, and `OSError` for a host that is not of this machine.
        """
        check_ray(address)
        self.placement_seconds = 60.0
        """Seconds that a process waits for a node with enough free GPUs."""
        self._supervisor = Supervisor(host, LocalPlacement(list))
        """Starts the conductor, which needs no GPU."""
        self._address = address
        self._log_path = log_folder / "conductor.log"
        self._starting = asyncio.Lock()
        self._peer: Peer | None = None
        self._has_joined = False

    async def start(self, launch: Launch) -> RayProcess:
        """Start a process on a node with enough free GPUs.

        Raises `ConfigError` if the cluster was never joined, or no node can run it; `Later` while a cluster that was
        joined is away; else `ComputeError`.
        """
        conductor = await self._conductor()
        create_log(launch.log_path)
        launch = replace(launch, log_path=launch.log_path.resolve(), placement_seconds=self.placement_seconds)
        try:
            place: str = await conductor.ask("start", None, launch)
        except asyncio.CancelledError:  # The conductor goes on with what it was asked for.
            with contextlib.suppress(ComputeError):
                await uninterrupted(conductor.ask("stop", None, launch.name))
            raise
        return RayProcess(conductor, launch, place, f"see {self._log_path}")

    async def reserve(self, groups: Sequence[GpuGroup]) -> None:
        """Wait until the cluster has the GPUs of all groups. Raises as `start`, with what the cluster lacks."""
        await (await self._conductor()).ask("reserve", None, tuple(groups), self.placement_seconds)

    async def release(self, names: Set[str]) -> None:
        if self._peer is not None:
            with contextlib.suppress(ComputeError):  # The reservations end with the conductor.
                await self._peer.ask("release", None, names)

    async def num_gpus(self) -> int | None:
        """Returns the GPUs of the cluster; None if it has none."""
        return await (await self._conductor()).ask("gpus") or None

    async def close(self) -> None:
        """End the conductor, and with it all processes. Idempotent."""
        if (peer := self._peer) is not None:
            self._peer = None
            await peer.stop()
        await self._supervisor.close()

    async def _conductor(self) -> Peer:
        """Returns the connection to the conductor; starts it if it does not run."""
        async with self._starting:
            if self._peer is not None:
                if not self._peer.died.done():
                    return self._peer
                await self._peer.stop()
            variables = {STATISTICS: os.environ.get(STATISTICS, "0")}
            command = (sys.executable, "-P", "-m", "agentjet.processes.conductor")
            peer = await self._supervisor.start(
                Launch(f"conductor {self._address}", command, self._log_path, variables)
            )
            try:
                await peer.ask("connect", None, self._address)
            except BaseException as error:  # Also if it is cancelled.
                await peer.stop()
                if self._has_joined and isinstance(error, ConfigError):
                    raise Later(
                        f"the Ray cluster is away, and is asked again every {AWAY_SECONDS:.0f} s: {error}",
                        retry_after=AWAY_SECONDS,
                    ) from None
                raise
            self._peer, self._has_joined = peer, True
            return peer
