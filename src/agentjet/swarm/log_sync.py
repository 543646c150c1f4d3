"""`LogSync`: waits until a journal's write-ahead log is on disk, and moves it into the database file now and then.

Both may take as long as the disk likes, so both may be called from a thread that is not the journal's. Invariants:

* what was committed before `wait` was called is on disk when it returns;
* a log that could not be synced is never called synced later: after a failure the system may have dropped what it
  could not write, and a second try would find nothing to do and succeed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path

log = logging.getLogger(__name__)

MOVE_EVERY = 256
"""Waits between two moves. A move keeps pace with the writer but cannot begin the log anew under it: that is left to
the writer, which finds next to nothing to move when the log is `LONGEST_LOG` pages long.
"""
LONGEST_LOG = 16_384
"""Pages of 4 KiB."""


class LogSync:
    """Of one open database in WAL mode."""

    def __init__(self, path: Path) -> None:
        """`path` is the database's. Raises `OSError` where it has no log."""
        self._path = path
        self._file = os.open(f"{path}-wal", os.O_RDONLY)
        self._mover: sqlite3.Connection | None = None
        self._waits = 0
        self.failed: OSError | None = None
        """Why the disk is trusted no longer."""

    def wait(self) -> None:
        """Return once the log is on disk. Raises `OSError`, from then on always."""
        if self.failed is not None:
            raise self.failed
        try:
            os.fdatasync(self._file)
        except OSError as error:
            self.failed = error
            raise
        self._waits += 1
        if self._waits % MOVE_EVERY == 0:
            self._move()

    def close(self) -> None:
        """Idempotent. Not while another thread waits."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _move(self) -> None:
        """Into the database file what nobody reads in the log; a failure leaves it in the log, where it is safe."""
        try:
            if self._mover is None:
                self._mover = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            self._mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the journal's log could not be moved into the journal: %s", error)
