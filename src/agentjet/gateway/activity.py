"""`Activity`: the slow work of a run, how far it is, and how long it will take.

The time that is left comes from the pace so far, if the work has a known number of parts. Otherwise it comes from the
last time in the same data dir, which `durations.json` keeps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentjet.protocol import duration, remaining
from agentjet.types import SlowWork

SLOW_SECONDS = 2.0
"""Shorter work has no times in its text, and its duration is not kept."""


@dataclass(slots=True)
class Work:
    """Slow work that began at `begun`. Set `done` as its parts are done."""

    kind: str
    text: str
    total: int
    begun: float
    done: int = 0


class Activity:
    """The slow work of one run. Work may contain other work; the innermost is shown."""

    def __init__(self, path: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._stack: list[Work] = []
        self._known = _read(path)

    @contextmanager
    def work(self, kind: str, text: str, total: int = 0) -> Iterator[Work]:
        """Context of slow work. `kind` names works of about the same duration; `total` is the number of its parts."""
        work = Work(kind, text, total, self._monotonic())
        self._stack.append(work)
        try:
            yield work
            self._keep(work)
        finally:
            self._stack.remove(work)

    @property
    def text(self) -> str:
        """A phrase about the present work, such as `saving checkpoint 40: 8 s so far, about 12 s left`, or ''."""
        if not self._stack:
            return ""
        work = self._stack[-1]
        elapsed, known = self._monotonic() - work.begun, self._known.get(work.kind, 0.0)
        parts = [f"{work.done} of {work.total}"] if work.total else []
        if elapsed >= SLOW_SECONDS:
            left = remaining(elapsed, work.done, work.total) or remaining(elapsed, elapsed, known)
            late = f"last time it took {duration(known)}" if 0 < known <= elapsed and not work.total else ""
            parts += [f"{duration(elapsed)} so far", *filter(None, [left or late])]
        return f"{work.text}: {', '.join(parts)}" if parts else work.text

    def _keep(self, work: Work) -> None:
        elapsed = self._monotonic() - work.begun
        if elapsed < SLOW_SECONDS or work.total:
            return
        self._known[work.kind] = round(elapsed, 1)
        with suppress(OSError):  # Only an estimate is lost.
            self._path.touch(0o600)
            self._path.write_text(json.dumps(self._known), encoding="utf-8")


def work_text(work: SlowWork) -> str:
    """A phrase such as `downloading the model x: 120 of 1,200 MB, about 40 s left`."""
    amount = f"{work.done:,.0f} of {work.total:,.0f} {work.unit}" if work.total else f"{work.done:,.0f} {work.unit}"
    return ", ".join(filter(None, [f"{work.text}: {amount}", remaining(work.seconds, work.done, work.total)]))


def _read(path: Path) -> dict[str, float]:
    """Returns the kept durations; none from a missing or damaged file."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {str(kind): float(seconds) for kind, seconds in json.loads(path.read_bytes()).items()}
    return {}
