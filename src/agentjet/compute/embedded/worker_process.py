"""A worker process seen from outside: its messages, the requests that it has not answered, its watchdog. No torch.

Messages are pickles, because the pipes are private to parent and child. The worker handles requests in order, so the
oldest one without an answer is the one that it works on.

The watchdog ends a worker that hangs. Heartbeats could not detect that: a thread sends them while the main loop is
deadlocked, and a main loop sends none for minutes while it computes one long pass. So the watchdog measures from
outside. A worker is busy if it sent a message, used CPU time, or waits for a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import pickle
import struct
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from agentjet.errors import AgentJetError, PolicyRemoved, WorkerDied, WorkerHung
from agentjet.types import PolicyId, Sampled

WORKER_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment of a worker. The user's own variables take precedence.

Threads sleep while they wait for each other. OpenMP's default spins for 7 ms, which makes everything several times
slower if agents or a second worker need the cores. cuBLAS is deterministic only with a workspace of fixed size.
"""

RESUMING = ("publish", "load", "add", "remove")
"""Requests after which no completion of the policy pauses."""

_LENGTH = struct.Struct("<Q")


class Request(NamedTuple):
    """A request about a policy. `sample` and `cancel` have the id of the completion as first argument."""

    op: str
    id: int
    policy: PolicyId
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """The answer to the request `id`. `ends`: its failure ends the process, not a request that waits behind it."""

    id: int
    result: Any = None
    error: AgentJetError | None = None
    ends: bool = False


Message = Answer | list[tuple[int, Sampled]]
"""A message of the worker: an answer, or pieces of completions by id."""


def encode_message(message: Message) -> bytes:
    """Returns the pickle with its length in front, because asyncio reads by length."""
    body = pickle.dumps(message)
    return _LENGTH.pack(len(body)) + body


MIN_CPU_SECONDS = 0.02
"""Minimum CPU time that counts as work. The operating system counts in steps of 0.01 s."""
CHECKS_PER_TIMEOUT = 10


