"""The watchdog, on time that the test passes.

Pinned here:
1. only a worker that has something to do hangs, and only after the timeout without any sign of work;
2. a frame, CPU time (its children's included) and waiting for a disk are signs of work;
3. a gateway that was stopped itself does not take that time for silence;
4. a system that does not show a process for a while ends neither the watch nor the signs of work.
The same on a process that was stopped: `test_worker.py`.
"""

from __future__ import annotations

import errno
import os

import psutil
import pytest

from agentjet.compute.cluster.rank import show_work
from agentjet.compute.embedded.backend import Watchdog, cpu_seconds_of

TIMEOUT = 100.0
SILENT = 7.0


def looks_until_it_hangs(
    dog: Watchdog, *, work: float | None = SILENT, has_work: bool = True, most: int = 50
) -> int | None:
    """Number of the look that finds it hanging, in looks that come on time."""
    looks = range(1, most + 1)
    return next((look for look in looks if dog.hangs(dog.interval, lambda: work, has_work=has_work)), None)


def test_silence_of_a_worker_with_something_to_do() -> None:
    dog = Watchdog(TIMEOUT)
    assert not dog.hangs(dog.interval, lambda: SILENT, has_work=True), "it used CPU time to get there"
    assert looks_until_it_hangs(dog) == TIMEOUT / dog.interval


def test_an_idle_worker_may_be_silent_for_ever() -> None:
    dog = Watchdog(TIMEOUT)
    assert looks_until_it_hangs(dog, has_work=False) is None
    assert looks_until_it_hangs(dog, work=None) is None, "a process that ended does not hang"


@pytest.mark.parametrize("sign", ["frame", "cpu", "disk", "idle"])
def test_a_sign_of_work_begins_the_time_anew(sign: str) -> None:
    dog = Watchdog(TIMEOUT)
    looks_until_it_hangs(dog, most=9)
    if sign == "frame":
        dog.reset()
    elif sign == "cpu":
        assert not dog.hangs(dog.interval, lambda: 7.05, has_work=True)
        assert not dog.hangs(dog.interval, lambda: SILENT, has_work=True), "less, because a child ended"
    elif sign == "disk":
        assert not dog.hangs(dog.interval, lambda: None, has_work=True)
    else:
        dog.hangs(dog.interval, lambda: SILENT, has_work=False)
    assert looks_until_it_hangs(dog, most=9) is None


def test_the_time_in_which_the_gateway_was_stopped_does_not_count() -> None:
    dog = Watchdog(TIMEOUT)
    dog.hangs(dog.interval, lambda: SILENT, has_work=True)
    assert not dog.hangs(3600.0, lambda: SILENT, has_work=True)
    dog.reset()  # What was sent in that hour is read now.
    assert looks_until_it_hangs(dog, most=9) is None


def test_work_of_a_process() -> None:
    before = cpu_seconds_of(os.getpid())
    assert before is not None
    sum(i * i for i in range(2_000_000))
    after = cpu_seconds_of(os.getpid())
    assert after is not None and after > before
    assert cpu_seconds_of(2**22 + 1) is None


@pytest.mark.parametrize("error", [psutil.AccessDenied(), OSError(errno.EMFILE, "Too many open files")])
def test_a_process_that_the_system_does_not_show(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(process: psutil.Process) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "status", fail)
    assert cpu_seconds_of(os.getpid()) is None
    sent: list[object] = []

    def send(answer: object) -> None:
        sent.append(answer)
        if len(sent) == 2:
            raise ConnectionError

    with pytest.raises(ConnectionError):
        show_work(send, 0.0)
