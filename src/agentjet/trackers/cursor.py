"""`Cursor`: a small file with the run of a sink and its newest written version. One process holds it at a time."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Self

from agentjet.errors import ConfigError
from agentjet.trackers.sink import Run

LENGTH = 128
"""Bytes of the file. Always one write of the same length, so that a killed process leaves no half of it."""


class Cursor:
    """Use it as a context manager: it is locked inside."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path = path
        self.version = 0
        """The newest version that was written, according to this file."""
        self._run = run
        self._file = -1

    def __enter__(self) -> Self:
        """Raises `ConfigError` if another process holds the cursor, or it belongs to another run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock()
            self.version = self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    @property
    def is_new(self) -> bool:
        """True until the first `advance`."""
        return os.fstat(self._file).st_size == 0

    def advance(self, version: int) -> None:
        """Record that the sink has the steps up to this version."""
        text = json.dumps({"run": self._run.id, "version": version})
        os.pwrite(self._file, f"{text:{LENGTH - 1}}\n".encode(), 0)
        os.fsync(self._file)
        self.version = version

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path} is held by another `agentjet track`: that process writes these steps already; end it, or "
                "choose another target"
            ) from None

    def _read(self) -> int:
        held = os.pread(self._file, LENGTH, 0)
        if not held:
            return 0
        try:
            found = json.loads(held)
            run_id, version = str(found["run"]), int(found["version"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{self.path} is not a cursor of `agentjet track`: choose another target") from None
        if run_id != self._run.id:
            raise ConfigError(
                f"{self.path} belongs to another run ({run_id}, this one is {self._run.id}): choose another target, or "
                "remove what that run wrote, and this file"
            )
        return version
