"""A lease runs out when nothing was heard of its episode, and never because the server was busy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentjet.protocol import BeginRequest
from tests.fakes import running

pytestmark = pytest.mark.anyio


async def test_an_expired_lease_frees_its_place(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"lease_seconds": 10}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        run.clock.advance(11)
        await run.until(lambda: run.gateway.swarm.episode(episode.id).status == "expired")


async def test_no_lease_expires_while_nobody_is_heard(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"lease_seconds": 10, "max_episode_seconds": 60}) as run:
        first, second = [await run.gateway.begin(BeginRequest(task_id=task)) for task in "ab"]
        run.clock.advance(30)
        run.stopwatch.advance(30)  # The loop was busy with one thing: heartbeats wait in their sockets.
        assert (await run.gateway.heartbeat(first.id)).status == "live"
        assert run.gateway.status().episodes["live"] == 2, "the other one's heartbeat is yet to be read"
        run.clock.advance(9)
        await run.gateway.heartbeat(first.id)
        run.clock.advance(2)
        await run.until(lambda: run.gateway.swarm.episode(second.id).status == "expired")
        assert run.gateway.swarm.episode(first.id).status == "live"
        run.clock.advance(20)
        run.stopwatch.advance(20)
        await run.until(lambda: run.gateway.swarm.episode(first.id).status == "expired")  # Its maximum runs on.


async def test_a_held_call_keeps_its_lease(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"lease_seconds": 10}) as run:
        episode = await run.gateway.begin(BeginRequest(task_id="t"))
        run.compute.may_sample.clear()
        call = asyncio.create_task(run.say(episode.id))
        await run.until(lambda: len(run.compute.asked) == 1)
        run.clock.advance(60)
        run.gateway.swarm.reap()
        run.compute.may_sample.set()
        assert (await call).response.content == "hi"
