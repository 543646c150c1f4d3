"""Begins that wait for a place in the batch, and the work that they cause, by counting.

1. Events that free no place wake no waiter: calls, heartbeats, rewards, episodes that join another's group.
2. A free place in the batch wakes each waiter once, and the leases are checked once for all.
3. A free place in a group wakes the waiters of that group only. The end of an episode wakes those of its client.
4. A client at its own limit keeps no other one from a free place.
5. New settings wake all waiters. A stop of the engine refuses them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentjet.errors import Later
from agentjet.protocol import AbortRequest, BeginRequest, FinishRequest
from agentjet.swarm import EpisodeRecord
from tests.fakes import Running, job_body, recent_episodes, running

pytestmark = pytest.mark.anyio
WAITING = 20


class Counted:
    """Counts the begins of a swarm and its checks of all leases."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.begins = self.looks = 0
        swarm = run.gateway.swarm
        self._begin, self._reap = swarm.begin, swarm.reap
        swarm.begin = self.begin  # type: ignore[method-assign]
        swarm.reap = self.reap  # type: ignore[method-assign]

    def begin(self, request: BeginRequest, **named: Any) -> EpisodeRecord:
        self.begins += 1
        return self._begin(request, **named)

    def reap(self, most: int | None = None, *, first: str = "") -> list[EpisodeRecord]:
        self.looks += 1
        return self._reap(most, first=first)

    async def settled(self) -> tuple[int, int]:
        """Begins and looks since the last time, once the events of what was done are out."""
        for _ in range(3):  # What was begun of it is on disk, and so are its own events.
            await self.run.gateway.commits.durable()
            for _ in range(10):
                await asyncio.sleep(0)
        counts = self.begins, self.looks
        self.begins = self.looks = 0
        return counts


def asking(group: str, client_id: str = "c", wait: float = 60.0) -> BeginRequest:
    return BeginRequest(task_id="t", group=group, client_id=client_id, wait=wait)


async def test_only_room_wakes_those_who_wait_for_it(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 2, "group_size": 3, "lease_seconds": 1000}) as run:
        gateway = run.gateway
        held = [await gateway.begin(asking(group)) for group in "aab"]
        counted = Counted(run)
        waiting = [asyncio.create_task(gateway.begin(asking(f"w{i}"))) for i in range(WAITING)]
        begins, looks = await counted.settled()
        assert begins == WAITING and looks <= 2
        await run.say(held[0].id)
        await gateway.heartbeat(held[1].id)
        await gateway.finish(held[0].id, FinishRequest(reward=1.0))
        await gateway.begin(asking("b"))
        assert (await counted.settled())[0] == 1, "the one that joined the group"
        await gateway.abort(held[1].id, AbortRequest())  # Group a keeps its finished member, and its place.
        assert (await counted.settled())[0] == 0
        for episode in recent_episodes(gateway.swarm, 10, status="live"):
            await gateway.abort(episode.id, AbortRequest())
        begins, looks = await counted.settled()
        assert sum(task.done() for task in waiting) == 1
        assert begins == WAITING and looks <= 4, "each once, and nobody again because of the one that found a place"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not gateway._waiters._waiting


async def test_a_place_in_a_group_wakes_its_own(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1, "group_size": 2, "lease_seconds": 1000}) as run:
        gateway = run.gateway
        held = [await gateway.begin(asking("a")) for _ in range(2)]
        counted = Counted(run)
        others = [asyncio.create_task(gateway.begin(asking(f"w{i}"))) for i in range(WAITING)]
        own = asyncio.create_task(gateway.begin(asking("a")))
        await counted.settled()
        await gateway.abort(held[0].id, AbortRequest())
        assert (await counted.settled())[0] == 1 and own.done()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def test_members_of_a_group_that_waited_for_its_first_join_it(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1, "group_size": 3, "lease_seconds": 1000}) as run:
        gateway = run.gateway
        held = await gateway.begin(asking("a"))
        waiting = [asyncio.create_task(gateway.begin(asking("b"))) for _ in range(3)]
        await asyncio.sleep(0)
        await gateway.abort(held.id, AbortRequest())
        async with asyncio.timeout(5):
            assert {(await task).group for task in waiting} == {"b"}


async def test_an_end_wakes_those_at_their_clients_limit(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 9}, server={"max_episodes_per_client": 2}) as run:
        gateway = run.gateway
        held = [await gateway.begin(asking(group)) for group in "ab"]
        await run.say(held[0].id)
        waiting = asyncio.create_task(gateway.begin(asking("c")))
        await asyncio.sleep(0)
        await gateway.finish(held[0].id, FinishRequest(reward=1.0))
        async with asyncio.timeout(5):
            assert (await waiting).group == "c"


async def test_a_client_at_its_limit_keeps_no_place_free(tmp_path: Path) -> None:
    job = {"batch_size": 2, "lease_seconds": 1000}
    async with running(tmp_path / "d", job=job, server={"max_episodes_per_client": 2}) as run:
        gateway = run.gateway
        held = [await gateway.begin(asking(group, "a")) for group in "12"]
        limited = asyncio.create_task(gateway.begin(asking("3", "b")))
        await asyncio.sleep(0)
        for _ in range(2):
            await gateway.begin(asking("e", "b").model_copy(update={"mode": "eval"}))
        other = asyncio.create_task(gateway.begin(asking("4", "c")))
        await asyncio.sleep(0)
        run.clock.advance(4.0)  # Only the requests that the server holds still wait.
        await gateway.abort(held[0].id, AbortRequest())
        async with asyncio.timeout(10):
            assert (await other).client_id == "c" and not limited.done()
        limited.cancel()
        await asyncio.gather(limited, return_exceptions=True)


async def test_settings_wake_everybody_and_a_stop_refuses_them(tmp_path: Path) -> None:
    async with running(tmp_path / "d", job={"batch_size": 1, "lease_seconds": 1000}) as run:
        gateway = run.gateway
        await gateway.begin(asking("a"))
        waiting = [asyncio.create_task(gateway.begin(asking(group))) for group in "bc"]
        await asyncio.sleep(0)
        job = job_body(gateway)
        async with asyncio.timeout(10):
            await gateway.replace_job(job.model_copy(update={"job": {**job.job, "batch_size": 2}}))
            done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1
            await gateway.engine.stop()
            with pytest.raises(Later) as refused:
                await next(iter(pending))
        assert refused.value.code == "engine_stopped"
