"""How gateway and worker talk: length-prefixed msgpack over the worker's standard input and output. No torch.

The watchdog: tells a worker that hangs from one that is busy. No torch.

A heartbeat could not. One from a thread of the worker continues while the main loop is deadlocked. One from the main
loop is absent for minutes while a laptop computes one long pass. So the worker is watched from outside: it is busy if
it sent something, used CPU time, or waits for a disk. A process that was stopped or is deadlocked does none of these.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack
import psutil

_LENGTH = struct.Struct("<Q")

Frame = dict[str, Any]


def encode(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> Frame | None:
    """The next frame of a blocking stream; None at its end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(header)[0])
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


async def read_async(stream: asyncio.StreamReader) -> Frame | None:
    """The next frame of an asyncio stream; None at its end, however it ended."""
    try:
        header = await stream.readexactly(_LENGTH.size)
        body = await stream.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


MIN_CPU_SECONDS = 0.02
"""CPU time that counts as work. The operating system counts in steps of 0.01 s."""
CHECKS_PER_TIMEOUT = 10
"""Looks within the timeout."""


@dataclass(frozen=True, slots=True)
class Activity:
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
        return self._timeout / CHECKS_PER_TIMEOUT

    def heard(self) -> None:
        """The worker sent something."""
        self._silence = 0.0

    def hangs(self, elapsed: float, work: Callable[[], Activity | None], *, has_work: bool) -> bool:
        """Look at the worker, `elapsed` seconds after the last look; True if it was silent for `timeout` seconds.

        A look that comes late counts as two intervals at most: then this process was stopped as well, and frames of
        that time may still be unread. `work` returns None if the process ended, which is not for the watchdog to say.
        """
        found = work() if has_work else None
        if found is None or found.waits_for_disk or abs(found.cpu_seconds - self._cpu_seconds) >= MIN_CPU_SECONDS:
            self._silence = 0.0
            self._cpu_seconds = found.cpu_seconds if found is not None else 0.0
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self._timeout


def activity_of(pid: int) -> Activity | None:
    """Activity of a process and its children since it was started; None if it ended."""
    try:
        process = psutil.Process(pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        disk = process.status() == psutil.STATUS_DISK_SLEEP
    except psutil.Error:
        return None
    return Activity(sum(time.user + time.system for time in times), disk)
