"""`LoopLag`: the lag of a server's event loop, measured by the loop itself, and the function that caused it.

A timer of the loop notes the CPU time of the whole process between two of its runs. CPU time leaves out the time that
other programs take. A thread looks at the stack of the loop while the timer is late.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

log = logging.getLogger(__name__)

EVERY = 0.01
"""Seconds between two runs of the timer."""
BOUND = 0.05
"""CPU seconds for which no request, batch, checkpoint or clean-up may hold the loop."""
LOGGED = 1.0
"""CPU seconds from which a gap is logged."""
RECENT_SECONDS = 600.0
"""Age up to which the status and the health rule show a gap."""
OWN = "agentjet."
MAX_GAPS = 512


@dataclass(frozen=True, slots=True)
class Gap:
    """Time between two runs of the timer."""

    at: float
    """Monotonic time of its end."""
    cpu: float
    """CPU seconds of the process, all threads, at most the wall seconds."""
    wall: float
    held_by: str = ""
    """The function of AgentJet that ran in it, or ''."""


class LoopLag:
    """Measures from `start` to `close`. It belongs to one event loop, and `worst` is called in it."""

    def __init__(
        self, *, cpu: Callable[[], float] = time.process_time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu = cpu
        self._monotonic = monotonic
        self._gaps: list[Gap] = []
        """Oldest first, each with more CPU time than all after it: others are the worst of no period until now."""
        self._last = (0.0, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._held_by = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to measure in the running event loop, or starts again without the gaps so far."""
        self._gaps.clear()
        self._last = (self._cpu(), self._monotonic())
        if self._timer is None:
            self._closed.clear()
            self._timer = asyncio.get_running_loop().call_later(EVERY, self._run)
            arguments = (threading.get_ident(),)
            self._thread = threading.Thread(target=self._look, args=arguments, name="loop-lag", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the measurement. Idempotent."""
        self._closed.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def worst(self, since: float) -> Gap | None:
        """Returns the gap with the most CPU time that ended after the monotonic time `since`."""
        return next((gap for gap in self._gaps if gap.at > since), None)

    def recent(self) -> Gap | None:
        """Returns the worst gap of the last `RECENT_SECONDS`."""
        return self.worst(self._monotonic() - RECENT_SECONDS)

    def now(self) -> float:
        """Returns the monotonic time, for `worst`."""
        return self._monotonic()

    def _run(self) -> None:
        self.note()
        self._timer = asyncio.get_running_loop().call_later(EVERY, self._run)

    def note(self) -> None:
        """Ends one gap and begins the next."""
        (cpu_before, before), now = self._last, (self._cpu(), self._monotonic())
        self._last, held_by, self._held_by = now, self._held_by, ""
        wall = now[1] - before
        # Other threads may compute beside the loop, which is not held longer than the wall time.
        gap = Gap(now[1], min(now[0] - cpu_before, wall), wall, held_by)
        if gap.cpu >= LOGGED:
            log.warning("the event loop was held for %.1f s of CPU time by %s", gap.cpu, held_by or "unknown code")
        while self._gaps and self._gaps[-1].cpu <= gap.cpu:
            self._gaps.pop()
        if len(self._gaps) < MAX_GAPS:
            self._gaps.append(gap)

    def _look(self, loop_thread: int) -> None:
        """The loop of the thread. It sleeps until the timer would be late, so it wakes about 20 times a second."""
        pause = BOUND
        while not self._closed.wait(pause):
            late = self._monotonic() - self._last[1]
            if late >= BOUND and not self._held_by:
                self._held_by = function_of(sys._current_frames().get(loop_thread))
            pause = BOUND - late if late < BOUND else BOUND


def function_of(frame: FrameType | None) -> str:
    """Returns the innermost function of AgentJet on a stack as `module.function`, or ''."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(OWN) and module != __name__:
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return ""
