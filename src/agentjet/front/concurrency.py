"""Waiting and limits in one event loop: notifications, turns, the gate before the sampler, group commit, threads.

Everything here belongs to one event loop and needs no locks. A cancelled waiter leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Generic, ParamSpec, TypeVar

from agentjet.errors import Later, Unavailable
from agentjet.swarm.conversations import Conversations

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
StateT = TypeVar("StateT", bound=Conversations)

RETRY_AFTER_HOLD = 5.0
SLICE_SECONDS = 0.010
"""Time for which changes in slices hold the event loop before other work goes on."""
LARGE = 64 * 2**10
"""Bytes of a request from which its work runs in a thread. Below, the two thread switches cost more."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="large-request")
"""Separate from asyncio's default threads, so that large requests do not delay other work in those."""


class Broadcast:
    """`notify()` wakes all present waiters. Each waiter checks its condition again."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def wait(self, timeout: float | None = None) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._next], timeout=timeout)

    async def until(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until `predicate()` is True, checked after every `notify`. Returns False after `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not predicate():
                    await self.wait()
        return predicate()


class Turns:
    """Lets a few callers go on in each round of the event loop, in the order in which they asked.

    The loop runs everything that is ready before it looks at timers and sockets again. Two hundred requests that arrive
    together would hold it for as long as all of them take.
    """

    def __init__(self, a_round: int) -> None:
        self._a_round = a_round
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._round)
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _round(self) -> None:
        for _ in range(min(self._a_round, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # Its caller may have been cancelled.
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._round)


class Gate:
    """The gate before the sampler. It is open while the policy samples, held while it learns, shut while it is stopped.

    Held calls wait and are not refused: agents' SDKs give up after two retries, and learning a batch takes longer.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.inside = 0
        """Number of calls that are being sampled."""
        self._monotonic = monotonic
        self._open = False
        self._refusal: Callable[[], Later] | None = None
        self._changed = Broadcast()
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    def busy_seconds(self) -> float:
        """Seconds since the start in which at least one call was inside."""
        return self._busy_seconds + (self._monotonic() - self._busy_since if self.inside else 0.0)

    @property
    def is_open(self) -> bool:
        return self._open

    def refusal(self) -> Later | None:
        """Returns the refusal of calls; None unless the gate is shut."""
        return None if self._refusal is None else self._refusal()

    def open(self) -> None:
        self._set(True)

    def hold(self) -> None:
        """Makes new calls wait. Calls inside continue."""
        self._set(False)

    def shut(self, refusal: Callable[[], Later]) -> None:
        """Refuses all new and held calls with the error that `refusal` returns."""
        self._set(False, refusal)

    def num_calls(self) -> int:
        """Returns the number of calls inside."""
        return self.inside

    def _set(self, is_open: bool, refusal: Callable[[], Later] | None = None) -> None:
        self._open, self._refusal = is_open, refusal
        self._changed.notify()

    async def drained(self) -> None:
        """Waits until no call is inside: at most for the longest completion, as sampling never waits for a reader."""
        await self._changed.until(lambda: self.inside == 0)

    @asynccontextmanager
    async def enter(self, timeout: float) -> AsyncIterator[None]:
        """Context of one call inside. Raises `Unavailable` if the gate is shut, or held for `timeout` seconds."""
        if not await self._changed.until(lambda: self._open or self._refusal is not None, timeout):
            raise Unavailable(
                f"The call was held for {timeout:g} seconds (server.call_timeout) while the policy was learning "
                "or its worker starting.",
                retry_after=RETRY_AFTER_HOLD,
                code="held_too_long",
            )
        if self._refusal is not None:
            raise self._refusal()
        if self.inside == 0:
            self._busy_since = self._monotonic()
        self.inside += 1
        try:
            yield
        finally:
            if self.inside == 1:
                self._busy_seconds = self.busy_seconds()
            self.inside -= 1
            if self.inside == 0:
                self._changed.notify()


