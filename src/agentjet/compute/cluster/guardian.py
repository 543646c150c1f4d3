"""Runs a command that ends with its launcher: `python -I -S guardian.py COMMAND...`. Standard library only.

The launcher holds the other end of standard input and never writes. When that closes, the launcher has died, and the
guardian kills the command and its children. When the command ends by itself, its children are killed, and the guardian
ends with the same exit code, or with 128 and the number of the signal. If the guardian is killed, Linux kills the
command, and vLLM's processes with it (`replica_path`). At the end the guardian removes the folders of weights that
killed processes left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127
"""Exit code if the command could not be started; the reason is on standard error."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "agentjet-weights-"
LOCK = "lock"
"""The file of a folder of weights that its process locks."""


def main(command: list[str]) -> None:
    own = os.getpid()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: _end_with_the_guardian(own)
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


if __name__ == "__main__":
    main(sys.argv[1:])
