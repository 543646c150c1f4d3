"""Being asked to end: what is live is aborted first, and children are ended, as after Ctrl-C.

A process that ends with whoever started it, however that ended: its standard input ends then.

Where synchronous and asynchronous code meet: a loop in a thread for synchronous callers, threads for synchronous
agents.

How a client for synchronous code drives the asynchronous one, which does the work, in an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from agentjet.errors import AgentJetError


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """While inside, a request to end this process (SIGTERM, a closed terminal) raises `SystemExit` in the main thread,
    as Ctrl-C raises `KeyboardInterrupt`. One that the program handles or ignores is left to it; from other threads
    nothing can be done.
    """

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    asking = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    taken = [number for number in asking if signal.getsignal(number) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        taken = []
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


STDIN = 0


def exit_with_parent(number: signal.Signals) -> None:
    """Send this process a signal when its standard input ends."""

    def watch() -> None:
        while os.read(STDIN, 4096):  # Not through Python's buffer, whose lock would be held at the process's end.
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


T = TypeVar("T")

SIGNAL_SECONDS = 0.2
"""How long a signal that another thread received may go unnoticed."""
BLOCKED_SECONDS = 0.1
"""How long a loop that may be blocked is given to end."""
CLEANING_SECONDS = 8.0
"""How long Ctrl-C waits for a coroutine to clean up: longer than the farewells of all episodes together may take."""


class LoopThread:
    """An event loop in a daemon thread, started at the first use: how the synchronous client drives the asynchronous
    one.

    Ctrl-C in the calling thread cancels the coroutine, waits until it has cleaned up, `patience` seconds at most, then
    raises `KeyboardInterrupt`; a second Ctrl-C does not wait. The same holds for what other signal handlers raise. The
    project's own exceptions come without the frames they passed in here, which tell a user nothing.
    """

    def __init__(self, patience: float = CLEANING_SECONDS) -> None:
        self._patience = patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._abandoned = False
        """A coroutine did not end in time: its loop may be blocked, and is waited for no more."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises what it raises."""
        loop = self._started()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "this call would wait for its own event loop: an async agent awaits its episode's methods"
            )
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        running: list[asyncio.Task[None]] = []

        async def deliver() -> None:
            try:
                outcome.set_result(await coroutine)
            except BaseException as error:  # also what would end the loop, had it been let through
                outcome.set_exception(error)

        def begin() -> None:
            running.append(loop.create_task(deliver()))
            running[0].add_done_callback(settle)

        def cancel() -> None:
            if running:
                running[0].cancel()
            else:
                settle(None)

        def settle(task: asyncio.Task[None] | None) -> None:
            if not outcome.done():  # Ctrl-C came before its first step
                coroutine.close()
                outcome.set_exception(asyncio.CancelledError())

        try:
            loop.call_soon_threadsafe(begin)
            _await(outcome)
            return outcome.result()
        except AgentJetError as error:
            raise error.with_traceback(None) from None
        except BaseException:
            if not outcome.done():  # a signal's exception, in this thread
                self._abandoned = True
                loop.call_soon_threadsafe(cancel)
                _await(outcome, self._patience)
                self._abandoned = not outcome.done()
            raise

    def run_agents(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The same for what takes long: a request to end the process cancels the coroutine, too, then ends it."""
        with raise_on_signals():
            return self.run(coroutine)

    def iterate(self, values: AsyncIterator[T]) -> Iterator[T]:
        """Draw from an asynchronous iterator, one value at a time."""

        async def draw() -> tuple[bool, T | None]:
            try:
                return True, await anext(values)
            except StopAsyncIteration:
                return False, None

        while True:
            more, value = self.run(draw())
            if not more:
                return
            yield value  # type: ignore[misc]

    def stop(self) -> None:
        """End the thread; idempotent."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BLOCKED_SECONDS if self._abandoned else None)
        if not thread.is_alive():  # else it, a daemon, ends with the process
            loop.close()

    @property
    def abandoned(self) -> bool:
        """Whether something was left undone in the loop, so that nothing more should be asked of it."""
        return self._abandoned

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="agentjet-client", daemon=True)
            self._thread.start()
        return self._loop


def _await(outcome: concurrent.futures.Future[Any], patience: float = math.inf) -> None:
    """Wait until `outcome` is there, `patience` seconds at most. In short pieces: the system may deliver a signal to
    any thread of the process, and its handler, which runs in the main thread, would not interrupt one long wait there.
    """
    deadline = time.monotonic() + patience
    while not outcome.done() and (left := deadline - time.monotonic()) > 0:
        concurrent.futures.wait([outcome], min(left, SIGNAL_SECONDS))


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run `function` in a daemon thread of its own.

    Not `asyncio.to_thread`: its pool has as many threads as there are cores plus four, fewer than agents that wait for
    a model, and the interpreter cannot exit while one of them hangs. Cancelling abandons the thread; its outcome is
    then ignored.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = context.run(function, *arguments)
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                # A future cannot carry the one, and the others would end the loop instead of the function's caller.
                failure = RuntimeError(f"the function ended by {type(error).__name__}: {error}")
                failure.__cause__ = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="agentjet-agent", daemon=True).start()
    return await future


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C during a run. `except KeyboardInterrupt` catches it; a script that does not ends with the sentence and
    status 1, as after `sys.exit(sentence)`, instead of a traceback.
    """


class Closable(Protocol):
    """An asynchronous client."""

    async def close(self) -> None: ...


Client = TypeVar("Client", bound=Closable)
P = ParamSpec("P")


class SyncClient(Generic[Client]):
    """A client for synchronous code; close it, or use it as a context manager."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = LoopThread()

    def close(self) -> None:
        """Close the connections and end the thread."""
        if not self._loop.abandoned:
            self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def driven(
    verb: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient[Client], P], T]:
    """A method of the asynchronous client as one that returns when it is done, with the same signature."""

    @wraps(verb)
    def drive(self: SyncClient[Client], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(verb(self._client, *args, **kwargs))

    return drive


def driven_run(
    verb: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient[Client], P], T]:
    """The same for one that runs agents. Ctrl-C aborts the live episodes, then raises `Interrupted`; SIGTERM, then
    `SystemExit`.
    """

    @wraps(verb)
    def run_agents(self: SyncClient[Client], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self._loop.run_agents(verb(self._client, *args, **kwargs))
        except (AgentJetError, KeyboardInterrupt) as error:
            raise _told(error) from None

    return run_agents


def _told(error: BaseException) -> BaseException:
    """What ends a script, as its author should see it: the sentence, under the line of the script."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(
            "interrupted: this client's live episodes were aborted (one that could not be ends with its lease), "
            "what was learned stays learned"
        )
    return error.with_traceback(None)
