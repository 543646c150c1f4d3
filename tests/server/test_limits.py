"""Limits of one client, and the errors above them.

1. Live episodes of a client are limited. Above the limit: 429 with a way out. Other clients continue, a repeated begin
   gets its answer, and the end of an episode makes room, also for a waiting request.
2. Concurrent calls are limited by episode and by client: 429 in OpenAI's shape, for which its SDK has an exception.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio


async def begin(served: Served, **body: Any) -> httpx.Response:
    headers = {"Idempotency-Key": body.pop("key")} if "key" in body else {}
    return await served.http.post(
        "/swarm/v1/episodes", json={"task_id": "t", "mode": "eval", "client_id": "greedy", **body}, headers=headers
    )


async def test_episodes_of_a_client(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", server={"max_episodes_per_client": 2}) as served:
        first = (await begin(served, key="one")).json()
        assert (await begin(served)).status_code == 200
        refused = await begin(served)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_episodes")
        assert int(refused.headers["Retry-After"]) >= 1 and "server.max_episodes_per_client" in refused.json()["detail"]
        assert (await begin(served, client_id="modest")).status_code == 200
        assert (await begin(served, key="one")).json()["episode_id"] == first["episode_id"]
        waiting = asyncio.create_task(begin(served, wait=10))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await served.http.post(f"/swarm/v1/episodes/{first['episode_id']}/abort")).status_code == 200
        assert (await asyncio.wait_for(waiting, 5)).status_code == 200
        for instance, status in (("killed", 200), ("killed", 200), ("killed", 429), ("new", 200), ("killed", 409)):
            answer = await begin(served, client_id="again", instance_id=instance, mode="eval")
            assert answer.status_code == status, "a successor has the places of the process before it"


@pytest.mark.parametrize("limit", ["max_calls_per_episode", "max_calls_per_client"])
async def test_calls_at_the_same_time(tmp_path: Path, limit: str) -> None:
    async with serving(tmp_path / "d", server={limit: 2}) as served:
        episodes = [(await begin(served)).json() for _ in range(2)]
        other = served.openai((await begin(served, client_id="modest")).json())
        agents = [served.openai(episode) for episode in episodes]
        own = agents[0] if limit == "max_calls_per_episode" else agents[1]

        async def ask(agent: openai.AsyncOpenAI) -> Any:
            return await agent.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])

        served.run.compute.may_sample.clear()
        under_way = [asyncio.create_task(ask(agents[0])) for _ in range(2)]
        await served.run.until(lambda: len(served.run.compute.asked) == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            await asyncio.wait_for(ask(own), 5)
        error = refused.value
        assert (error.status_code, error.code, error.type) == (429, "too_many_calls", "rate_limit_error")
        assert int(error.response.headers["Retry-After"]) >= 1 and f"server.{limit}" in error.message
        elsewhere = asyncio.create_task(ask(other))
        await served.run.until(lambda: len(served.run.compute.asked) == 3)
        served.run.compute.may_sample.set()
        for task in (*under_way, elsewhere):
            assert (await task).choices[0].message.content == "hi"
        assert (await ask(own)).choices[0].message.content == "hi"
