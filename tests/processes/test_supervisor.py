"""The watchdog on time that the test passes, and the signs of work of a process. Pinned here:

1. only processes that have something to do hang, and only after the timeout without a message;
2. a server that was stopped itself does not take that time for silence, nor an answer of that time for a late one;
3. steps give a sign of work; so do CPU time (that of children included) and waiting for a disk, except in code that
   counts its steps; idleness gives none;
4. a system that does not show a process for a while does not end its signs;
5. time in which processes waited for a core is no silence, and counts in no other limit of an answer;
6. the error of a process that did not start can be copied, as errors of processes are.
The same on processes that were stopped: `tests/compute/test_worker.py`, `tests/cluster/test_rank_process.py`.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from agentjet.errors import AgentJetError, ContextOverflow, NotFound, Unavailable
from agentjet.processes import progress, supervisor
from agentjet.processes.guardian import ProcessEnd
from agentjet.processes.progress import StepCounter, show_progress
from agentjet.processes.supervisor import (
    CHECKS_PER_TIMEOUT,
    NotStarted,
    Watchdog,
    core_queues,
    first_of,
    longest_queued,
    time_limit,
)

TIMEOUT = 100.0


def checks_until_it_hangs(dog: Watchdog, *, has_work: bool = True, most: int = 50) -> int | None:
    """Number of the check that finds it hanging, in checks that come on time."""
    return next((n for n in range(1, most + 1) if dog.hangs(dog.interval, 7, has_work=has_work)), None)


def test_silence_of_a_process_with_something_to_do() -> None:
    dog = Watchdog(TIMEOUT)
    assert not dog.hangs(dog.interval, 7, has_work=True), "its messages came since the last check"
    assert checks_until_it_hangs(dog) == TIMEOUT / dog.interval
    assert checks_until_it_hangs(Watchdog(TIMEOUT), has_work=False) is None


@pytest.mark.parametrize(("num_messages", "has_work"), [(8, True), (7, False)], ids=["message", "idle"])
def test_a_message_begins_the_time_anew(num_messages: int, has_work: bool) -> None:
    dog = Watchdog(TIMEOUT)
    checks_until_it_hangs(dog, most=10)
    assert not dog.hangs(dog.interval, num_messages, has_work=has_work)
    assert checks_until_it_hangs(dog, most=9) is None


def test_the_time_in_which_the_server_was_stopped_does_not_count() -> None:
    dog = Watchdog(TIMEOUT)
    dog.hangs(dog.interval, 7, has_work=True)
    assert not dog.hangs(3600.0, 7, has_work=True)
    assert not dog.hangs(dog.interval, 8, has_work=True)  # What was sent in that hour is read now.
    assert checks_until_it_hangs(dog, most=9) is None


@pytest.mark.parametrize(
    ("queued", "hangs"),
    [
        ([0.0], 10),
        ([10.0], 100),
        ([5.0], 20),
        ([0.0, 0.0, 0.0, 40.0], 100),
        ([400.0, *[0.0] * 49], 11),
    ],
    ids=["none", "all of it", "half of it", "a wait that several checks did not show", "a wait before that"],
)
def test_the_time_without_a_core_does_not_count(queued: list[float], hangs: int) -> None:
    dog, waits = Watchdog(TIMEOUT), itertools.cycle(queued)
    dog.hangs(dog.interval, 7, has_work=True)
    checks = (n for n in range(1, 151) if dog.hangs(dog.interval, 7, has_work=True, queued=next(waits)))
    assert next(checks) == hangs


@pytest.mark.parametrize(
    ("before", "now", "longest"),
    [
        ({}, {}, 0.0),
        ({1: 5.0}, {1: 7.0}, 2.0),
        ({1: 5.0, 2: 1.0}, {1: 7.0, 2: 2.0}, 2.0),
        ({1: 5.0}, {1: 5.0, 3: 900.0}, 0.0),
        ({1: 5.0}, {}, 0.0),
    ],
    ids=["hidden", "one thread", "two at the same time", "new, or not read before", "it ended"],
)
def test_the_longest_wait_counts(before: dict[int, float], now: dict[int, float], longest: float) -> None:
    assert longest_queued(before, now) == longest


@pytest.mark.anyio
@pytest.mark.parametrize("is_starved", [True, False])
@pytest.mark.parametrize("way", ["watchdog", "limit"])
async def test_processes_without_a_core_get_more_time(
    way: str, is_starved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, checks, checked = asyncio.get_running_loop(), itertools.count(), asyncio.Event()

    def queues(*pids: int) -> dict[int, float]:
        assert pids == (5, 6)
        if next(checks) > 4 * CHECKS_PER_TIMEOUT:
            checked.set()
        return {1: loop.time() if is_starved else 3.0}

    monkeypatch.setattr(supervisor, "core_queues", queues)
    processes: Any = [SimpleNamespace(pid=5), None, SimpleNamespace(pid=6)]
    waits = {
        "watchdog": lambda: Watchdog(0.1).hang(lambda: 7, lambda: True, processes),
        "limit": lambda: first_of(loop.create_future(), timeout=0.1, processes=processes),
    }
    waiting = asyncio.ensure_future(waits[way]())
    if is_starved:
        await checked.wait()
        assert not waiting.done()
        waiting.cancel()
    else:
        await waiting


@pytest.mark.anyio
async def test_an_answer_that_came_while_the_loop_was_held_is_in_time() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    def hold() -> None:
        theirs.sendall(b"1")
        time.sleep(0.3)

    with theirs:
        asyncio.get_running_loop().call_soon(hold)
        async with time_limit(0.1):
            assert await reader.readexactly(1) == b"1"
    writer.close()


def test_the_system_shows_how_long_a_process_and_its_children_had_no_core() -> None:
    assert not core_queues(0), "it is on another machine"
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not show it")
    one_core = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); os.fork()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", one_core], start_new_session=True) as busy:
        while len([one for one in core_queues(busy.pid).values() if one > 0.2]) < 2:
            time.sleep(0.01)
        os.killpg(busy.pid, signal.SIGKILL)
    assert not core_queues(busy.pid), "it is gone"


@pytest.mark.parametrize(
    ("interval", "seconds", "signs"),
    [
        (0.1, [1.0, 1.0, 1.0], 1),
        (0.1, [1.0, 1.5, 1.2], 3),
        (0.1, [None, None, None], 3),
        (0.1, [0.0, 0.01, 0.015], 0),
        (0.1, [0.012, 0.024, 0.036], 1),
        (12.0, [0.04 * n for n in range(1000)], 0),
        (12.0, [*(0.04 * n for n in range(1000)), 41.0], 1),
        (12.0, [0.5 * n for n in range(11)], 10),
    ],
    ids=[
        "idle",
        "work, and the end of a child",
        "disk",
        "less than counts",
        "slow work adds up",
        "the threads of gloo",
        "work after hours without",
        "a machine with twenty others",
    ],
)
def test_signs_of_work(
    interval: float, seconds: list[float | None], signs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, sent = iter(seconds), list[int]()
    monkeypatch.setattr(progress, "cpu_seconds", lambda: next(found))
    monkeypatch.setattr(progress.time, "sleep", lambda interval: None)
    with pytest.raises(StopIteration):
        show_progress(lambda: sent.append(1), interval, StepCounter())
    assert sum(sent) == signs


@pytest.mark.parametrize(
    ("contexts", "is_limited", "steps", "signs"),
    [
        ("", False, [0, 0, 0], "+++"),
        ("counted", False, [0, 0, 0], "---"),
        ("counted", False, [0, 1, 0, 5], "-+-+"),
        ("counted long_step", False, [0, 0, 0], "+++"),
        ("counted", True, [0, 0, 0], "+++"),
        ("long_step counted", False, [0, 0, 0], "+++"),
    ],
    ids=["no steps", "hangs", "steps", "a step that may take long", "a hook", "a compiler's thread"],
)
def test_cpu_time_is_no_progress_in_code_that_counts_its_steps(
    contexts: str, is_limited: bool, steps: list[int], signs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each interval uses a second of CPU time, or waits for a disk, and has these steps."""
    shown, left, sent = StepCounter(), iter(enumerate(steps)), list[int]()
    shown.is_limited = lambda: is_limited

    def next_interval(interval: float) -> None:
        sent.append(0)
        shown.num_steps += next(left)[1]

    monkeypatch.setattr(progress, "cpu_seconds", lambda: float(len(sent)) if len(sent) % 2 else None)
    monkeypatch.setattr(progress.time, "sleep", next_interval)
    with ExitStack() as stack:
        for context in contexts.split():
            stack.enter_context(getattr(shown, context)())
        shown.num_steps = 0
        with pytest.raises(StopIteration):
            show_progress(lambda: sent.append(sent.pop() + 1), 0.1, shown)
    assert "".join("-+"[number] for number in sent[:-1]) == signs and not shown.only_steps


def test_cpu_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = progress.cpu_seconds()
    monkeypatch.setattr(progress.time, "thread_time", lambda: 0.0)  # This thread is the one that works.
    sum(i * i for i in range(2_000_000))
    after = progress.cpu_seconds()
    assert before is not None and after is not None and after > before
    for error in (psutil.AccessDenied(), OSError(errno.EMFILE, "Too many open files")):

        def fail(process: psutil.Process, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(psutil.Process, "status", fail)
        assert progress.cpu_seconds() is None


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize(
    "error",
    [
        NotStarted("rank 0", ProcessEnd("ended with exit code 3", 3, "no memory")),
        Unavailable("The disk is full.", code="journal_unavailable", retry_after=5.0),
        ContextOverflow("messages", 9, 8),
        NotFound("No episode e.", param="episode_id"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_can_be_copied_and_sent(
    copied: Callable[[AgentJetError], AgentJetError], error: AgentJetError
) -> None:
    assert (type(copied(error)), str(copied(error)), vars(copied(error))) == (type(error), str(error), vars(error))
