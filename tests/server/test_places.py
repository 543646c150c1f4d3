"""A client that begins episodes, keeps them alive and never calls the model does not keep another one from training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.server.serving import TOKEN, Served, serving

pytestmark = pytest.mark.anyio
LEASE = 20.0


class Greedy:
    """Asks for every place, ten times a second, and sends heartbeats."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.begun: list[str] = []

    async def run(self) -> None:
        http = self.served.http
        for number in range(10_000):
            body = {"task_id": "t", "group": f"g{number}", "client_id": "greedy"}
            answer = await http.post("/swarm/v1/episodes", json=body)
            if answer.status_code == 200:
                self.begun.append(answer.json()["episode_id"])
            else:
                assert answer.status_code == 429
                await asyncio.sleep(0.1)
            await self.heartbeat()

    async def heartbeat(self) -> None:
        for episode_id in self.begun:
            await self.served.http.post(f"/swarm/v1/episodes/{episode_id}/heartbeat")

    async def hold_until(self, condition: Callable[[], bool]) -> None:
        """Sends heartbeats, in a time that runs fast."""
        while not condition():
            self.served.run.clock.advance(LEASE / 100)
            await self.heartbeat()
            await asyncio.sleep(0.02)


async def play(served: Served, http: httpx.AsyncClient, name: str) -> None:
    """One group of two episodes, which waits for its place as long as it takes."""
    begun = []
    while len(begun) < 2:
        body = {"task_id": name, "client_id": "other", "wait": 5}
        answer = await http.post("/swarm/v1/episodes", json=body)
        if answer.status_code == 200:
            begun.append(answer.json())
    for reward, episode in enumerate(begun):
        messages = [{"role": "user", "content": "hello"}]
        await served.openai(episode).chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
        await http.post(f"/swarm/v1/episodes/{episode['episode_id']}/finish", json={"reward": reward})


async def test_a_silent_client_does_not_stop_the_training_of_another_one(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "d", job={"lease_seconds": LEASE, "checkpoint_every": 0}) as served,
        asyncio.timeout(60),
    ):
        greedy = Greedy(served)
        working = asyncio.create_task(greedy.run())
        gateway = served.run.gateway
        await served.run.until(lambda: gateway.swarm.queries.places_left == 0)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=served.url, headers=headers, trust_env=False, timeout=10) as http:
            first = asyncio.gather(*(play(served, http, name) for name in "ab"))
            await served.run.until(lambda: gateway.waiters.num_waiting > 0)
            status = (await http.get("/swarm/v1/status")).json()
            assert "client 'other' waits for a place, 'greedy' holds 2 open groups" in status["waiting_for"]
            assert status["places"]["greedy"]["num_open"] == 2 and status["places"]["other"]["waits"]
            await greedy.hold_until(lambda: first.done() and gateway.swarm.policy_version == 1)
            second = asyncio.gather(*(play(served, http, name) for name in "cd"))
            await greedy.hold_until(lambda: second.done() and gateway.swarm.policy_version == 2)
            await asyncio.gather(first, second)
        assert all(gateway.swarm.episode(one).num_calls == 0 for one in greedy.begun) and len(greedy.begun) > 2
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
