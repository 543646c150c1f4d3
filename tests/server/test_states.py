"""The engine's states and its maintenance tasks: after a stop during a task no batch begins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest, status_of
from agentjet.server.monitoring import StepTimer
from tests.fakes import Clock, running


@pytest.mark.anyio
async def test_a_stop_during_an_errand_begins_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1}) as run:
        under_way, go_on = asyncio.Event(), asyncio.Event()

        async def task() -> str:
            under_way.set()
            await go_on.wait()
            return "done"

        saving = asyncio.create_task(run.gateway.phase.between_batches(task))
        await under_way.wait()
        last = run.gateway.swarm.queries.journal.events()[-1].seq
        run.gateway.swarm.batches.ready = lambda: True  # type: ignore[method-assign]
        stopping = asyncio.create_task(run.gateway.engine.stop())
        await run.until(lambda: run.gateway.phase.state == "draining")
        go_on.set()
        assert await saving == "done"
        await stopping
        entered = [
            event.body["state"] for event in run.gateway.swarm.queries.journal.events(last) if event.kind == "state"
        ]
        assert entered == ["draining", "offline"] and "the worker failed" not in caplog.text
        with pytest.raises(Conflict, match="The engine is offline"):
            await run.gateway.versions.save()


@pytest.mark.anyio
async def test_what_would_wait_for_the_model_is_refused_while_it_loads(tmp_path: Path) -> None:
    async with running(tmp_path / "d", wait_ready=False, prepare=lambda compute: compute.may_start.clear()) as run:
        versions = run.gateway.versions
        for request in (versions.save(), versions.export()):
            with pytest.raises(Conflict, match="The engine is loading") as refused:
                await request
            assert (status_of(refused.value), refused.value.code) == (409, "illegal_in_state")


@pytest.mark.anyio
async def test_an_errand_whose_turn_never_comes_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        run.compute.may_sample.clear()
        episode = await run.gateway.begin(BeginRequest(task_id="t", mode="eval"))
        asking = asyncio.create_task(run.say(episode.id))
        await run.until(lambda: len(run.compute.asked) == 1)
        saving = asyncio.create_task(run.gateway.versions.save())
        await asyncio.sleep(0.01)
        stopping = asyncio.create_task(run.gateway.engine.stop())
        await run.until(lambda: run.gateway.phase.state == "draining")
        run.compute.may_sample.set()
        await stopping
        with pytest.raises(Later):
            await saving
        await asyncio.gather(asking, return_exceptions=True)
        assert run.gateway.phase.state == "offline"


@pytest.mark.anyio
async def test_an_errand_whose_caller_was_cancelled_hurts_nobody(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        phase, may_end = run.gateway.phase, asyncio.Event()
        for ends in ("well", "badly"):
            begun = asyncio.Event()

            async def task(ends: str = ends, begun: asyncio.Event = begun) -> None:
                begun.set()
                await may_end.wait()
                if ends == "badly":
                    raise ValueError("of nobody's concern")

            caller = asyncio.create_task(phase.between_batches(task))
            await begun.wait()
            caller.cancel()
            await asyncio.wait([caller])
            may_end.set()
            await run.gateway.versions.export()
            may_end.clear()
        assert (run.compute.starts, phase.state) == (1, "sampling"), "no worker was blamed"


@pytest.mark.anyio
async def test_an_errand_does_not_set_back_the_clock_of_the_batch(tmp_path: Path) -> None:
    async with running(tmp_path / "d") as run:
        now = Clock()
        run.gateway.telemetry.timer = StepTimer(lambda: 0.0, monotonic=now)
        now.advance(5)
        await run.gateway.versions.export()
        now.advance(3)
        await run.batch()
        assert run.gateway.swarm.last_step["time/wait"] == 8
        now.advance(2)
        await run.batch()
        assert run.gateway.swarm.last_step["time/wait"] == 2, "the next batch is timed from the end of this one"
