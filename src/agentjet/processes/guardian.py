"""Runs a command that ends with its launcher: `python -I -S guardian.py COMMAND...`. Standard library only.

The launcher holds the other end of standard input and never writes. When that closes, the launcher has died, and the
guardian kills the command and its children. When the command ends by itself, its children are killed, and the guardian
ends with the same exit code, or with 128 and the number of the signal. If the guardian is killed, Linux kills the
command, and vLLM's processes with it (`replica_path`). At the end the guardian removes the folders of weights that
killed processes left behind.

`RayActor` is the launcher on a node of a Ray cluster. The conductor sends this module by value: a node needs Ray for
it, not AgentJet. The methods run in threads of the actor's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PR_SET_PDEATHSIG = 1
RAY_HEAD = "AGENTJET_RAY_HEAD"
"""Variable of a process of a Ray cluster with the address of Ray's head, as its node reaches it."""
NOT_STARTED = 127
"""Exit code if the command could not be started; the reason is on standard error."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "agentjet-weights-"
LOCK = "lock"
"""The file of a folder of weights that its process locks."""
LOG_END_BYTES = 2**18
"""The part of a log that is searched, at its end."""
MAX_LINE = 300
"""Characters of the log that the reason of an end quotes."""
STOP_SECONDS = 10.0
PARENT_SECONDS = 0.5
"""Seconds between two checks of the node's raylet, which is the parent of an actor's process."""
FLUSH_SECONDS = 5.0
"""Time for the answer of `wait` to leave an actor without a raylet. Ray itself ends it a minute later."""


def main(command: list[str]) -> None:
    own = os.getpid()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            close_fds=False,  # The launcher gave it the command's sockets only.
            preexec_fn=lambda: _end_with_the_guardian(own),
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        raise SystemExit(NOT_STARTED) from None
    threading.Thread(target=_kill_at_end_of_input, args=[process.pid], daemon=True).start()
    # Not reaped yet: until then no other process can get this id.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    _kill_group(process.pid)
    code = process.wait()
    remove_abandoned()
    os._exit(code if code >= 0 else 128 - code)


def places() -> list[Path]:
    """Returns the places for folders of weights that this user may write to, best first."""
    found = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    return [place for place in found if place.is_dir() and os.access(place, os.W_OK)]


def remove_abandoned() -> None:
    """Remove the folders of weights of processes that were killed: those that no process locks."""
    for place in places():
        for folder in place.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # Empty: its process was killed before it locked it.
                folder.rmdir()
            with contextlib.suppress(OSError), (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock.fileno()).st_nlink:  # Else its owner removed it, and a folder there is another one's.
                    shutil.rmtree(folder, ignore_errors=True)


def _end_with_the_guardian(guardian: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # It ended before.
        os._exit(1)


def _kill_at_end_of_input(group: int) -> None:
    while os.read(0, 4096):
        pass
    _kill_group(group)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process. `reason` is for users: how it ended, its log and the last line there."""

    reason: str
    exit_code: int | None = None
    """None if a signal ended the process, or the code is unknown."""
    last_line: str = ""
    """The last line of its log, if it is of interest."""
    by_itself: bool = False
    """True if the process ended while its machine and its launcher went on."""


def end_of(code: int, log_path: Path) -> ProcessEnd:
    """Returns the end of a process that ended with this exit code of its guardian.

    It quotes the last line of the log, except after SIGKILL, which comes from outside.
    """
    number = -code if code < 0 else code - 128
    exit_code = None
    try:
        how = f"ended by {signal.Signals(number).name}"
    except ValueError:
        how, exit_code = f"ended with exit code {code}", code
    lines = [] if number == signal.SIGKILL else last_lines(log_path)
    line = next((line.strip()[:MAX_LINE] for line in reversed(lines) if line.strip()), "")
    reason = f"{how}; see {log_path}" + (f", which ends with {line!r}" if line else "")
    return ProcessEnd(reason, exit_code, line, by_itself=True)


def last_lines(log_path: Path, start: int = 0) -> list[str]:
    """Returns the lines at the end of a log, after its first `start` bytes. A file that is gone has none."""
    with contextlib.suppress(OSError), log_path.open("rb") as log:
        log.seek(max(start, log.seek(0, os.SEEK_END) - LOG_END_BYTES))
        return log.read().decode(errors="replace").splitlines()
    return []


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start."""

    name: str
    command: Sequence[str]
    log_path: Path
    """Its output is appended to this file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the machine."""
    gpus: int = 0
    """GPUs that it alone has. It sees no other ones."""
    shares_gpus: bool = False
    """It sees all GPUs of the machine, and none of them is its own."""
    group: str = ""
    """The processes that it belongs to, such as the ranks of a policy."""
    group_size: int = 1
    """Processes of its group that get their GPUs together, or none of them does."""
    beside: str = ""
    """The group with one process of which it may share GPUs. It prefers those GPUs. Ray shares nothing."""
    needs_shared_files: bool = False
    """True if the process works only where the gateway's files are visible."""
    sockets: Sequence[int] = ()
    """Open sockets that it gets, under the same numbers. On this machine only."""
    placement_seconds: float = 60.0
    """Seconds that it waits for a node with enough free GPUs."""


class RayActor:
    """Starts a process under a guardian, so that it ends with this actor."""

    def __init__(self, launch: Launch, guardian: str) -> None:
        """`guardian` is the text of `guardian.py`."""
        self._launch = launch
        self._guardian = guardian
        self._log_path = launch.log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._lost = ""

    def start(self) -> tuple[str, int, str]:
        """Returns the node's name, the process id, and "" or the reason why this node cannot run the process."""
        launch, node = self._launch, socket.gethostname()
        if problem := self._problem():
            return node, 0, problem
        if not self._log_path.exists():
            folder = Path(tempfile.gettempdir(), "agentjet-logs")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log_path = folder / self._log_path.name
        environment = {**os.environ, **launch.environment}
        if not launch.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", self._guardian, *launch.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        threading.Thread(target=self._end_with_parent, args=[os.getppid()], daemon=True).start()
        return node, self._process.pid, ""

    def _problem(self) -> str:
        command, log = self._launch.command[0], self._log_path
        if shutil.which(command) is None:
            return (
                f"it has no {command}: install AgentJet there at the same path as on the gateway's machine (the same "
                "container image, or a shared file system)"
            )
        if self._launch.needs_shared_files and not log.exists():
            return (
                f"it does not have the gateway's file {log}: server.data_dir (checkpoints, logs) and the folder of a "
                "local model must be on a file system that the gateway and all ranks mount at the same path, such as "
                "NFS"
            )
        return ""

    def wait(self) -> tuple[str, int | None, str, bool]:
        """Returns the fields of its `ProcessEnd` once it has ended. A node cannot send an object of this module."""
        assert self._process is not None
        code = self._process.wait()
        self.stop()
        if self._lost:
            return f"ended because {self._lost}; see {self._log_path}", None, "", False
        end = end_of(code, self._log_path)
        return end.reason, end.exit_code, end.last_line, end.by_itself

    def _end_with_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        self._lost = "the raylet of its node died"
        self.stop()
        time.sleep(FLUSH_SECONDS)
        os._exit(1)

    def stop(self) -> None:
        """Kill the process and its children, and wait for their end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(STOP_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
