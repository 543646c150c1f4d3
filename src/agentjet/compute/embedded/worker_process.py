"""A worker process seen from outside: its frames, the requests that it has not answered, its watchdog. No torch.

A frame is length-prefixed msgpack. The worker handles frames in order, so the oldest request without an answer is the
one that it works on.

The watchdog ends a worker that hangs. Heartbeats could not detect that: a thread sends them while the main loop is
deadlocked, and a main loop sends none for minutes while it computes one long pass. So the watchdog measures from
outside. A worker is busy if it sent a frame, used CPU time, or waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import psutil

from agentjet.errors import (
    CheckpointError,
    ComputeError,
    ConfigError,
    GrammarError,
    OperationConflict,
    OutOfCache,
    PolicyRemoved,
    WorkerDied,
    WorkerHung,
)
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.support import unpack_sets
from agentjet.types import PolicyId, Sampled

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        CheckpointError,
        ComputeError,
        ConfigError,
        GrammarError,
        OperationConflict,
        OutOfCache,
        PolicyRemoved,
    )
}
CLOSE_SECONDS = 10.0
THREAD_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The worker's threads sleep while they wait for each other.

OpenMP's default spins for 7 ms. That makes everything several times slower if agents or a second worker need the cores.
`{"GOMP_SPINCOUNT": "1000"}` would spin for 25 us, then sleep. `python -m bench.step --waiting` compares settings.
"""
THREAD_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""If the user sets one of these variables, `THREAD_WAIT` is not applied."""
WORKER_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS is deterministic only with a workspace of fixed size. Without effect on a CPU."""

RESUMING = ("publish", "load", "add", "remove")
"""Requests after which no completion of the policy pauses."""

_LENGTH = struct.Struct("<Q")

Frame = dict[str, Any]


