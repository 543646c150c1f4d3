"""The watchdog: tells a worker that hangs from one that is busy. No torch.

A heartbeat could not. One from a thread of the worker continues while the main loop is deadlocked. One from the main
loop is absent for minutes while a laptop computes one long pass. So the worker is watched from outside: it is busy if
it sent something, used CPU time, or waits for a disk. A process that was stopped or is deadlocked does none of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil

LEAST_CPU_SECONDS = 0.02
"""CPU time that counts as work. The operating system counts in steps of 0.01 s."""
LOOKS = 10
"""Looks within the timeout."""


@dataclass(frozen=True, slots=True)
class Work:
    """Signs of work of a process and its children."""

    cpu_seconds: float
    waits_for_disk: bool = False


class Watchdog:
    """Adds up the time in which a worker that has something to do shows no sign of work."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self._timeout = timeout
        self._silence = 0.0
        self._cpu_seconds = 0.0

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return self._timeout / LOOKS

    def heard(self) -> None:
        """The worker sent something."""
        self._silence = 0.0

    def hangs(self, elapsed: float, work: Callable[[], Work | None], *, has_work: bool) -> bool:
        """Look at the worker, `elapsed` seconds after the last look; True if it was silent for `timeout` seconds.

        A look that comes late counts as two intervals at most: then this process was stopped as well, and frames of
        that time may still be unread. `work` returns None if the process ended, which is not for the watchdog to say.
        """
        found = work() if has_work else None
        if found is None or found.waits_for_disk or abs(found.cpu_seconds - self._cpu_seconds) >= LEAST_CPU_SECONDS:
            self._silence = 0.0
            self._cpu_seconds = found.cpu_seconds if found is not None else 0.0
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self._timeout


def work_of(pid: int) -> Work | None:
    """Work of a process and its children since it was started; None if it ended."""
    try:
        process = psutil.Process(pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        disk = process.status() == psutil.STATUS_DISK_SLEEP
    except psutil.Error:
        return None
    return Work(sum(time.user + time.system for time in times), disk)
