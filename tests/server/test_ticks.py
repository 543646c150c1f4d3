"""Ticks and shared answers.

1. A tick counts events by kind; the first follows at once, later ones after a pause. Nothing is counted for nobody.
2. A viewer gets what it missed while it connected. One that is too far behind is disconnected.
3. A page of events is read once for all streams, and streams take turns.
4. An answer is shared if it was begun after the event, and within a second; a failed one is not kept.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentjet.protocol import Event
from agentjet.server import ticks
from agentjet.server.ticks import SharedAnswers, Ticks
from tests.fakes import running

pytestmark = pytest.mark.anyio


class Stream:
    """Events, as a gateway has them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ticks = Ticks(
            lambda: len(self.events), lambda after, last: Counter(event.kind for event in self.events[after:last])
        )

    def emit(self, *kinds: str) -> None:
        for kind in kinds:
            self.events.append(Event(seq=len(self.events) + 1, kind=kind, time=0.0, body={}))
            self.ticks.add(self.events[-1])


async def following(stream: Stream, after: int = 0) -> Any:
    """A viewer that is connected: it got the idle message."""
    viewer = stream.ticks.follow(after, keep_alive=0.0)
    assert await anext(viewer) is None
    return viewer


async def next_tick(viewer: Any) -> dict[str, Any]:
    """The next tick, whatever idle messages come before it."""
    while (tick := await anext(viewer)) is None:
        await asyncio.sleep(0)
    found: dict[str, Any] = json.loads(tick)
    return found


async def test_a_tick_counts_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "TICK_SECONDS", 0.0)
    stream = Stream()
    stream.emit("episode")
    one, other = await following(stream, 1), await following(stream, 1)
    stream.emit("episode", "episode", "step")
    for viewer in (one, other):
        assert await next_tick(viewer) == {"last_event": 4, "kinds": {"episode": 2, "step": 1}}
    stream.emit("state")
    assert await next_tick(one) == {"last_event": 5, "kinds": {"state": 1}}
    stream.ticks.close()
    with pytest.raises(StopAsyncIteration):
        await anext(one)


async def test_a_pause_is_kept_between_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "TICK_SECONDS", 3600.0)
    stream = Stream()
    viewer = await following(stream)
    stream.emit("episode")
    assert (await next_tick(viewer))["last_event"] == 1
    stream.emit("episode")
    for _ in range(20):
        assert await anext(viewer) is None
    stream.ticks.close()


async def test_what_a_viewer_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(ticks, "KEPT_TICKS", 2)
    stream = Stream()
    stream.emit("episode", "step", "step")
    viewer = stream.ticks.follow(1)
    assert json.loads(await anext(viewer)) == {"last_event": 3, "kinds": {"step": 2}}
    for _ in range(3):
        stream.emit("episode")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(StopAsyncIteration):
        await anext(viewer)
    stream.ticks.close()


async def test_shared_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    newest, made = 5, []
    shared = SharedAnswers[int](lambda: newest)

    async def answer() -> int:
        made.append(newest)
        await asyncio.sleep(0)
        return len(made)

    assert await asyncio.gather(*(shared.get("/status", 5, answer) for _ in range(3))) == [1, 1, 1]
    assert await shared.get("/status", 4, answer) == 1 and await shared.get("/waiting", 5, answer) == 2
    assert await shared.get("/status", 6, answer) == 3, "it was begun before event 6"
    newest = 6
    assert await shared.get("/status", 6, answer) == 4 and await shared.get("/status", 6, answer) == 4
    monkeypatch.setattr(ticks, "SHARED_SECONDS", 0.0)
    assert await shared.get("/status", 6, answer) == 5
    while "/status" in shared._answers:
        await asyncio.sleep(0)  # A large answer is not kept without a reader.

    async def failing() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shared.get("/health", 6, failing)
    assert await shared.get("/health", 6, answer) == 6


def test_a_page_is_read_once_for_all_streams_and_is_complete() -> None:
    log = [Event(seq=seq, kind="episode", time=0.0, body={"n": seq}) for seq in range(1, 701) if not 150 < seq < 420]
    newest, num_read = 300, 0

    def read(after: int, limit: int) -> list[Event]:
        nonlocal num_read
        events = [event for event in log if event.seq > after][:limit]
        num_read += len(events)
        return events

    pages = ticks.EventPages(lambda: newest, read)

    def stream(after: int) -> list[int]:
        found = b""
        while (page := pages.after(after))[1]:
            after, found = page[0], found + page[1]
        return [int(line.removeprefix("id: ")) for line in found.decode().splitlines() if line.startswith("id: ")]

    assert stream(0) == list(range(1, 151)), "an event that is not on disk yet is not sent"
    newest = 700
    for after in (0, 5, 127, 128, 149, 150, 300, 419, 500, 699, 700):
        assert stream(after) == [event.seq for event in log if event.seq > after]
    assert num_read < 2 * len(log), "eleven streams read each page once, and beyond its end where events were deleted"


async def test_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = ticks.EventPages(lambda: 0, lambda after, limit: [])
    order: list[int] = []
    rounds: list[int] = []

    async def stream(number: int) -> None:
        for _ in range(3):
            await pages.turns.turn()
            order.append(number)

    async def watch() -> None:
        while len(order) < 60:
            rounds.append(len(order))
            await asyncio.sleep(0)

    ended = asyncio.create_task(stream(20))
    await asyncio.sleep(0)
    ended.cancel()
    await asyncio.gather(watch(), *map(stream, range(20)))
    assert [sorted(order[i : i + 20]) for i in (0, 20, 40)] == [list(range(20))] * 3
    assert max(b - a for a, b in pairwise(rounds)) <= ticks.PAGES_A_ROUND


async def test_pages_of_many_streams_leave_rounds_of_the_loop_to_others(tmp_path: Path) -> None:
    """Sockets that take each page at once would let a stream run without a pause."""
    async with running(tmp_path / "d") as run:
        for number in range(4 * ticks.PAGE):
            run.gateway.swarm.emit("notice", {"number": number})
        await run.until(lambda: run.gateway.last_event >= 4 * ticks.PAGE)
        sent = 0
        rounds: list[int] = []

        async def read() -> None:
            nonlocal sent
            stream = run.gateway.event_stream()
            for _ in range(4):
                assert await anext(stream)
                sent += 1
            await stream.aclose()

        async def watch() -> None:
            while sent < 40:
                rounds.append(sent)
                await asyncio.sleep(0)

        await asyncio.gather(watch(), *(read() for _ in range(10)))
        assert max(b - a for a, b in pairwise(rounds)) <= ticks.PAGES_A_ROUND
