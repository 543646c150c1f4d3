"""Where synchronous and asynchronous code meet: a loop in a thread for synchronous callers, threads for synchronous
agents."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread, started at the first use: how the synchronous client drives the asynchronous
    one.

    Ctrl-C in the calling thread cancels the coroutine, waits until it has cleaned up, then raises `KeyboardInterrupt`;
    a second Ctrl-C does not wait. The same holds for what other signal handlers raise.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises what it raises."""
        loop = self._started()
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "this call would wait for its own event loop: an async agent awaits its episode's methods"
            )
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        async def deliver() -> None:
            try:
                outcome.set_result(await coroutine)
            except BaseException as error:
                outcome.set_exception(error)

        task = asyncio.run_coroutine_threadsafe(deliver(), loop)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():  # a signal's exception, in this thread
                task.cancel()
                concurrent.futures.wait([outcome])
            raise

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
        thread.join()
        loop.close()

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="agentjet-client", daemon=True)
            self._thread.start()
        return self._loop


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
            failure = RuntimeError("the function stopped iteration") if isinstance(error, StopIteration) else error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="agentjet-agent", daemon=True).start()
    return await future