def encode_frame(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Frame | None:
    """Returns the next frame of a blocking stream; None at its end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(header)[0])
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


async def read_frame_async(stream: asyncio.StreamReader) -> Frame | None:
    """Returns the next frame of an asyncio stream; None at its end, even within a frame."""
    try:
        header = await stream.readexactly(_LENGTH.size)
        body = await stream.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


MIN_CPU_SECONDS = 0.02
"""Minimum CPU time that counts as work. The operating system counts in steps of 0.01 s."""
CHECKS_PER_TIMEOUT = 10
"""Number of checks within one timeout."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Work of a process and its children."""

    cpu_seconds: float
    waits_for_disk: bool = False


class Watchdog:
    """Measures how long a worker with pending requests has not worked."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self._timeout = timeout
        self._silence = 0.0
        self._cpu_seconds = 0.0

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        return self._timeout / CHECKS_PER_TIMEOUT

    def reset(self) -> None:
        """Call for every frame of the worker."""
        self._silence = 0.0

    def hangs(self, elapsed: float, activity: Callable[[], Activity | None], *, has_work: bool) -> bool:
        """Check the worker, `elapsed` seconds after the last check; True if it was idle for `timeout` seconds.

        A late check counts as two intervals at most. A late check means that this process was stopped too, so frames of
        that time may still be unread. `activity` returns None if the process ended; others handle that.
        """
        found = activity() if has_work else None
        if found is None or found.waits_for_disk or abs(found.cpu_seconds - self._cpu_seconds) >= MIN_CPU_SECONDS:
            self._silence = 0.0
            self._cpu_seconds = found.cpu_seconds if found is not None else 0.0
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self._timeout


def activity_of(pid: int) -> Activity | None:
    """Returns the activity of a process and its children since their start; None if the process ended."""
    try:
        process = psutil.Process(pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        disk = process.status() == psutil.STATUS_DISK_SLEEP
    except psutil.Error:
        return None
    return Activity(sum(time.user + time.system for time in times), disk)


def worker_environment() -> dict[str, str]:
    """Returns the environment of the worker process. The user's own variables take precedence."""
    is_chosen = any(name in os.environ for name in THREAD_WAIT_VARIABLES)
    return {**({} if is_chosen else THREAD_WAIT), **WORKER_VARIABLES, **os.environ}


@dataclass(frozen=True, slots=True)
class _Request:
    """A request without an answer. It stays until its answer comes, also if the caller was cancelled."""

    op: str
    policy: PolicyId
    reply: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Stream:
    """An unfinished completion."""

    policy: PolicyId
    pieces: asyncio.Queue[Sampled | Exception]


class WorkerProcess:
    """One process from its start to its end. `policies` are those that were added and not removed."""

    def __init__(self, log_path: Path, timeout: float) -> None:
        """`timeout` in seconds is that of the watchdog."""
        self.policies: set[PolicyId] = set()
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        """Done when the process ended unexpectedly."""
        self._log_path = log_path
        self._timeout = timeout
        self._watchdog = Watchdog(timeout)
        self._ids = itertools.count(1)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._requests: dict[int, _Request] = {}
        self._streams: dict[int, _Stream] = {}
        """By request id."""
        self._unpublished: set[PolicyId] = set()
        """Policies that were asked for an `optim_step` and not published since: their completions pause."""
        self._ended_by = ""
        """The policy whose failed operation ends the process, or ''."""
        self._end: WorkerDied | None = None
        self._hung = False
        self._closing = False

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def has_ended(self) -> bool:
        return self._closing or self._end is not None

    async def start(self) -> None:
        """Start the process. Idempotent. Raises `WorkerDied` after `close`."""
        async with self._starting:
            if self._closing:
                raise PolicyRemoved("the worker process was ended")
            if self._process is not None:
                return
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log_path.touch(0o600)
            with self._log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "agentjet.compute.embedded"),  # Nothing from the current folder.
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=worker_environment(),
                )
            self._tasks = [
                asyncio.create_task(self._read_frames(self._process)),
                asyncio.create_task(self._watch(self._process)),
            ]

    async def ask(self, op: str, policy: PolicyId, **arguments: Any) -> Any:
        """Send a request about a policy; returns its answer. Raises the worker's error, or `WorkerDied`.

        A `TrainingBatch` is encoded in a thread, because that takes long.
        """
        id = next(self._ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        frame = {"op": op, "id": id, "policy": dataclasses.asdict(policy), **arguments}
        if isinstance(batch := arguments.get("batch"), TrainingBatch):
            self._write(await asyncio.to_thread(lambda: encode_frame({**frame, "batch": batch.to_wire()})))
        else:
            self._send(frame)
        self._requests[id] = _Request(op, policy, reply)
        if op == "optim_step":
            self._unpublished.add(policy)
        return await reply

    def open_stream(self, policy: PolicyId, **arguments: Any) -> tuple[int, asyncio.Queue[Sampled | Exception]]:
        """Request a completion; returns its id and the queue of its pieces, or of its error."""
        id = next(self._ids)
        self._send({"op": "sample", "id": id, "policy": dataclasses.asdict(policy), **arguments})
        queue: asyncio.Queue[Sampled | Exception] = asyncio.Queue()
        self._streams[id] = _Stream(policy, queue)
        return id, queue

    def close_stream(self, policy: PolicyId, id: int) -> None:
        """Cancel a completion unless it has ended."""
        if self._streams.pop(id, None) is not None:
            with contextlib.suppress(WorkerDied):
                self._send({"op": "cancel", "id": id, "policy": dataclasses.asdict(policy)})

    async def close(self) -> None:
        """End the process; kill it after `CLOSE_SECONDS`. Idempotent."""
        self._closing = True
        async with self._starting:
            if self._process is None:
                return
            with contextlib.suppress(WorkerDied):
                self._send({"op": "close", "id": 0})
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            reader, watch = self._tasks
            watch.cancel()
            await asyncio.wait([reader, watch])

    def _send(self, frame: Frame) -> None:
        self._write(encode_frame(frame))

    def _write(self, encoded: bytes) -> None:
        if self._end is not None:
            raise _copied(self._end)
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            raise WorkerDied("the worker process is not running")
        process.stdin.write(encoded)

    async def _read_frames(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while (frame := await read_frame_async(process.stdout)) is not None:
            self._watchdog.reset()
            self._dispatch(frame)
        self._end = self._reason(await process.wait())
        for request in self._requests.values():
            if not request.reply.done():
                request.reply.set_exception(_copied(self._end))
        for stream in self._streams.values():
            stream.pieces.put_nowait(_copied(self._end))
        self._requests.clear()
        self._streams.clear()
        if not self._closing:
            self.died.set_result(self._end)

    def _reason(self, code: int) -> WorkerDied:
        if self._closing:
            return PolicyRemoved("the worker process was ended")
        during = self._ended_by or next((str(request.policy) for request in self._requests.values()), self._sampled())
        if self._hung:
            return WorkerHung(
                f"the worker process did no work for {self._timeout:g} s "
                f"(server.worker_timeout) and was killed; see {self._log_path}",
                during=during,
            )
        return WorkerDied(f"the worker process ended with exit code {code}; see {self._log_path}", during=during)

    def _sampled(self) -> str:
        """Returns a policy of the only run that samples, one that does not pause if possible; '' for several runs."""
        policies = sorted((stream.policy for stream in self._streams.values()), key=self._unpublished.__contains__)
        return str(policies[0]) if len({policy.run for policy in policies}) == 1 else ""

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the worker if it hangs."""
        now = asyncio.get_running_loop().time
        self._watchdog.reset()
        while process.returncode is None:
            checked = now()
            await asyncio.sleep(self._watchdog.interval)
            # Paused completions may hold the places of others, so no completion counts meanwhile.
            has_work = bool(self._requests or (self._streams and not self._unpublished))
            if self._watchdog.hangs(now() - checked, lambda: activity_of(process.pid), has_work=has_work):
                self._hung = True
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return

    def _dispatch(self, frame: Frame) -> None:
        if "tokens" in frame:
            for id, version, tokens, logprobs, packed, reason in frame["tokens"]:
                stream = self._streams.get(id) if reason is None else self._streams.pop(id, None)
                if stream is not None:
                    support = unpack_sets(packed, len(tokens)) if packed else ()
                    stream.pieces.put_nowait(Sampled(tuple(tokens), tuple(logprobs), version, reason, support))
            return
        id = frame["id"]
        error = _ERRORS.get(frame["error"], ComputeError)(frame["message"]) if "error" in frame else None
        if error is not None and (stream := self._streams.pop(id, None)) is not None:
            stream.pieces.put_nowait(error)
        elif (request := self._requests.pop(id, None)) is not None:
            if frame.get("ends"):
                self._ended_by = str(request.policy)
            if error is None and request.op in RESUMING:
                self._unpublished.discard(request.policy)
            if request.reply.done():  # The caller was cancelled.
                return
            if error is not None:
                request.reply.set_exception(error)
            else:
                request.reply.set_result(frame["ok"])


def _copied(error: WorkerDied) -> WorkerDied:
    """Returns an equal error, because several callers raise it."""
    return type(error)(str(error), during=error.during)
