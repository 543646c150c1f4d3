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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from agentjet.errors import AgentJetError, ConfigError, TrackerError
from agentjet.trackers.sink import Run, Sink, Step, id_of_run

T = TypeVar("T")
PAGE = 200
"""Steps that are read and written together."""
REPORT_SECONDS = 2.0
"""Seconds between two lines about a long backfill."""


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
        with Cursor(self._cursor_path(run), run) as cursor:
            version = self._begin(run, cursor)
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

    @property
    def _place(self) -> Path | None:
        """The file or folder that the sink writes; None for a tracker elsewhere."""
        place = getattr(self.sink, "path", None)
        return place if isinstance(place, Path) else None

    def _cursor_path(self, run: Run) -> Path:
        if self._place is not None:
            return self._place.with_name(f"{self._place.name}.cursor")
        target = hashlib.sha256(self.label.encode()).hexdigest()[:6]
        return self.folder / f"{self.label.partition(':')[0]}-{run.id}-{target}.cursor"

    def _begin(self, run: Run, cursor: Cursor) -> int:
        """Returns the newest version that the sink has."""
        if cursor.is_new:
            if self._place is not None and _has_content(self._place):
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


LENGTH = 128
"""Bytes of the file. Always one write of the same length, so that a killed process leaves no half of it."""


class Cursor:
    """The cursor of a sink. Use it as a context manager: inside, no other process holds it."""

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
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{self.path} is not a cursor of `agentjet track`: choose another target") from None
        if run_id != self._run.id:
            raise ConfigError(
                f"{self.path} belongs to another run ({run_id}, this one is {self._run.id}): choose another target, or "
                "remove what that run wrote, and this file"
            )
        return version
