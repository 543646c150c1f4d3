"""1. A request to end the process raises in the main thread, inside the context only. 2. Signals that the program
handles or ignores, and other threads, are not affected."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from agentjet.client.threads import LoopThread, raise_on_signals


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_request_to_end_unwinds() -> None:
    with pytest.raises(SystemExit) as ended, raise_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_the_program_does_itself_stays() -> None:
    heard: list[int] = []
    for own in (lambda number, frame: heard.append(number), signal.SIG_IGN):
        signal.signal(signal.SIGTERM, own)
        with raise_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == own
    assert heard == [signal.SIGTERM]


def test_in_another_thread_it_does_nothing() -> None:
    found: list[object] = []

    def work() -> None:
        with raise_on_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_coroutine_that_exits_ends_its_caller_and_not_the_loop() -> None:
    async def leave(code: int) -> None:
        sys.exit(code)

    async def leave_in_a_task() -> None:
        await asyncio.create_task(leave(4))

    loop, codes = LoopThread(), []

    def work() -> None:
        for coroutine in (leave(3), leave_in_a_task(), asyncio.sleep(0)):
            try:
                loop.run(coroutine)
            except SystemExit as ended:
                codes.append(ended.code)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive() and codes == [3, 4]
    loop.stop()


def test_an_interpreter_that_ends_waits_for_no_coroutine() -> None:
    """An episode that was never left, in a generator that is closed only while the interpreter ends."""
    script = """
from agentjet.client.threads import LoopThread

async def abort():
    pass

def episode(loop):
    try:
        yield
    finally:
        loop.run(abort())

loop = LoopThread()
loop.run(abort())
begun = episode(loop)
next(begun)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=20, capture_output=True, text=True, check=True)
    assert "the interpreter is ending" in ended.stderr
