"""Task sets, code versions and pinned evaluation over HTTP, on a running engine.

1. A task set without a weight is refused; one that has its share gets a message and `Retry-After`.
2. New weights, and a task set without clients, admit waiting requests of the other sets at once.
3. The status has shares and versions; the command shows them.
4. Learning waits for a pinned evaluation and then continues.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentjet.cli.runs import status_lines
from agentjet.protocol import FinishRequest, StatusResponse
from tests.server.serving import ADMIN, Served, serving

pytestmark = pytest.mark.anyio

WEIGHTS = {"batch_size": 2, "task_weights": {"math": 1.0, "code": 1.0}}


async def refused(served: Served, **body: Any) -> tuple[int, str]:
    response = await served.http.post("/swarm/v1/episodes", json={"task_id": "t", **body})
    later = response.status_code == 429
    assert later == ("Retry-After" in response.headers)
    return response.status_code, response.json()["code"]


async def status(served: Served) -> StatusResponse:
    return StatusResponse.model_validate((await served.http.get("/swarm/v1/status")).json())


async def play(served: Served, task_set: str, **body: Any) -> None:
    """Plays a whole group."""
    begun = [await served.begin(task_set=task_set, client_id=task_set, **body) for _ in range(2)]
    for reward, episode in enumerate(begun):
        await served.run.say(episode["episode_id"])
        await served.run.gateway.finish(episode["episode_id"], FinishRequest(reward=reward))


async def test_who_is_refused_and_how(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job=WEIGHTS) as served:
        assert await refused(served, task_set="poetry") == (409, "task_set_unknown")
        there = await served.begin(task_set="code")
        await served.http.post(f"/swarm/v1/episodes/{there['episode_id']}/abort")
        await play(served, "math")
        assert await refused(served, task_set="math", task_id="u") == (429, "task_set_full")
        assert await refused(served, task_set="math", task_id="u", unless_full=True, wait=60) == (409, "task_set_full")
        assert await refused(served, mode="eval", at_version=3) == (409, "version_gone")
        assert await refused(served, at_version=0) == (422, "invalid_value")


async def test_new_weights_let_in_who_waits(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job=WEIGHTS) as served:
        await served.begin(task_set="code")
        await play(served, "math")
        waiting = asyncio.create_task(served.begin(task_set="math", task_id="u", wait=30))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        body = (await served.http.get("/swarm/v1/job")).json()
        body["job"] |= {"task_weights": {"*": 1.0}, "batch_size": 4}
        await served.http.put("/swarm/v1/job", json=body, headers={"Authorization": f"Bearer {ADMIN}"})
        assert (await asyncio.wait_for(waiting, 5))["episode_id"]


async def test_a_departure_lets_in_who_waits(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job={**WEIGHTS, "lease_seconds": 50.0}) as served:
        gone = await served.begin(task_set="code")
        await play(served, "math")
        waiting = asyncio.create_task(served.begin(task_set="math", task_id="u", wait=30))
        await asyncio.sleep(0.05)
        served.run.clock.advance(50)
        await asyncio.wait_for(waiting, 5)
        assert served.run.gateway.swarm.episode(gone["episode_id"]).status == "expired"
        assert (await status(served)).waiting_for.startswith("rewards of task set 'math' (1 of 2 groups): ")


async def test_shares_and_versions_are_told_and_shown(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job=WEIGHTS) as served:
        await play(served, "math", code_version="v1")
        await play(served, "code", code_version="v2")
        await served.run.until(lambda: served.run.gateway.swarm.policy_version == 1)
        await served.begin(task_set="code", client_id="code", code_version="v2")
        told = await status(served)
        assert (told.task_sets["code"].share, told.task_sets["code"].groups_open) == (0.5, 1)
        assert told.task_sets["math"].reward_mean == told.code_versions["v1"].reward_mean == 0.5
        assert (told.code_versions["v2"].episodes, told.code_versions["v2"].finished) == (3, 2)
        assert [line for line in status_lines(told) if line[0] in ("code", "task sets", "")] == [
            ("code", "v2: reward 0.5 over 2"),
            ("", "v1: reward 0.5 over 2"),
            ("task sets", "code: share 0.5, weight 1, reward 0.5, 0 complete, 1 open"),
            ("", "math: share 0.5, weight 1, reward 0.5, 0 complete, 0 open"),
        ]


async def test_learning_waits_for_a_pinned_evaluation(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", job={"batch_size": 1}) as served:
        pinned = await served.begin(mode="eval", at_version=0)
        await play(served, "math")
        assert "pinned to policy version 0" in (await status(served)).waiting_for
        call = await served.run.say(pinned["episode_id"])
        assert set(call.versions) == {0} and served.run.gateway.phase.state == "sampling"
        await served.http.post(f"/swarm/v1/episodes/{pinned['episode_id']}/finish", json={"reward": 1})
        await served.run.until(lambda: served.run.gateway.swarm.policy_version == 1)
        assert await refused(served, mode="eval", at_version=0) == (409, "version_gone")
