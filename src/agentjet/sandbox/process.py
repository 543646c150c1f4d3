"""The processes of sandboxes: start, limits, end. One thread of this process watches all of them.

* bubblewrap ends its sandbox when the thread that started it ends. So the watch thread starts it, and lives as long as
  this process.
* A cgroup limits memory and counts CPU time where one can be made. Elsewhere the watch thread samples the processes
  every 100 ms. It samples wall time and the growth of the writable folders always.
* The end of the command ends the sandbox. `wait` returns when the kernel has ended all of its processes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from agentjet.errors import ConfigError
from agentjet.sandbox.filter import filter_program
from agentjet.sandbox.usage import Cgroup, cpu_of, descendants, disk_bytes, memory_of

if TYPE_CHECKING:
    from agentjet.sandbox.sandbox import Limits, Sandbox

T = TypeVar("T")
SAMPLE_SECONDS = 0.1
POLL_SECONDS = 0.02
START_SECONDS = 30.0
"""Longest start. It reads the folders that bubblewrap mounts, which may be on a network."""
USERS = range(60_578, 61_184)
"""Users of sandboxes that root starts. systemd's table of users leaves them unused."""
USER = "sandbox"
PORT = 8473
"""Port of the model inside. Each sandbox has another network, so all have the same port."""
COUNTED_BY_NAMESPACE = (5, 14)
"""Version of Linux from which the limit of processes counts those of a user namespace."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The standard streams of a program, as `Popen` takes them."""

    stdin: int | IO[bytes] | None = None
    stdout: int | IO[bytes] | None = None
    stderr: int | IO[bytes] | None = None


class SandboxProcess:
    """A program in a sandbox, with the part of `Popen`'s interface that readers need."""

    def __init__(self, popen: subprocess.Popen[bytes], first: int, closing: ExitStack) -> None:
        self.stdin, self.stdout, self.stderr = popen.stdin, popen.stdout, popen.stderr
        self.pid = popen.pid
        """The process of bubblewrap, which ends with the sandbox."""
        self.returncode: int | None = None
        self.exceeded = ""
        """Which limit ended the program, such as "used more than 64 MiB of memory and was ended: use less"; or ""."""
        self.popen, self.first = popen, first
        self._closing, self._ended = closing, threading.Event()

    def poll(self) -> int | None:
        """Returns the exit code once nothing of the sandbox runs."""
        return self.returncode if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Waits until nothing of the sandbox runs. Raises `subprocess.TimeoutExpired`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the sandbox", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Ends all processes of the sandbox at once."""
        self.popen.kill()

    def send_signal(self, number: int) -> None:
        """Sends a signal to each process of the sandbox."""
        if number == signal.SIGKILL:
            self.kill()
        elif not self._ended.is_set():
            for pid in descendants(self.first):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def exceed(self, reason: str) -> None:
        self.exceeded = self.exceeded or reason
        self.kill()

    def close(self, code: int) -> None:
        """Called by the watch once nothing runs any more."""
        try:
            self._closing.close()
        finally:
            self.returncode = code
            self._ended.set()