class Watchdog:
    """Measures how long a worker with pending requests has not worked."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self.interval = timeout / CHECKS_PER_TIMEOUT
        """Seconds between two checks."""
        self._timeout = timeout
        self._silence = 0.0
        self._cpu_seconds = 0.0

    def reset(self) -> None:
        """Call for every message of the worker."""
        self._silence = 0.0

    def hangs(self, elapsed: float, cpu_seconds: Callable[[], float | None], *, has_work: bool) -> bool:
        """Check the worker, `elapsed` seconds after the last check; True if it was idle for `timeout` seconds.

        A late check counts as two intervals at most. A late check means that this process was stopped too, so messages
        of that time may still be unread. `cpu_seconds` returns None if the process ended or waits for a disk.
        """
        found = cpu_seconds() if has_work else None
        if found is None or abs(found - self._cpu_seconds) >= MIN_CPU_SECONDS:
            self._silence = 0.0
            self._cpu_seconds = found or 0.0
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self._timeout


def cpu_seconds_of(pid: int) -> float | None:
    """Returns the CPU time of a process and its children; None if the process ended or waits for a disk."""
    try:
        process = psutil.Process(pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        if process.status() == psutil.STATUS_DISK_SLEEP:
            return None
    except psutil.Error:
        return None
    return float(sum(time.user + time.system for time in times))


@dataclass(frozen=True, slots=True)
class _Pending:
    """A request without its last answer. It stays until that comes, also if the caller of `ask` was cancelled."""

    op: str
    policy: PolicyId
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class WorkerProcess:
    """One process from its start to its end."""

    def __init__(self, log_path: Path, timeout: float) -> None:
        """`timeout` in seconds is that of the watchdog."""
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        """Done when the process ended unexpectedly."""
        self._log_path = log_path
        self._timeout = timeout
        self._watchdog = Watchdog(timeout)
        self._ids = itertools.count(1)
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[int, _Pending] = {}
        self._unpublished: set[PolicyId] = set()
        """Policies that were asked for an `optim_step` and not published since: their completions pause."""
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
        """Start the process. Idempotent. Raises `PolicyRemoved` after `close`."""
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
                    env={**WORKER_VARIABLES, **os.environ},
                )
            self._tasks = [
                asyncio.create_task(self._read_messages(self._process)),
                asyncio.create_task(self._watch(self._process)),
            ]

    async def ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        """Send a request about a policy; returns its answer. Raises the worker's error, or `WorkerDied`."""
        id = next(self._ids)
        self._write(Request(op, id, policy, args))
        pending = self._pending[id] = _Pending(op, policy)
        if op == "optim_step":
            self._unpublished.add(policy)
        return await _next(pending)

    async def sample(self, policy: PolicyId, *args: Any) -> AsyncGenerator[Sampled, None]:
        """Request a completion; yields its pieces. Closing the iterator cancels it."""
        id = next(self._ids)
        self._write(Request("sample", id, policy, (id, *args)))
        pending = self._pending[id] = _Pending("sample", policy)
        try:
            while True:
                piece: Sampled = await _next(pending)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if self._pending.pop(id, None) is not None:
                with contextlib.suppress(WorkerDied):
                    self._write(Request("cancel", id, policy, (id,)))

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._closing = True
        async with self._starting:
            if self._process is None:
                return
            if self._process.returncode is None:
                self._process.kill()
            reader, watch = self._tasks
            watch.cancel()
            await asyncio.wait([reader, watch])

    def _write(self, request: Request) -> None:
        if self._end is not None:
            raise copy.copy(self._end)  # Several callers raise it.
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            raise WorkerDied("the worker process is not running")
        process.stdin.write(pickle.dumps(request))

    async def _read_messages(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # The process ended.
            while True:
                (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
                self._dispatch(pickle.loads(await process.stdout.readexactly(length)))
        self._end = self._reason(await process.wait())
        for pending in self._pending.values():
            pending.answers.put_nowait(copy.copy(self._end))
        self._pending.clear()
        if not self._closing:
            self.died.set_result(self._end)

    def _reason(self, code: int) -> WorkerDied:
        if self._closing:
            return PolicyRemoved("the worker process was ended")
        during = next((str(one.policy) for one in self._pending.values() if one.op != "sample"), self._sampled())
        if self._hung:
            return WorkerHung(
                f"the worker process did no work for {self._timeout:g} s "
                f"(server.worker_timeout) and was killed; see {self._log_path}",
                during=during,
            )
        return WorkerDied(f"the worker process ended with exit code {code}; see {self._log_path}", during=during)

    def _sampled(self) -> str:
        """Returns a policy of the only run that samples, one that does not pause if possible; '' for several runs."""
        policies = sorted((one.policy for one in self._pending.values()), key=self._unpublished.__contains__)
        return str(policies[0]) if len({policy.run for policy in policies}) == 1 else ""

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the worker if it hangs."""
        now = asyncio.get_running_loop().time
        self._watchdog.reset()
        while process.returncode is None:
            checked = now()
            await asyncio.sleep(self._watchdog.interval)
            # Paused completions may hold the places of others, so no completion counts meanwhile.
            has_work = any(not self._unpublished or one.op != "sample" for one in self._pending.values())
            if self._watchdog.hangs(now() - checked, lambda: cpu_seconds_of(process.pid), has_work=has_work):
                self._hung = True
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return

    def _dispatch(self, message: Message) -> None:
        self._watchdog.reset()
        if isinstance(message, list):
            for id, piece in message:
                if (pending := self._pending.get(id)) is not None:
                    pending.answers.put_nowait(piece)
                    if piece.finish_reason is not None:
                        del self._pending[id]
        elif (pending := self._pending.get(message.id)) is not None:
            if not message.ends:  # Else it stays the oldest one, for the reason of the end.
                del self._pending[message.id]
            if message.error is None and pending.op in RESUMING:
                self._unpublished.discard(pending.policy)
            pending.answers.put_nowait(message.result if message.error is None else message.error)


async def _next(pending: _Pending) -> Any:
    """Returns the next answer, or raises it."""
    answer = await pending.answers.get()
    if isinstance(answer, Exception):
        raise answer
    return answer
