"""The event stream: `EventPages`, which all streams share; `Ticks`, a short form of it for viewers; and answers that
viewers share.

A busy run has hundreds of events a second. A viewer needs to know which kinds there were, so that it reads again what
they changed. A tick is encoded once for all viewers, and nothing is counted while there are none.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from agentjet.front.concurrency import Broadcast, Turns
from agentjet.protocol import Event, Tick

Answer = TypeVar("Answer")

TICK_SECONDS = 0.7
"""Shortest time between two ticks. Viewers read after each, all at the same time, so that they share the answers."""
PAGE = 128
"""Events that a stream gets at a time."""
PAGES_A_ROUND = 4
MOST_PAGES = 128
"""Encoded pages in memory, about 40 kB each."""
KEPT_TICKS = 80
"""A viewer that is further behind is disconnected. It then reads everything again."""
MOST_ANSWERS = 64
SHARED_SECONDS = 1.0
"""Answers also have times, so they are shared for this long at most."""


@dataclass(slots=True)
class _Page:
    """Encoded events of a range of numbers, up to `seen`."""

    seen: int
    events: list[tuple[int, bytes]] = field(default_factory=list)


class EventPages:
    """The events on disk as server-sent events, a page at a time. A page is read and encoded once for all streams.

    Streams take turns: at most `PAGES_A_ROUND` of them get a page in one round of the event loop. A socket that takes
    everything at once would otherwise let its stream run without a pause.
    """

    def __init__(self, last_event: Callable[[], int], read: Callable[[int, int], Sequence[Event]]) -> None:
        """`last_event` returns the number of the newest event on disk; `read` returns the oldest events after a
        number, as many as a limit.
        """
        self._last_event = last_event
        self._read = read
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        self.turns = Turns(PAGES_A_ROUND)
        """Each stream waits for its turn before each page."""

    def after(self, after: int) -> tuple[int, bytes]:
        """Returns the next events after a number, and the number of the last one; no bytes if there are none."""
        newest = self._last_event()
        while after < newest:
            page = self._page(after // PAGE, newest)
            if events := [encoded for number, encoded in page.events if number > after]:
                return page.events[-1][0], b"".join(events)
            following = self._read(after, 1)  # The rest of the page is no longer kept.
            if not following or following[0].seq > newest:
                break
            after = following[0].seq - 1
        return after, b""

    def _page(self, number: int, newest: int) -> _Page:
        page = self._pages.setdefault(number, _Page(number * PAGE))
        self._pages.move_to_end(number)
        if len(self._pages) > MOST_PAGES:
            self._pages.popitem(last=False)
        end = min((number + 1) * PAGE, newest)
        if page.seen < end:
            events = self._read(page.seen, end - page.seen)
            page.events += [(event.seq, _message(event)) for event in events if event.seq <= end]
            page.seen = end
        return page


def _message(event: Event) -> bytes:
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n".encode()


class Ticks:
    """Counts events by kind and passes the counts to the viewers that `follow`."""

    def __init__(self, last_event: Callable[[], int], missed: Callable[[int, int], Mapping[str, int]]) -> None:
        """`last_event` returns the number of the newest event on disk, `missed` the number of events of each kind after
        a number, up to another.
        """
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
                yield _encoded(newest, self._missed(after, newest))
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


def _encoded(last_event: int, kinds: Mapping[str, int]) -> str:
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
        if self._answers.get(question) is known:
            del self._answers[question]
