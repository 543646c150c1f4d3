"""Wake those who wait for something to change: everybody (`Broadcast`), or those whom it may concern
(`AdmissionWaiters`).

Single-threaded (one event loop), no locks, nothing to forget on cancellation.

The gate before the sampler: open while the policy may be sampled, held while it learns, shut when the engine is
stopped.

One wait for the disk for all that changed meanwhile, in a thread of its own, while the event loop goes on.

What the ready tasks of one turn of the loop wrote is committed together and handed to the disk; what is written until
that has it follows together, too. Nobody is told of a change before it is on disk, and nobody who only reads it again
(a request that is repeated) either.

How much of the server one client and one episode may use at a time.

A client is who calls itself so (`client_id`): these limits keep honest programs out of each other's way and a runaway
one from filling the server. They are no defence against a holder of the client token, who may take other names.

Work that grows with the size of a request, off the event loop where it is large.

Python runs one thread at a time, so a thread helps only as far as its work is many short steps. The sizes of requests
are limited for the rest: see `server.limits`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import ParamSpec, TypeVar

from agentjet.config import ServerConfig
from agentjet.errors import Later
from agentjet.swarm import Episode, SwarmState


class Broadcast:
    """`notify()` wakes all present waiters; each looks for itself whether what it waits for has come."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def notify(self) -> None:
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def wait(self, timeout: float | None = None) -> None:
        """Until the next `notify`, or `timeout` seconds: then it simply returns, too."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._next], timeout=timeout)

    async def until(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` holds, looking after every `notify`; False when `timeout` seconds passed first."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while not predicate():
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return False
            await self.wait(left)
        return True


class AdmissionWaiters:
    """Those who wait for a place in the batch. A wake costs each a look, so only those who may find one are woken."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}

    async def wait(self, key: Hashable, timeout: float) -> None:
        """Until the next `wake` of everybody or of this key, or `timeout` seconds."""
        woken = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(woken)
        try:
            await asyncio.wait([woken], timeout=timeout)
        finally:
            self._waiting[key].discard(woken)
            if not self._waiting[key]:
                del self._waiting[key]

    def wake(self, *keys: Hashable) -> None:
        """Those who wait with one of these keys; without a key, everybody."""
        for key in keys or list(self._waiting):
            for woken in self._waiting.get(key, ()):
                if not woken.done():
                    woken.set_result(None)


RETRY_AFTER_HOLD = 5.0


