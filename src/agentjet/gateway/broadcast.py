"""Wake those who wait for something to change: everybody (`Broadcast`), or those whom it may concern (`Room`).

Single-threaded (one event loop), no locks, nothing to forget on cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable


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


class Room:
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
