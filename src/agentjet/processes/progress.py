"""The progress of a process, which it shows to the server by signs of work: see `supervisor.Watchdog`.

`PROGRESS` counts the steps of this process, such as micro-batches and decoding steps. CPU time is not progress in code
that counts its steps: a process that waits for a GPU or in NCCL uses a whole core, and would never be found. CPU time,
and a wait for a disk, are progress in all other code: it imports, loads, compiles or writes one large file, or computes
on a CPU for minutes without a step.

Steps are marked by code that computes and sends no messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

MIN_CPU_SECONDS = 0.02
"""Minimum CPU time that counts as work. The operating system counts in steps of 0.01 s."""
BACKGROUND_SHARE = 0.02
"""CPU seconds a second that never count as work. In a rank that waits for another one, threads of gloo use 0.003."""


class StepCounter:
    """The steps of a process. `only_steps` is True while the running code counts them. Usable from any thread."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.is_limited: Callable[[], bool] = lambda: False
        """True while code runs that has a time limit. It may take longer than a step."""
        self._num_counted = 0
        """Contexts of `counted`."""
        self._num_long = 0
        """Contexts of `long_step`."""
        self._lock = threading.Lock()

    @property
    def only_steps(self) -> bool:
        """True if the running code counts its steps, so that CPU time is not progress."""
        return self._num_counted > 0 and self._num_long == 0 and not self.is_limited()

    def mark(self) -> None:
        """Count a step."""
        self.num_steps += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context of code that marks each of its steps. Its begin and end are steps."""
        self.mark()
        self._num_counted += 1
        try:
            yield
        finally:
            self._num_counted -= 1
            self.mark()

    @contextmanager
    def long_step(self, is_long: bool = True) -> Iterator[None]:
        """Context of one step. If it `is_long`, it may take any time, and its CPU time is progress."""
        if is_long:
            self.begin_long_step()
        try:
            yield
        finally:
            if is_long:
                self.end_long_step()
            self.mark()

    def begin_long_step(self, *_: object) -> None:
        """As `long_step`, for callbacks."""
        with self._lock:  # Compilers call it in threads.
            self._num_long += 1

    def end_long_step(self, *_: object) -> None:
        with self._lock:
            self._num_long -= 1
        self.mark()


PROGRESS = StepCounter()
"""That of this process."""


def show_progress(send_sign: Callable[[], object], interval: float, progress: StepCounter = PROGRESS) -> None:
    """Send a sign of work after each interval, in seconds, in which this process made progress.

    The time of this thread does not count, so a process that waits for another one is silent. A sign for each interval
    would not show a hang: this thread goes on while the main loop is deadlocked.
    """
    before = work = 0.0
    num_steps = 0
    while True:
        time.sleep(interval)
        used = cpu_seconds()
        if used is not None:
            # Little adds up: a busy machine gives it slowly. The sum falls when a child ends.
            work = max(0.0, work + abs(used - before) - BACKGROUND_SHARE * interval)
            before = used
        if progress.only_steps:
            work, has_progressed = 0.0, progress.num_steps != num_steps
        else:
            has_progressed = progress.num_steps != num_steps or used is None or work >= MIN_CPU_SECONDS
        num_steps = progress.num_steps
        if has_progressed:
            work = 0.0
            send_sign()


def cpu_seconds() -> float | None:
    """Returns the CPU time of this process and its children, without that of this thread.

    None if the process waits for a disk, and if the system does not show it: `psutil` passes an `OSError`, for example
    with too many open files. A process whose signs end would be killed.
    """
    try:
        process = psutil.Process()
        if process.status() == psutil.STATUS_DISK_SLEEP:
            return None
        times = [child.cpu_times() for child in process.children(recursive=True)]
    except (psutil.Error, OSError):
        return None
    return time.process_time() - time.thread_time() + float(sum(one.user + one.system for one in times))