class Gate:
    """Lets calls in, holds them or refuses them, and counts those inside.

    Held calls are not refused: agents' SDKs give up after two retries, and a batch takes longer than that to learn.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open = False
        self._refusal: Callable[[], Later] | None = None
        self._changed = Broadcast()
        self._inside = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @property
    def inside(self) -> int:
        """Calls being sampled now."""
        return self._inside

    def busy_seconds(self) -> float:
        """Seconds since the gateway began in which at least one call was inside."""
        return self._busy_seconds + (self._monotonic() - self._busy_since if self._inside else 0.0)

    def open(self) -> None:
        """Let everybody in."""
        self._set(True, None)

    def hold(self) -> None:
        """Let nobody in for now; those inside stay."""
        self._set(False, None)

    def shut(self, refusal: Callable[[], Later]) -> None:
        """Refuse every call, held ones included, with what `refusal` makes."""
        self._set(False, refusal)

    async def drained(self) -> None:
        """Wait until no call is inside. Bounded by the longest completion: sampling never waits for a reader."""
        await self._changed.until(lambda: self._inside == 0)

    @asynccontextmanager
    async def enter(self, timeout: float) -> AsyncIterator[None]:
        """Be inside. Raises `Later` (503) when the gate is shut, or still held after `timeout` seconds."""
        if not await self._changed.until(lambda: self._open or self._refusal is not None, timeout):
            raise Later(
                f"The call was held for {timeout:g} seconds (server.call_timeout) while the policy was learning "
                "or its worker starting.",
                retry_after=RETRY_AFTER_HOLD,
                status=503,
                code="held_too_long",
            )
        if self._refusal is not None:
            raise self._refusal()
        if self._inside == 0:
            self._busy_since = self._monotonic()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._busy_seconds += self._monotonic() - self._busy_since
                self._changed.notify()

    def _set(self, is_open: bool, refusal: Callable[[], Later] | None) -> None:
        self._open, self._refusal = is_open, refusal
        self._changed.notify()


log = logging.getLogger(__name__)


class GroupCommit:
    """GroupCommit a swarm's changes, soon after they were made. One for a gateway."""

    def __init__(self, swarm: SwarmState) -> None:
        self._swarm = swarm
        self._next: asyncio.Future[None] | None = None
        """Done when what is written now, and not committed, is on disk."""
        self._under_way: asyncio.Future[None] | None = None
        """The same of what is committed."""
        self._failed: BaseException | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")
        swarm.store.defer_commits(self._soon)

    async def durable(self) -> None:
        """Returns once everything that was changed so far is on disk.

        Raises `Later`: then nothing of it happened, or, where the disk lost its word, nothing of it may be relied on.
        """
        if self._failed is not None:
            raise self._failed
        waiting = self._next or self._under_way
        if waiting is not None:
            await asyncio.shield(waiting)

    async def close(self) -> None:
        """Wait for the disk a last time; idempotent."""
        while waiting := self._next or self._under_way:
            with suppress(Exception):  # Whoever waited for it was told.
                await asyncio.shield(waiting)
        self._disk.shutdown()

    def _soon(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            if self._under_way is None:
                loop.call_soon(self._commit)

    def _commit(self) -> None:
        waiting, self._next = self._next, None
        assert waiting is not None
        try:
            self._swarm.store.commit()
        except Later as later:
            _refuse(waiting, later)
            return
        except BaseException as error:  # The boundary: whatever failed, those who wait are refused.
            self._give_up(waiting, error)
            if not isinstance(error, Exception):
                raise
            return
        self._under_way = waiting
        synced = asyncio.get_running_loop().run_in_executor(self._disk, self._swarm.store.file.sync)
        synced.add_done_callback(self._synced)

    def _synced(self, done: asyncio.Future[None]) -> None:
        waiting, error = self._under_way, done.exception()
        assert waiting is not None
        try:
            if error is None:
                waiting.set_result(None)
                self._swarm.store.announce()  # Listeners may write: that belongs to the next commit.
            else:
                self._give_up(waiting, error)
        finally:
            self._under_way = None
            if self._next is not None:
                self._commit()

    def _give_up(self, waiting: asyncio.Future[None], error: BaseException) -> None:
        """Refuse those who wait, and everybody from here on: it is not known what of the journal is on disk."""
        is_known = isinstance(error, Later)
        log.critical("the journal is not on disk: %s", error, exc_info=None if is_known else error)
        self._failed = error if is_known else self._swarm.store.file.refuse_writes(error)
        _refuse(waiting, self._failed)


def _refuse(waiting: asyncio.Future[None], error: BaseException) -> None:
    waiting.set_exception(error)
    waiting.exception()  # Nobody need be waiting.


RETRY_AFTER_CALLS = 1.0
TOO_MANY_EPISODES = "too_many_episodes"
RETRY_AFTER_EPISODES = 5.0


class CallLimits:
    """Counts calls, held ones included, by episode and by client."""

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._by_episode: Counter[str] = Counter()
        self._by_client: Counter[str] = Counter()

    @contextmanager
    def calling(self, episode: Episode) -> Iterator[None]:
        """One call of `episode`. Raises `Later` (429) when there are too many already."""
        server = self._server
        self._check(self._by_episode[episode.id], server.max_calls_per_episode, "episode", episode.id)
        self._check(self._by_client[episode.client_id], server.max_calls_per_client, "client", episode.client_id)
        places = ((self._by_episode, episode.id), (self._by_client, episode.client_id))
        for counts, name in places:
            counts[name] += 1
        try:
            yield
        finally:
            for counts, name in places:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]

    @staticmethod
    def _check(count: int, most: int, kind: str, name: str) -> None:
        if count >= most:
            raise Later(
                f"{count} calls of {kind} {name} are under way, which is the most that "
                f"server.max_calls_per_{kind} allows: wait for one to end.",
                retry_after=RETRY_AFTER_CALLS,
                code="too_many_calls",
            )


def too_many_episodes(client_id: str, most: int) -> Later:
    """The answer to a begin of a client that holds `most` live episodes."""
    return Later(
        f"Client {client_id!r} holds {most} live episodes, which is the most that server.max_episodes_per_client "
        "allows: finish or abort one.",
        retry_after=RETRY_AFTER_EPISODES,
        code=TOO_MANY_EPISODES,
    )


Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

LARGE = 64 * 2**10
"""Bytes from which on a thread is worth the two switches that it costs."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="large-request")
"""Apart from asyncio's own threads, because the journal waits for the disk in those."""


async def offload(
    num_bytes: int, work: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """The result of `work`, which must touch nothing that belongs to the event loop: in a thread from `LARGE` on."""
    if num_bytes < LARGE:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: work(*args, **kwargs))


def from_thread(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` for use inside offloaded work: it is called in the present event loop, to which it belongs."""
    loop = asyncio.get_running_loop()

    async def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return function(*args, **kwargs)

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return asyncio.run_coroutine_threadsafe(run(*args, **kwargs), loop).result()

    return call
