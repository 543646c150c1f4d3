"""`CapturedProcess`: a program whose output is read while it runs, with a limit.

Its output travels through pipes. A file would have no limit: a program, or a process that it left, could fill the disk.
A program could also put another file into its place. A process that outlives the program holds the other end of a pipe
open, so the reading ends with the program.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

MAX_KEPT_BYTES = 16 * 2**20
"""Longest part of each output in memory: the end of it."""
MAX_PRINTED_BYTES = 256 * 2**20
"""Longest output. A program that prints more is ended."""
CHUNK_BYTES = 2**16
LEFT_BYTES = 2**20
"""Longest part that is read after the program's end. It is the largest pipe of Linux."""
POLL_SECONDS = 0.1
"""Time until the end of a program is seen whose output another process holds open."""


class CapturedProcess:
    """A program in a new session. `wait` must be called: a program that nothing reads stops at a full pipe."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        limit: int = MAX_PRINTED_BYTES,
        merged: bool = False,
        copy: BinaryIO | None = None,
        **options: Any,
    ) -> None:
        """`limit` is in bytes, for each output. `merged`: stderr goes to stdout. `copy` gets all output. `options` are
        those of `Popen`. Raises `OSError` for a program that cannot be started.
        """
        self.exceeded = ""
        """Name of the output that exceeded the limit."""
        self._limit, self._copy = limit, copy
        self._process = subprocess.Popen(
            arguments,
            bufsize=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
            **options,
        )
        self._pipes = {
            name: pipe
            for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
            if pipe is not None
        }
        self._ends = {name: bytearray() for name in self._pipes}
        self._num_bytes = dict.fromkeys(self._pipes, 0)

    @property
    def stdin(self) -> Any:
        return self._process.stdin

    @property
    def excess(self) -> str:
        """The reason why the limit ended the program, or ""."""
        return self.exceeded and (
            f"printed more than {self._limit / 2**20:g} MiB to {self.exceeded} and was ended: print less, or write to "
            "a file"
        )

    def text(self, name: str = "stdout") -> str:
        """The end of an output, `MAX_KEPT_BYTES` at most."""
        return self._ends[name].decode(errors="replace")

    def tail(self, length: int) -> str:
        """The end of stderr, or of stdout if stderr is empty: many programs report their errors there."""
        for name in sorted(self._ends):
            if end := self._ends[name][-length:].decode(errors="replace").strip():
                return f"its {name} ends with: {end}"
        return "it printed nothing"

    def wait(self, seconds: float | None = None) -> int | None:
        """Reads the output until the program ends. Returns its exit code, or None if it runs after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for name, pipe in self._pipes.items():
                selector.register(pipe, selectors.EVENT_READ, name)
            while self._process.poll() is None:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                self._read(selector, POLL_SECONDS)
            left = LEFT_BYTES
            while left > 0 and (num_read := self._read(selector, 0)):
                left -= num_read
        for pipe in self._pipes.values():
            pipe.close()  # A process that still writes there gets an error.
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and the processes that it started."""
        with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, when nothing but a zombie is left
            os.killpg(self._process.pid, number)

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> int:
        """Read once from each pipe that has output. Returns the number of bytes."""
        if not selector.get_map():  # The program closed its outputs, and runs.
            time.sleep(seconds)
            return 0
        total = 0
        for key, _ in selector.select(seconds):
            content = os.read(key.fd, CHUNK_BYTES)
            if not content:
                selector.unregister(key.fileobj)
            total += len(content)
            self._keep(key.data, content)
        return total

    def _keep(self, name: str, content: bytes) -> None:
        end = self._ends[name]
        end += content
        del end[:-MAX_KEPT_BYTES]
        self._num_bytes[name] += len(content)
        if self._num_bytes[name] > self._limit:
            self.exceeded = self.exceeded or name
            self.signal(signal.SIGKILL)
        elif self._copy is not None:
            self._copy.write(content)