class AsyncProcess:
    """The same for a coroutine, with the interface of `asyncio.subprocess.Process` for a program with three pipes."""

    def __init__(self, process: SandboxProcess, stdin: asyncio.StreamWriter, *outputs: asyncio.StreamReader) -> None:
        self.process, self.stdin = process, stdin
        self.stdout, self.stderr = outputs

    @classmethod
    async def of(cls, process: SandboxProcess, limit: int) -> AsyncProcess:
        """`limit` is the longest line of an output in bytes."""
        loop, outputs = asyncio.get_running_loop(), []
        for pipe in (process.stdout, process.stderr):
            reader = asyncio.StreamReader(limit=limit)
            await loop.connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), pipe)
            outputs.append(reader)
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        transport, _ = await loop.connect_write_pipe(lambda: protocol, process.stdin)
        return cls(process, asyncio.StreamWriter(transport, protocol, None, loop), *outputs)

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    @property
    def exceeded(self) -> str:
        return self.process.exceeded

    def kill(self) -> None:
        self.process.kill()

    async def wait(self) -> int:
        while (code := self.process.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        return code


# ---- the watch -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Watched:
    """The state of one sandbox in the watch thread."""

    process: SandboxProcess
    limits: Limits
    folders: list[Path]
    cgroup: Cgroup | None
    disk_before: float
    """Bytes of the writable folders before the start."""
    started: float = field(default_factory=time.monotonic)
    scan: asyncio.Future[float] | None = None
    next_scan: float = 0.0

    async def follow(self, outer: int, first: int) -> None:
        """Samples the sandbox until its end, and closes it. The descriptors are those of its two first processes."""
        ended = exited(outer)
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=SAMPLE_SECONDS)
                if not ended.done() and (reason := self.excess()):
                    self.process.exceed(reason)
                    await ended
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(first, signal.SIGKILL)
            await exited(first)
            if not self.process.exceeded and self.is_out_of_memory():
                self.process.exceeded = self.memory_excess()
        except BaseException:
            self.process.kill()
            raise
        finally:
            os.close(outer)
            os.close(first)
            await asyncio.to_thread(self.process.close, self.process.popen.wait())

    def excess(self) -> str:
        """The reason to end the sandbox now, or ""."""
        limits, seconds = self.limits, time.monotonic() - self.started
        if limits.wall_seconds is not None and seconds > limits.wall_seconds:
            return f"ran longer than {limits.wall_seconds:g} s and was ended"
        used = self.cgroup.cpu_seconds() if self.cgroup is not None else None
        is_sampled = self.cgroup is None or used is None or limits.disk is not None
        pids = [self.process.first, *descendants(self.process.first)] if is_sampled else []
        if limits.cpu_seconds is not None and (cpu_of(pids) if used is None else used) > limits.cpu_seconds:
            return f"used more than {limits.cpu_seconds:g} s of CPU time and was ended"
        if self.is_out_of_memory(pids):
            return self.memory_excess()
        if limits.disk is not None and (wrote := self.disk_used(limits.disk, pids) - self.disk_before) > limits.disk:
            if wrote == math.inf:
                return "made a folder that cannot be read, or is too deep, and was ended: its files cannot be counted"
            return f"wrote more than {limits.disk / 2**20:g} MiB into its folders and was ended: write less"
        return ""

    def is_out_of_memory(self, pids: Sequence[int] = ()) -> bool:
        if self.limits.memory is None:
            return False
        if self.cgroup is not None:
            return self.cgroup.is_out_of_memory()
        # The exact sum is slow, and not larger.
        return all(memory_of(pids, shared_once=exact) > self.limits.memory for exact in (False, True))

    def memory_excess(self) -> str:
        return f"used more than {(self.limits.memory or 0) / 2**20:g} MiB of memory and was ended: use less"

    def disk_used(self, most: float, pids: Sequence[int]) -> float:
        """Bytes by the scan that has just ended, else 0. Scans run in a thread, for a tenth of the time at most."""
        now = time.monotonic()
        if self.scan is not None and self.scan.done():
            self.next_scan = now + 10 * (now - self.next_scan - SAMPLE_SECONDS)
            used, self.scan = self.scan.result(), None
            return used
        if self.scan is None and now >= self.next_scan:
            self.next_scan = now
            most += self.disk_before
            loop = asyncio.get_running_loop()
            self.scan = loop.run_in_executor(None, disk_bytes, self.folders, list(pids), most)
        return 0


