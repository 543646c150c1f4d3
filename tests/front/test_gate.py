"""The gate: calls that are refused, or wait while it drains. The pace of streams.

Held calls: `tests/server/test_training.py`; cancelled ones: `tests/server/test_dialects.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from agentjet.errors import Later, Unavailable
from agentjet.front.concurrency import Broadcast, Gate, StreamPace
from tests.fakes import Clock

pytestmark = pytest.mark.anyio


def stopped() -> Later:
    return Unavailable("stopped", retry_after=1, code="stopped")


async def pass_through(gate: Gate, stay: asyncio.Event | None = None, timeout: float = 5) -> str:
    async with gate.enter(timeout):
        if stay is not None:
            await stay.wait()
        return "passed"


async def test_shutting_refuses_the_held_and_the_new() -> None:
    gate = Gate()
    held = asyncio.create_task(pass_through(gate))
    await asyncio.sleep(0)
    gate.shut(stopped)
    for call in (held, pass_through(gate)):
        with pytest.raises(Later, match="stopped"):
            await call


async def test_drained_waits_for_those_inside_and_lets_nobody_in() -> None:
    gate, stay = Gate(), asyncio.Event()
    gate.open()
    inside = asyncio.create_task(pass_through(gate, stay))
    await asyncio.sleep(0)
    gate.hold()
    late = asyncio.create_task(pass_through(gate))
    drained = asyncio.create_task(gate.drained())
    await asyncio.sleep(0.01)
    assert gate.inside == 1 and not drained.done() and not late.done()
    stay.set()
    await drained
    assert await inside == "passed" and gate.inside == 0 and not late.done()
    gate.open()
    assert await late == "passed"


async def test_busy_seconds_count_time_with_somebody_inside() -> None:
    clock = Clock(0.0)
    gate = Gate(monotonic=clock)
    gate.open()
    clock.advance(5)
    async with gate.enter(1):
        clock.advance(2)
        async with gate.enter(1):
            clock.advance(1)
        assert gate.busy_seconds() == 3
    clock.advance(10)
    assert gate.busy_seconds() == 3


async def test_a_broadcast_wakes_everybody_and_a_timeout_is_no_error() -> None:
    changed, seen = Broadcast(), []

    async def wait(name: str) -> None:
        await changed.until(lambda: len(seen) > 0)
        seen.append(name)

    seen.clear()
    tasks = [asyncio.create_task(wait(name)) for name in "ab"]
    await asyncio.sleep(0)
    changed.notify()
    await asyncio.sleep(0.001)
    assert not seen
    seen.append("go")
    changed.notify()
    await asyncio.gather(*tasks)
    assert await changed.until(lambda: False, timeout=0.001) is False


@pytest.mark.parametrize(
    ("passed", "used", "pace"),
    [(0.9, 0.9, 0.05), (2.0, 0.0, 0.05), (2.0, 1.0, 0.15), (2.0, 2.0, 0.25), (1.0, 1.9, 0.25)],
)
def test_the_events_of_streams_come_slower_from_a_busy_process(passed: float, used: float, pace: float) -> None:
    cpu, clock = Clock(), Clock()
    given = StreamPace(cpu=cpu, monotonic=clock)
    cpu.advance(used)
    clock.advance(passed)
    assert given.seconds() == given.seconds() == pytest.approx(pace)
