"""Progress of commands that wait: one line on standard error, of what is done, for how long, and how long it will take.

A terminal has the line in place, and it is removed at the end. A file gets a line now and then.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from agentjet.cli import one_line
from agentjet.errors import AgentJetError
from agentjet.types import beginning

if TYPE_CHECKING:
    from agentjet.client import Swarm

PATIENCE = 2.0
"""Seconds before anything is shown."""
LOOK_SECONDS = 1.0
FILE_SECONDS = 10.0
"""Seconds between two lines in a file."""


class ProgressLine:
    """The line. Call `show` each second, and `clear` at the end."""

    def __init__(self, out: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out or sys.stderr
        self._clock = clock
        self._is_terminal = self._out.isatty()
        self._begun = clock()
        self._printed = self._begun - FILE_SECONDS
        self._is_shown = False

    def show(self, text: str) -> None:
        """Show a text, with the time so far unless the text has times. Nothing before `PATIENCE`."""
        from agentjet.protocol import duration

        now = self._clock()
        elapsed = now - self._begun
        if elapsed < PATIENCE or not text:
            return
        line = one_line(text if " so far" in text or " left" in text else f"{text}: {duration(elapsed)} so far")
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._is_shown = True
            self._write(f"\r\x1b[K{beginning(line, width)}")
        elif now - self._printed >= FILE_SECONDS:
            self._printed = now
            self._write(f"{line}\n")

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._is_shown:
            self._is_shown = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # A closed terminal or a full disk must not end the work that is shown.
            self._out.write(text)
            self._out.flush()


@contextmanager
def progress(text: str, doing: Callable[[], str] = lambda: "", *, line: ProgressLine | None = None) -> Iterator[None]:
    """Context of work that may take long. `doing` returns a better text than `text`, or ''; a thread calls it."""
    shown, ended = line or ProgressLine(), threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_SECONDS):
            found = doing() or text
            if not ended.is_set():
                shown.show(found)

    thread = threading.Thread(target=look, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LOOK_SECONDS)
        shown.clear()


def work_of(swarm: Swarm) -> Callable[[], str]:
    """Returns a function that returns what the engine of a server does, while it does slow work, else ''."""

    def doing() -> str:
        with suppress(AgentJetError):
            text = swarm.status().waiting_for
            return text if " so far" in text or " left" in text else ""
        return ""

    return doing
