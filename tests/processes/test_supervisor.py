"""The watchdog on time that the test passes, and the signs of work of a process. Pinned here:

1. only processes that have something to do hang, and only after the timeout without a message;
2. a server that was stopped itself does not take that time for silence;
3. steps give a sign of work; so do CPU time (that of children included) and waiting for a disk, except in code that
   counts its steps; idleness gives none;
4. a system that does not show a process for a while does not end its signs;
5. time in which processes waited for a core is no silence;
6. the error of a process that did not start can be copied, as errors of processes are.
The same on processes that were stopped: `tests/compute/test_worker.py`, `tests/cluster/test_rank_process.py`.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from agentjet.errors import AgentJetError, ContextOverflow, NotFound, Unavailable
from agentjet.processes import progress
from agentjet.processes.guardian import ProcessEnd
from agentjet.processes.progress import StepCounter, show_progress
from agentjet.processes.supervisor import CHECKS_PER_TIMEOUT, NotStarted, Watchdog, starved_seconds

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


@pytest.mark.anyio
@pytest.mark.parametrize("is_starved", [True, False])
async def test_the_time_without_a_core_does_not_count(is_starved: bool) -> None:
    loop, dog = asyncio.get_running_loop(), Watchdog(0.1)
    hang = asyncio.create_task(dog.hang(lambda: 7, lambda: True, loop.time if is_starved else float))
    for _ in range(4 * CHECKS_PER_TIMEOUT):
        await asyncio.sleep(dog.interval)
    assert hang.done() != is_starved
    hang.cancel()


def test_the_system_shows_how_long_a_process_had_no_core() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this system does not show it")
    one_core = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", one_core]) for _ in range(2)]
    try:
        while min(starved_seconds(one.pid) for one in busy) < 0.2:
            time.sleep(0.01)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert starved_seconds(busy[0].pid) == 0, "it is gone"


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
