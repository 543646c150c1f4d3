"""`Follower`: copies the steps of a source to a tracker, each once, also after a kill at any moment.

At its start it asks the tracker which steps it has. Steps are written in rising order, so the newest version is enough.
A `Cursor` is a small file with the run of a tracker and its newest written version.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agentjet.errors import AgentJetError, ConfigError, TrackerError
from agentjet.trackers.sinks import Run, Step, Tracker, id_of_run

PAGE = 200
"""Steps that are read and written together."""
REPORT_SECONDS = 2.0
"""Seconds between two lines about a long backfill."""
LENGTH = 128
"""Bytes of a cursor. Always one write of the same length, so that a killed process leaves no half of it."""


class Source(Protocol):
    """Where steps come from: a server, or the files of a run."""

    @property
    def title(self) -> str:
        """The address or the folder."""

    def settings(self) -> Mapping[str, Any]:
        """The settings of the run, by dotted name."""

    def steps(self, after: int, limit: int) -> list[Step]:
        """The oldest `limit` steps with a version above `after`."""

    def progress(self) -> tuple[int, int]:
        """The present policy version, and the one at which the job ends; 0 if it has no end."""


@dataclass(frozen=True)
class Follower:
    """`name` is that of the run in the tracker. `folder` has the cursor, if the tracker is not a file of this machine.

    `pause` waits for new steps, `say` shows a line.
    """

    source: Source
    tracker: Tracker
    name: str
    folder: Path
    say: Callable[[str], None]
    pause: Callable[[], None]
    clock: Callable[[], float] = time.monotonic

    def run(self, *, stay: bool) -> None:
        """Copies all steps. With `stay`, goes on with new ones until the job ends.

        Raises `ConfigError` if the target belongs to another run or, without `stay`, if the run has no step. Raises
        `TrackerError`.
        """
        run_id = id_of_run(self._first_step(stay))
        run = Run(run_id, self.name or f"agentjet-{run_id}", self.source.settings())
        with open_cursor(self._cursor_path(run), run.id) as cursor, ExitStack() as stack:
            if cursor.is_new:
                if _has_content(self.tracker.path):
                    raise ConfigError(f"{self.tracker.label} has content of another program: choose another target")
                cursor.advance(0)  # From here on the target belongs to this run.
            with self._library():
                held, write = stack.enter_context(self.tracker.open(run))
            try:
                version = cursor.version if held is None else held
                place = f"{self.source.title} -> {self.tracker.label}"
                self.say(f"{place}: run {run.name}, written up to step {version}")
                while True:
                    newest, end = self.source.progress()
                    for steps in self._new_steps(run, version, newest):
                        with self._library():
                            write(steps)
                        version = steps[-1].version
                        cursor.advance(version)
                    if not stay or newest >= end > 0:
                        self.say(f"{self.tracker.label} has all steps up to {version}")
                        return
                    self.pause()
            finally:
                with self._library():
                    stack.close()

    def _first_step(self, stay: bool) -> Step:
        is_told = False
        while not (found := self.source.steps(0, 1)):
            if not stay:
                raise ConfigError(f"{self.source.title} has no step yet, so there is nothing to track")
            if not is_told:
                self.say(f"{self.source.title} has no step yet: waiting for the first one")
            is_told = True
            self.pause()
        return found[0]

    def _cursor_path(self, run: Run) -> Path:
        label, path = self.tracker.label, self.tracker.path
        if path is not None:
            return path.with_name(f"{path.name}.cursor")
        target = hashlib.sha256(label.encode()).hexdigest()[:6]
        return self.folder / f"{label.partition(':')[0]}-{run.id}-{target}.cursor"

    def _new_steps(self, run: Run, version: int, newest: int) -> Iterator[list[Step]]:
        """Yields all steps above `version`, some at a time. Earlier ones are written before the next are requested."""
        started = told = self.clock()
        first = version
        while steps := self.source.steps(version, PAGE):
            if id_of_run(self.source.steps(0, 1)[0]) != run.id:
                raise ConfigError(f"{self.source.title} has another run now: start `agentjet track` again")
            yield steps
            version = steps[-1].version
            if (now := self.clock()) - told >= REPORT_SECONDS:
                told = now
                left = (now - started) / (version - first) * max(0, newest - version)
                self.say(f"step {version} of {newest}, {left:.0f} s left")

    @contextmanager
    def _library(self) -> Iterator[None]:
        """The boundary to the tracker's library. Raises `TrackerError`."""
        try:
            yield
        except (AgentJetError, OSError):
            raise
        except Exception as error:
            failed = f"{self.tracker.label} failed ({type(error).__name__}: {error})"
            raise TrackerError(f"{failed}. Start it again: it goes on where it was") from error


def _has_content(path: Path | None) -> bool:
    if path is None or not path.exists():
        return False
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0


@contextmanager
def open_cursor(path: Path, run_id: str) -> Iterator[Cursor]:
    """Context in which no other process has the cursor of a tracker.

    Raises `ConfigError` if another process has it, or if it belongs to another run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path} is held by another `agentjet track`: that process writes these steps already; end it, or "
                "choose another target"
            ) from None
        held = os.pread(file, LENGTH, 0)
        try:
            found: Any = json.loads(held) if held else {"run": run_id, "version": 0}
            owner, version = str(found["run"]), int(found["version"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{path} is not a cursor of `agentjet track`: choose another target") from None
        if owner != run_id:
            raise ConfigError(
                f"{path} belongs to another run ({owner}, this one is {run_id}): choose another target, or "
                "remove what that run wrote, and this file"
            )
        yield Cursor(file, run_id, version, is_new=not held)
    finally:
        os.close(file)


@dataclass
class Cursor:
    """The cursor of a tracker, of an open and locked file."""

    file: int
    run_id: str
    version: int
    is_new: bool
    """True until the first `advance`."""

    def advance(self, version: int) -> None:
        """Records that the tracker has the steps up to this version."""
        text = json.dumps({"run": self.run_id, "version": version})
        os.pwrite(self.file, f"{text:{LENGTH - 1}}\n".encode(), 0)
        os.fsync(self.file)
        self.is_new, self.version = False, version
