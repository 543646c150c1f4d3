"""`Follower`: copies the steps of a source to a sink, each once, also after a kill at any moment.

At its start it asks the sink which steps it has. Steps are written in rising order, so the newest version is enough.
A `Cursor` is a small file with the run of a sink and its newest written version.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agentjet.errors import AgentJetError, ConfigError, TrackerError
from agentjet.trackers.sinks import Run, Sink, Step, id_of_run

T = TypeVar("T")
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
    """`label` is KIND:TARGET of the sink, and `name` that of the run in the tracker.

    `folder` has the cursor, if the sink is not a file of this machine. `pause` waits for new steps, `say` shows a line.
    """

    source: Source
    sink: Sink
    label: str
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
        run = Run.of(self._first_step(stay), self.name, self.source.settings())
        path = getattr(self.sink, "path", None)
        place = path if isinstance(path, Path) else None
        with open_cursor(self._cursor_path(run, place), run.id) as cursor:
            version = self._begin(run, cursor, place)
            try:
                while True:
                    newest, end = self.source.progress()
                    version = self._catch_up(version, newest, run, cursor)
                    if not stay or newest >= end > 0:
                        self.say(f"{self.label} has all steps up to {version}")
                        return
                    self.pause()
            finally:
                self._call(self.sink.end)

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

    def _cursor_path(self, run: Run, place: Path | None) -> Path:
        """`place` is the file or folder that the sink writes; None for a tracker elsewhere."""
        if place is not None:
            return place.with_name(f"{place.name}.cursor")
        target = hashlib.sha256(self.label.encode()).hexdigest()[:6]
        return self.folder / f"{self.label.partition(':')[0]}-{run.id}-{target}.cursor"

    def _begin(self, run: Run, cursor: Cursor, place: Path | None) -> int:
        """Returns the newest version that the sink has."""
        if cursor.is_new:
            if place is not None and _has_content(place):
                raise ConfigError(f"{self.label} has content of another program: choose another target")
            cursor.advance(0)  # From here on the target belongs to this run.
        found = self._call(lambda: self.sink.begin(run))
        version = cursor.version if found is None else found
        self.say(f"{self.source.title} -> {self.label}: run {run.name}, written up to step {version}")
        return version

    def _catch_up(self, version: int, newest: int, run: Run, cursor: Cursor) -> int:
        """Copies all steps above `version`. Returns the newest version."""
        started, first, told = self.clock(), version, self.clock()
        while steps := self.source.steps(version, PAGE):
            if id_of_run(self.source.steps(0, 1)[0]) != run.id:
                raise ConfigError(f"{self.source.title} has another run now: start `agentjet track` again")
            self._call(lambda steps=steps: self.sink.write(steps))  # type: ignore[misc]
            version = steps[-1].version
            cursor.advance(version)
            if (now := self.clock()) - told >= REPORT_SECONDS:
                told = now
                left = (now - started) / (version - first) * max(0, newest - version)
                self.say(f"step {version} of {newest}, {left:.0f} s left")
        return version

    def _call(self, work: Callable[[], T]) -> T:
        """The boundary to the tracker's library. Raises `TrackerError`."""
        try:
            return work()
        except (AgentJetError, OSError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise TrackerError(f"{self.label} failed ({reason}). Start it again: it goes on where it was") from error


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


@contextmanager
def open_cursor(path: Path, run_id: str) -> Iterator[Cursor]:
    """Context in which no other process has the cursor of a sink.

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
        yield Cursor(path, run_id, file)
    finally:
        os.close(file)


class Cursor:
    """The cursor of a sink, of an open and locked file."""

    def __init__(self, path: Path, run_id: str, file: int) -> None:
        """Raises `ConfigError` if the cursor belongs to another run."""
        self._run_id, self._file = run_id, file
        held = os.pread(file, LENGTH, 0)
        self.is_new = not held
        """True until the first `advance`."""
        try:
            found: Any = json.loads(held) if held else {"run": run_id, "version": 0}
            owner, self.version = str(found["run"]), int(found["version"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{path} is not a cursor of `agentjet track`: choose another target") from None
        if owner != run_id:
            raise ConfigError(
                f"{path} belongs to another run ({owner}, this one is {run_id}): choose another target, or "
                "remove what that run wrote, and this file"
            )

    def advance(self, version: int) -> None:
        """Records that the sink has the steps up to this version."""
        text = json.dumps({"run": self._run_id, "version": version})
        os.pwrite(self._file, f"{text:{LENGTH - 1}}\n".encode(), 0)
        os.fsync(self._file)
        self.is_new, self.version = False, version
