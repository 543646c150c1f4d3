"""The worker process seen from outside: frames on its standard input and output, and the watchdog. No torch.

A frame is length-prefixed msgpack.

The watchdog ends a worker that hangs. Heartbeats could not detect that: a thread sends them while the main loop is
deadlocked, and a main loop sends none for minutes while it computes one long pass. So the watchdog measures from
outside. A worker is busy if it sent a frame, used CPU time, or waits for a disk.
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


def encode_frame(frame: Frame) -> bytes:
    body: bytes = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> Frame | None:
    """Returns the next frame of a blocking stream; None at its end."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    body = stream.read(_LENGTH.unpack(header)[0])
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


async def read_frame_async(stream: asyncio.StreamReader) -> Frame | None:
    """Returns the next frame of an asyncio stream; None at its end, even within a frame."""
    try:
        header = await stream.readexactly(_LENGTH.size)
        body = await stream.readexactly(_LENGTH.unpack(header)[0])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    frame: Frame = msgpack.unpackb(body, strict_map_key=False)
    return frame


MIN_CPU_SECONDS = 0.02
"""Minimum CPU time that counts as work. The operating system counts in steps of 0.01 s."""
CHECKS_PER_TIMEOUT = 10
"""Number of checks within one timeout."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Work of a process and its children."""

    cpu_seconds: float
    waits_for_disk: bool = False


class Watchdog:
    """Measures how long a worker with pending requests has not worked."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self._timeout = timeout
        self._silence = 0.0
        self._cpu_seconds = 0.0

    @property
    def interval(self) -> float:
        """Seconds between two checks."""
        return self._timeout / CHECKS_PER_TIMEOUT

    def reset(self) -> None:
        """Call for every frame of the worker."""
        self._silence = 0.0

    def hangs(self, elapsed: float, activity: Callable[[], Activity | None], *, has_work: bool) -> bool:
        """Check the worker, `elapsed` seconds after the last check; True if it was idle for `timeout` seconds.

        A late check counts as two intervals at most. A late check means that this process was stopped too, so frames of
        that time may still be unread. `activity` returns None if the process ended; others handle that.
        """
        found = activity() if has_work else None
        if found is None or found.waits_for_disk or abs(found.cpu_seconds - self._cpu_seconds) >= MIN_CPU_SECONDS:
            self._silence = 0.0
            self._cpu_seconds = found.cpu_seconds if found is not None else 0.0
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self._timeout


def activity_of(pid: int) -> Activity | None:
    """Returns the activity of a process and its children since their start; None if the process ended."""
    try:
        process = psutil.Process(pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        disk = process.status() == psutil.STATUS_DISK_SLEEP
    except psutil.Error:
        return None
    return Activity(sum(time.user + time.system for time in times), disk)
