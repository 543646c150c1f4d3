"""A process of the simulation: its event loop and its disk."""

from __future__ import annotations


class Station:
    """A process with one event loop: a FIFO queue before one server, and a disk with group commit."""

    def __init__(self, sync: float, idle: float = 0.0) -> None:
        """`idle` is the share of its time that work without requests takes."""
        self._stretch = 1 / max(0.01, 1 - idle)
        self._idle = self._measured_from = 0.0
        self.slow_until = 0.0
        """Until then a thread of the process computes, too, and the event loop has half of the time."""
        self._free = 0.0
        self._sync = sync
        self._sync_ends = self._next_ends = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """Returns the time at which a job that arrives now is done."""
        start = max(now, self._free)
        self._idle += start - max(self._free, min(start, self._measured_from))
        seconds *= self._stretch * (2 if start < self.slow_until else 1)
        self._free = start + seconds
        return self._free

    def measure(self, now: float) -> None:
        """Measure the share from now on."""
        self._idle, self._measured_from = 0.0, now

    def busy_share(self, now: float) -> float:
        """Returns the share of the measured time in which the server was busy."""
        idle = self._idle + max(0.0, now - max(self._free, self._measured_from))
        return 1 - idle / (now - self._measured_from)

    def synced(self, now: float) -> float:
        """Returns the time at which a change of now is on disk. Changes during a wait share the next one."""
        if now >= self._sync_ends:
            self._sync_ends = self._next_ends
        if now >= self._sync_ends:
            self._sync_ends = self._next_ends = now + self._sync
        elif self._next_ends == self._sync_ends:
            self._next_ends += self._sync
        return self._next_ends
