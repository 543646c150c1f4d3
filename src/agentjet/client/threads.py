"""Threads, loops and signals: the border between synchronous and asynchronous code.

* `LoopThread` runs an event loop in a thread, for synchronous callers.
* `in_thread` runs a synchronous agent in a thread.
* `raise_on_signals` and `exit_with_parent` end a process so that its live episodes are aborted first.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import math
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from agentjet.errors import AgentJetError

T = TypeVar("T")
SIGNAL_SECONDS = 0.2
"""Longest delay until the main thread handles a signal that another thread received."""
BLOCKED_SECONDS = 0.1
"""Time for a loop that may be blocked to end."""
INSISTING_SECONDS = 2.0
"""Time after the first signal in which another one does not cut the clean-up short: it may be the same request, sent
twice."""
FORKED = (
    "this client was used before fork(), and its connections and threads belong to the parent process: make a new "
    "Swarm in the child process, or start processes with the method 'spawn'"
)
CLEANING_SECONDS = 8.0
"""Longest wait after Ctrl-C for a coroutine to clean up. Aborting all live episodes must fit."""


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `SystemExit` in the main thread, as Ctrl-C raises `KeyboardInterrupt`.

    A signal that the program handles or ignores is left alone. Has no effect in other threads.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    ending = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # Windows has no SIGHUP.
    taken = [number for number in ending if is_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def exit_with_parent(number: signal.Signals) -> None:
    """Send this process the signal `number` when its standard input ends, that is, when its parent is gone."""

    def watch() -> None:
        while os.read(0, 4096):  # Not through Python's buffer: its lock would be held when the process ends.
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


class LoopThread:
    """An event loop in a daemon thread, started at the first use.

    Ctrl-C in the calling thread cancels the coroutine, waits up to `patience` seconds for its clean-up, then raises
    `KeyboardInterrupt`. Another Ctrl-C ends the wait, except in the first `INSISTING_SECONDS`. The same holds for
    exceptions of other signal handlers. The project's own exceptions are raised without the frames of this module.
    """

    def __init__(self, patience: float = CLEANING_SECONDS) -> None:
        self._patience = patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.abandoned = False
        """True if a coroutine did not end in time: its loop may be blocked, and accepts no more work."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises its exception."""
        if sys.is_finalizing():  # The daemon thread of the loop has ended: a wait for it would never end.
            coroutine.close()
            raise RuntimeError("the interpreter is ending: this episode ends with its lease")
        if self.is_forked:
            coroutine.close()
            raise RuntimeError(FORKED)
        loop = self._started()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "this call would block its own event loop: an async agent awaits the methods of its episode"
            )
        running: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def begin() -> None:
            running.append(loop.create_task(coroutine))
            running[0].add_done_callback(lambda task: ended.set())

        def cancel() -> None:
            for task in running:
                task.cancel()

        try:
            loop.call_soon_threadsafe(begin)
            _wait(ended)
            return running[0].result()
        except AgentJetError as error:
            raise error.with_traceback(None) from None
        except BaseException:
            if not ended.is_set():  # a signal's exception, in this thread
                self.abandoned = True
                loop.call_soon_threadsafe(cancel)
                self._wait_for_end(ended)
                self.abandoned = not ended.is_set()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start the coroutine, without a wait. Raises `RuntimeError` in a forked process."""
        if self.is_forked:
            coroutine.close()
            raise RuntimeError(FORKED)
        return asyncio.run_coroutine_threadsafe(coroutine, self._started())

    @property
    def is_running(self) -> bool:
        """True from the first use until `stop`, in the process of the first use."""
        return self._thread is not None and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """True in a child process of the one that used it first."""
        return self._thread is not None and self._pid != os.getpid()

    def _wait_for_end(self, ended: threading.Event) -> None:
        """Wait for the clean-up of a cancelled coroutine. Raises the exception of a later signal."""
        began = time.monotonic()
        while not ended.is_set() and (left := began + self._patience - time.monotonic()) > 0:
            try:
                _wait(ended, left)
            except (KeyboardInterrupt, SystemExit):
                if time.monotonic() - began > INSISTING_SECONDS:
                    raise

    def iterate(self, values: AsyncIterator[T]) -> Iterator[T]:
        """The values of an asynchronous iterator, one at a time."""

        async def draw() -> tuple[T, ...]:
            async for value in values:
                return (value,)
            return ()

        while drawn := self.run(draw()):
            yield drawn[0]

    def stop(self) -> None:
        """End the thread; idempotent."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BLOCKED_SECONDS if self.abandoned else None)
        if not thread.is_alive():  # else the daemon ends with the process
            loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._pid = os.getpid()
            self._thread = threading.Thread(target=_run, args=[self._loop], name="agentjet-client", daemon=True)
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. Exceptions that end programs pass through the loop, and are also their task's
    result."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
            return


def _wait(ended: threading.Event, patience: float = math.inf) -> None:
    """Wait up to `patience` seconds, in short pieces.

    The system may deliver a signal to any thread. Its handler runs in the main thread, and does not interrupt one long
    wait there.
    """
    deadline = time.monotonic() + patience
    while not ended.is_set() and (left := deadline - time.monotonic()) > 0:
        ended.wait(min(left, SIGNAL_SECONDS))


def caller_of(loop: asyncio.AbstractEventLoop) -> Callable[[Coroutine[Any, Any, T]], T]:
    """A function that runs a coroutine on `loop` from another thread. Raises `RuntimeError` in a forked process."""
    process = os.getpid()

    def call(coroutine: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != process:
            coroutine.close()
            raise RuntimeError(FORKED)
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    return call


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run `function` in a new daemon thread. Cancelling abandons the thread and ignores its outcome.

    Not `asyncio.to_thread`: its pool has only as many threads as cores plus four. Waiting agents may be more, and the
    interpreter cannot exit while one of them hangs.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.set_result(context.run(function, *arguments))
        except BaseException as error:
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                # A future cannot carry StopIteration; the others would end the loop, not the caller.
                wrapped = RuntimeError(f"the function ended by {type(error).__name__}: {error}")
                wrapped.__cause__ = error
                error = wrapped
            outcome.set_exception(error)

    threading.Thread(target=work, name="agentjet-agent", daemon=True).start()
    return await asyncio.wrap_future(outcome)