def exited(process: int) -> asyncio.Future[None]:
    """Done once the process of a descriptor has ended."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        loop.remove_reader(process)
        future.set_result(None)

    loop.add_reader(process, end)
    return future


class _Watch:
    """The thread of an event loop, which starts with the first sandbox and lasts as long as this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._owner != os.getpid():  # A fork has no threads of its parent.
                self._loop = asyncio.new_event_loop()
                self._owner = os.getpid()
                threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True).start()
            return self._loop

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the thread; returns its result."""

        async def call() -> T:
            return function()

        return self.run(call())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop()).result()

    def follow(self, watched: _Watched, first: int) -> None:
        outer = os.pidfd_open(watched.process.pid)
        asyncio.run_coroutine_threadsafe(watched.follow(outer, first), self.loop())


WATCH = _Watch()


# ---- the start -------------------------------------------------------------------------------------------------------


def launch(sandbox: Sandbox, command: list[str], streams: Streams, cwd: Path) -> SandboxProcess:
    """Starts a program. Raises `ConfigError` if the sandbox cannot be made."""
    limits, folders = sandbox.limits, sandbox.writables()
    with ExitStack() as stack:  # What ends with the sandbox; closed here if it does not start.
        user = stack.enter_context(sandbox_user()) if os.getuid() == 0 else None
        if user is not None:
            for folder in folders:
                owner = folder.stat()
                stack.callback(change_owner, folder, owner.st_uid, owner.st_gid, of=user)
                change_owner(folder, user, user)
        cgroup = None if limits.memory is None else Cgroup.make(limits.memory)
        if cgroup is not None:
            stack.callback(cgroup.remove)
        disk = disk_bytes(folders) if limits.disk is not None else 0.0
        if disk == math.inf:
            raise ConfigError(f"sandbox: a folder in {', '.join(map(str, folders))} cannot be read: chmod u+rx it")
        start = _Start(sandbox, command, cwd, user, cgroup)
        popen, first, listener = start.run(streams)
        if listener is not None:
            from agentjet.sandbox.proxy import ModelProxy

            proxy = ModelProxy(sandbox.model_url, sandbox.allowed_paths())
            stack.callback(lambda: WATCH.run(proxy.close()))
            WATCH.run(proxy.start(listener))
        process = SandboxProcess(popen, first, stack.pop_all())
        try:
            WATCH.follow(_Watched(process, limits, folders, cgroup, disk), start.handle)
        except BaseException:  # Such as too many open files.
            process.kill()
            process.close(popen.wait())
            raise
        return process


@contextmanager
def sandbox_user() -> Iterator[int]:
    """A user that no other sandbox has: the kernel counts its processes. Its group has the same number."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        for number in range(len(USERS)):
            uid = USERS[(os.getpid() + number) % len(USERS)]
            try:
                lock.bind(f"\0agentjet-sandbox-{uid}")  # An abstract name: it is free again when its process ends.
            except OSError:
                continue
            yield uid
            return
    raise ConfigError(f"{len(USERS)} sandboxes run on this machine: end some of them")


def change_owner(folder: Path, uid: int, gid: int, *, of: int | None = None) -> None:
    """Gives a folder and what lies in it to a user; with `of` only what that user owns. Follows no link."""
    try:
        for _, folders, names, place in os.fwalk(folder):
            for name in (".", *folders, *names):
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=place, follow_symlinks=False)
                    # Another name of the same file may lie anywhere.
                    is_shared = status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode)
                    if status.st_uid == of or (of is None and not is_shared):
                        os.chown(name, uid, gid, dir_fd=place, follow_symlinks=False)
    except (OSError, RecursionError):  # It is too deep for Python.
        owner = [] if of is None else [f"--from={of}"]
        subprocess.run(["chown", "-hR", *owner, f"{uid}:{gid}", "--", str(folder)], capture_output=True, check=False)


class ProgramFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that a program writes to. Its removal raises nothing."""

    def cleanup(self) -> None:
        try:
            super().cleanup()
        except (OSError, RecursionError):  # It is too deep for Python.
            subprocess.run(["rm", "-rf", "--", self.name], capture_output=True, check=False)


@dataclass(slots=True)
class _Start:
    """One start of bubblewrap."""

    sandbox: Sandbox
    command: list[str]
    cwd: Path
    user: int | None
    cgroup: Cgroup | None
    handle: int = -1
    """Descriptor of the first process."""
    passed: list[int] = field(default_factory=list)
    """Descriptors that bubblewrap inherits."""

    def run(self, streams: Streams) -> tuple[subprocess.Popen[bytes], int, socket.socket | None]:
        """Returns bubblewrap's process, the first process of the sandbox, and a socket that listens in it."""
        with ExitStack() as stack:
            information, written = os.pipe()
            waiting, go = os.pipe()
            ours, theirs = socket.socketpair()
            self.passed += [written, waiting, theirs.detach()]
            stack.enter_context(ours)
            stack.callback(os.close, information)
            stack.callback(os.close, go)
            try:
                words = self._words(*self.passed)
                popen = WATCH.call(lambda: self._popen(words, streams))
            finally:
                for descriptor in self.passed:
                    os.close(descriptor)
            try:
                if self.user is not None:
                    for pipe in filter(None, (popen.stdin, popen.stdout, popen.stderr)):
                        os.fchown(pipe.fileno(), self.user, -1)  # So that it may open /dev/stdout.
                first = first_process(popen, information)
                self.handle = os.pidfd_open(first)  # Before it runs the command, which may end at once.
                if self.cgroup is not None:
                    self.cgroup.add(first)
                self._limit(first)
                os.write(go, b"+")
                return popen, first, received(popen, ours) if self.sandbox.network == "model" else None
            except BaseException:
                popen.kill()
                popen.wait()
                if self.handle >= 0:
                    os.close(self.handle)
                raise

    def _popen(self, words: list[str], streams: Streams) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words,
            bufsize=0,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            pass_fds=self.passed,
            start_new_session=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )

    def _words(self, written: int, waiting: int, channel: int) -> list[str]:
        """The command line of bubblewrap. Arguments go through a file: a command line is visible to other users."""
        sandbox, limits = self.sandbox, self.sandbox.limits
        program = filter_program(deny_unmapped=self.cgroup is None and limits.memory is not None)
        words = ["--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        words += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
        words += [] if sandbox.network == "open" else ["--unshare-net"]
        if self.user is None:
            words += ["--unshare-user", "--disable-userns"]
        else:
            words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        words += sandbox.mounts()
        words += ["--seccomp", str(self._content(program))] if program else []
        words += ["--info-fd", str(written), "--block-fd", str(waiting), "--chdir", "/", "--clearenv"]
        for name, value in sandbox.environment().items():
            words += ["--setenv", name, value]
        arguments = b"\0".join(map(os.fsencode, words)) + b"\0"
        inner = [interpreter(), "-I", "-S", "-E", inside_file(), str(self.user or 0)]
        inner += [str(channel if sandbox.network == "model" else 0), str(PORT), str(sandbox.inside(self.cwd)), "--"]
        for folders in (sandbox.writables(), sandbox.readables()):
            inner += [*map(str, map(sandbox.inside, folders)), "--"]
        inner += self.command
        return [bubblewrap(), "--args", str(self._content(arguments)), "--", *inner]

    def _limit(self, pid: int) -> None:
        """Sets the limits of the first process, which its children inherit."""
        limits = self.sandbox.limits
        numbers = {"DATA": limits.memory, "FSIZE": limits.disk, "NPROC": limits.processes}
        if self.user is None and kernel_version() < COUNTED_BY_NAMESPACE:
            del numbers["NPROC"]  # It would count all processes of the user.
        numbers["CORE"] = 1  # With 0 the kernel still starts a handler of core dumps.
        for name, value in numbers.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            most = resource.prlimit(pid, kind)[1]
            if value is not None:
                value = value if most == resource.RLIM_INFINITY else min(value, most)
                resource.prlimit(pid, kind, (value, value))

    def _content(self, content: bytes) -> int:
        """A descriptor from which bubblewrap reads `content`."""
        file = os.memfd_create("agentjet-sandbox")
        self.passed.append(file)
        os.write(file, content)
        os.lseek(file, 0, os.SEEK_SET)
        return file


def bubblewrap() -> str:
    """The path of bubblewrap; "" without it."""
    return shutil.which("bwrap") or ""


def interpreter() -> str:
    """The Python that starts inside: the one below a virtual environment needs less time."""
    base = os.path.realpath(str(sys._base_executable))  # type: ignore[attr-defined]
    is_visible = any(Path(base).is_relative_to(path) for path in ("/usr", sys.base_prefix))
    return base if is_visible else str(Path(sys.prefix, "bin", "python"))


def kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2] if part.isdecimal())


def inside_file() -> str:
    """The compiled form of `inside.py` if there is one: it saves a millisecond."""
    from agentjet.sandbox import inside

    compiled = inside.__spec__.cached if inside.__spec__ is not None else None
    return compiled if compiled and os.path.exists(compiled) else str(inside.__file__)


def first_process(popen: subprocess.Popen[bytes], information: int) -> int:
    """The first process of the sandbox, as bubblewrap writes it. Raises `ConfigError` if it could not start one."""
    content, deadline = b"", time.monotonic() + START_SECONDS
    while b"}" not in content:
        is_readable, _, _ = select.select([information], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(information, 4096) if is_readable else b""
        if not piece:
            raise ConfigError(failure(popen))
        content += piece
    return int(json.loads(content)["child-pid"])


def received(popen: subprocess.Popen[bytes], channel: socket.socket) -> socket.socket:
    """The socket that `inside.py` sends: it listens in the sandbox's network."""
    channel.settimeout(START_SECONDS)
    try:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    except TimeoutError:
        descriptors = []
    if not descriptors:
        raise ConfigError(failure(popen))
    return socket.socket(fileno=descriptors[0])


def failure(popen: subprocess.Popen[bytes]) -> str:
    """The reason of a failed start."""
    popen.kill()
    text = popen.stderr.read(2000).decode(errors="replace").strip() if popen.stderr is not None else ""
    return f"the sandbox could not be made: {text or 'see its error output'}"
