"""`Ticks`: a short form of the event stream for viewers, and answers that viewers share.

A busy run has hundreds of events a second. A viewer needs to know which kinds there were, so that it reads again what
they changed. A tick is encoded once for all viewers, and nothing is counted while there are none.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from agentjet.gateway.concurrency import Broadcast
from agentjet.protocol import Event, Tick

Answer = TypeVar("Answer")

TICK_SECONDS = 0.7
"""Shortest time between two ticks. Viewers read after each, all at the same time, so that they share the answers."""
KEPT_TICKS = 80
"""A viewer that is further behind is disconnected. It then reads everything again."""
MOST_ANSWERS = 64
SHARED_SECONDS = 1.0
"""Answers also have times, so they are shared for this long at most."""


class Ticks:
    """Counts events by kind and passes the counts to the viewers that `follow`."""

    def __init__(self, last_event: Callable[[], int], missed: Callable[[int], Iterable[Event]]) -> None:
        """`last_event` returns the number of the newest event on disk, `missed` the events after a number."""
        self._newest = last_event
        self._missed = missed
        self._kinds: Counter[str] = Counter()
        self._last_event = 0
        self._ticks: deque[str] = deque(maxlen=KEPT_TICKS)
        self._num_ticks = 0
        self._num_viewers = 0
        self._next: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")
        self._changed = Broadcast()
        self._is_closed = False

    def add(self, event: Event) -> None:
        """Counts an event that is on disk. The tick follows at once, or `TICK_SECONDS` after the one before."""
        if not self._num_viewers:
            return
        self._kinds[event.kind] += 1
        self._last_event = event.seq
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.call_at(max(loop.time(), self._told_at + TICK_SECONDS), self._tell)

    def _tell(self) -> None:
        self._next = None
        self._told_at = asyncio.get_running_loop().time()
        self._ticks.append(_encoded(self._last_event, self._kinds))
        self._kinds.clear()
        self._num_ticks += 1
        self._changed.notify()

    async def follow(self, after: int = 0, *, keep_alive: float = 15.0) -> AsyncGenerator[str | None]:
        """Yields the JSON of ticks about the events above `after`, and None after `keep_alive` idle seconds. Ends with
        the run.
        """
        self._num_viewers += 1
        seen = self._num_ticks
        try:
            if (newest := self._newest()) > after:
                yield _encoded(newest, Counter(event.kind for event in self._missed(after) if event.seq <= newest))
            while not self._is_closed and self._num_ticks - seen <= len(self._ticks):
                if seen < self._num_ticks:
                    seen += 1
                    yield self._ticks[seen - self._num_ticks - 1]
                elif not await self._changed.until(partial(self._has_tick, seen), keep_alive):
                    yield None
        finally:
            self._num_viewers -= 1

    def _has_tick(self, seen: int) -> bool:
        return self._is_closed or self._num_ticks > seen

    def close(self) -> None:
        """Ends all streams. Idempotent."""
        self._is_closed = True
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._changed.notify()


def _encoded(last_event: int, kinds: Counter[str]) -> str:
    return Tick(last_event=last_event, kinds=dict(kinds)).model_dump_json()


@dataclass(frozen=True, slots=True)
class _Shared(Generic[Answer]):
    last_event: int
    """The newest event when the answer was begun: the answer has its effect."""
    begun: float
    answer: asyncio.Future[Answer]


class SharedAnswers(Generic[Answer]):
    """Answers to viewers that ask the same after the same tick."""

    def __init__(self, last_event: Callable[[], int]) -> None:
        """`last_event` returns the number of the newest event on disk."""
        self._last_event = last_event
        self._answers: dict[str, _Shared[Answer]] = {}

    async def get(self, question: str, at: int, answer: Callable[[], Awaitable[Answer]]) -> Answer:
        """Returns an answer that has the effects of event `at`: a known one of the last second, or a new one."""
        now, known = asyncio.get_running_loop().time(), self._answers.get(question)
        if known is None or known.last_event < at or now - known.begun > SHARED_SECONDS:
            self._answers.pop(question, None)
            known = _Shared(self._last_event(), now, asyncio.ensure_future(answer()))
            self._answers[question] = known
            if len(self._answers) > MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]
            asyncio.get_running_loop().call_later(SHARED_SECONDS, self._forget, question, known)
        try:
            return await asyncio.shield(known.answer)
        except Exception:
            self._forget(question, known)
            raise

    def _forget(self, question: str, known: _Shared[Answer]) -> None:
        """Releases an answer, which may be large."""
        if self._answers.get(question) is known:
            del self._answers[question]