class StreamPace:
    """Seconds between two events of a stream, by the CPU time that this process used in the last second or more.

    They rise evenly from `FASTEST` for an idle process to `SLOWEST` for one that used a whole core.
    """

    FASTEST, SLOWEST = 0.05, 0.25

    def __init__(
        self, *, cpu: Callable[[], float] = time.process_time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._clocks = cpu, monotonic
        self._cpu, self._since = cpu(), monotonic()
        self._seconds = self.FASTEST

    def seconds(self) -> float:
        """Returns the pace of a stream that begins now. It keeps that."""
        if (now := self._clocks[1]()) - self._since >= 1:
            cpu = self._clocks[0]()  # A call of the system: 3 % of the cost of short calls if each stream made it.
            share = (cpu - self._cpu) / (now - self._since)
            self._seconds = self.FASTEST + (self.SLOWEST - self.FASTEST) * min(1.0, share)
            self._cpu, self._since = cpu, now
        return self._seconds


class GroupCommit(Generic[StateT]):
    """Commits all changes of one turn of the event loop together and waits for the disk once, in a thread.

    Changes that are made during that wait form the next group. A change is announced only after it is on disk, and
    repeated requests wait for the disk as well.
    """

    def __init__(self, swarm: StateT, *, monotonic: Callable[[], float] = time.perf_counter) -> None:
        self.swarm = swarm
        self._monotonic = monotonic
        self._next: asyncio.Future[None] | None = None
        """Resolved once the changes that are not committed yet are on disk."""
        self._under_way: asyncio.Future[None] | None = None
        """Resolved once the committed changes are on disk."""
        self._is_held = False
        self._one_at_a_time = asyncio.Lock()
        """Held while changes are made in slices."""
        self._failed: BaseException | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")
        swarm.defer_commits(self._soon)

    async def durable(self) -> None:
        """Waits until all changes so far are on disk. Raises `Later` if the commit was rolled back, or fsync failed."""
        if self._failed is not None:
            raise copy.copy(self._failed)  # Each raise of one error adds frames to its traceback.
        if (waiting := self._next or self._under_way) is not None:
            await asyncio.shield(waiting)

    async def in_slices(self, slices: Iterator[Result]) -> Result:
        """Makes changes in several turns of the event loop that one commit has. Returns the last item.

        The first slice may check a request, and has one transaction at most: an error undoes nothing else. Later errors
        undo all changes since the last commit. So all of the changes are made, or none. A slice is short, and a turn
        takes as many as `SLICE_SECONDS` allow. A cancelled caller makes the rest of the changes at once.
        """
        async with self._one_at_a_time:
            began, found = self._monotonic(), next(slices)
            with self._held():
                try:
                    for newest in slices:
                        found = newest
                        if self._monotonic() - began >= SLICE_SECONDS:
                            await asyncio.sleep(0)
                            began = self._monotonic()
                except asyncio.CancelledError:
                    deque(slices, maxlen=0)
                    raise
        return found

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Context in which nothing is committed. An error undoes all changes since the last commit."""
        self._is_held = True
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.swarm.abandon(error)
            raise
        finally:
            self._is_held = False
            asyncio.get_running_loop().call_soon(self._commit)

    async def close(self) -> None:
        """Waits until all changes are on disk. Idempotent."""
        while waiting := self._next or self._under_way:
            with suppress(Exception):  # `durable` raised it.
                await asyncio.shield(waiting)
        self._disk.shutdown()

    def _soon(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            if self._under_way is None:
                loop.call_soon(self._commit)

    def _commit(self) -> None:
        if self._is_held or self._under_way is not None or self._next is None:
            return  # `_held` and `_synced` commit at their end.
        waiting, self._next = self._next, None
        try:
            self.swarm.commit()
        except Later as later:
            _refuse(waiting, later)
        except BaseException as error:  # The boundary: after any failure the waiters are refused.
            self._give_up(waiting, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._under_way = waiting
            synced = asyncio.get_running_loop().run_in_executor(self._disk, self.swarm.file.sync)
            synced.add_done_callback(self._synced)

    def _synced(self, done: asyncio.Future[None]) -> None:
        waiting, error = self._under_way, done.exception()
        assert waiting is not None
        try:
            if error is None:
                waiting.set_result(None)
                self.swarm.announce()  # Listeners may write; the next commit includes it.
            else:
                self._give_up(waiting, error)
        finally:
            self._under_way = None
            if self._next is not None:
                self._commit()

    def _give_up(self, waiting: asyncio.Future[None], error: BaseException) -> None:
        """Refuses present and later waiters: the state of the journal on disk is unknown."""
        is_known = isinstance(error, Later)
        log.critical("the journal could not be written to disk: %s", error, exc_info=None if is_known else error)
        self._failed = error if is_known else self.swarm.file.refuse_writes(error)
        _refuse(waiting, self._failed)


def _refuse(waiting: asyncio.Future[None], error: BaseException) -> None:
    waiting.set_exception(error)
    waiting.exception()  # Marks it as retrieved: there may be no waiter.


async def offload(
    num_bytes: int, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Returns the result of `work`, run in a thread if `num_bytes` is `LARGE` or more.

    `work` must not touch objects of the event loop. A thread helps only if the work consists of many short steps.
    """
    if num_bytes < LARGE:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: work(*args, **kwargs))


def from_thread(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Returns a version of `function` for offloaded work: it runs in the present event loop and blocks the caller."""
    loop = asyncio.get_running_loop()

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        async def run() -> Result:
            return function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(run(), loop).result()

    return call
