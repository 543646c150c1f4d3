"""The lag of the event loop is measured where it occurs:

1. CPU time counts, and a pause of the machine does not;
2. the worst gap of every period is known, whatever came after it;
3. the function that held the loop is named, for status, metrics and Prometheus;
4. only the check of the leases renews them after a stall: reading a status renews none.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from agentjet.gateway.observability import EVERY, LoopLag, function_of
from agentjet.protocol import BeginRequest
from agentjet.server.monitoring import exposition
from tests.fakes import Clock, running

pytestmark = pytest.mark.anyio


def test_the_worst_gap_of_every_period_is_known() -> None:
    cpu, wall = Clock(), Clock()
    cpu.now = wall.now = 0.0
    lag = LoopLag(cpu=cpu, monotonic=wall)
    lag._last = (0.0, 0.0)
    ends = []
    for cpu_seconds, wall_seconds in [(0.3, 0.3), (0.1, 9.0), (0.2, 0.25), (0.01, 0.01), (4.0, 0.05)]:
        cpu.advance(cpu_seconds)
        wall.advance(wall_seconds)
        lag.note()
        ends.append(wall.now)
    worst = [lag.worst(since) for since in [0.0, *ends]]
    assert [gap and round(gap.cpu, 6) for gap in worst] == [0.3, 0.2, 0.2, 0.05, 0.05, None]
    assert worst[1] is not None and round(worst[1].wall, 6) == 0.25, "a slow machine is not a lag"


def test_the_function_of_agentjet_is_named_that_others_were_called_by() -> None:
    frames: list[str] = []
    space = {"__name__": "agentjet.swarm.made", "call": lambda: frames.append(function_of(sys._getframe()))}
    exec("class Journal:\n    def prune(self):\n        call()\nJournal().prune()", space)
    assert frames == ["agentjet.swarm.made.Journal.prune"]
    assert function_of(None) == function_of(sys._getframe()) == ""


def burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


async def test_a_run_shows_its_lag_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "d") as run:
        gateway = run.gateway
        real = gateway.swarm.queries.status_counts

        def slow() -> dict[str, int]:
            burn(0.3)
            return real()

        monkeypatch.setattr(gateway.swarm.queries, "status_counts", slow)
        gateway.status()
        monkeypatch.undo()
        await run.until(lambda: (worst := gateway.telemetry.lag.recent()) is not None and worst.cpu >= 0.3)
        status = gateway.status()
        assert status.loop is not None and status.loop.cpu >= 0.3 and status.loop.wall >= 0.3
        assert status.loop.held_by.startswith("agentjet.gateway.")
        assert f'agentjet_loop_lag_seconds{{clock="cpu"}} {status.loop.cpu}' in exposition(gateway).decode()
        found = {rule.name: rule for rule in (await gateway.reader.health()).rules}["loop"]
        assert found.level == "warn" and status.loop.held_by in found.text
        await run.batch()
        first = gateway.swarm.last_step
        await run.batch()
        assert first["server/loop_lag"] >= 0.3 > gateway.swarm.last_step["server/loop_lag"]


async def test_reading_a_status_renews_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.gateway.gateway.LEASE_CHECK_SECONDS", 3600.0)
    async with running(tmp_path / "d", job={"lease_seconds": 10}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        before = run.gateway.swarm.expires_at(episode)
        run.clock.advance(5)
        run.stopwatch.advance(5)
        for _ in range(2):
            run.gateway.status()
            assert run.gateway.leases() == {episode.id: before}
        run.gateway.swarm.reap()
        assert run.gateway.swarm.expires_at(episode) == before + 5


async def test_the_measurement_ends_with_the_server(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        thread = run.runs.lag._thread
        assert thread is not None and thread.is_alive()
    assert not thread.is_alive()
    run.runs.lag.close()
    await asyncio.sleep(2 * EVERY)
    assert run.runs.lag._timer is None
