"""The client against the real application over a scripted worker: the two halves of the protocol agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm, Episode, Retry
from agentjet.errors import Conflict, Forbidden, InvalidRequest, Unauthorized
from agentjet.types import Reward, Task
from tests.fakes import saying
from tests.server.serving import ADMIN, TOKEN, Served, serving

TASKS = [Task(f"t{number}", task_set="numbers", payload=number) for number in range(4)]


async def agent(task: Task, episode: AsyncEpisode | Episode) -> Reward:
    """Asks with plain HTTP: to make a client of OpenAI's SDK for each episode would be most of this file's time."""
    async with httpx.AsyncClient(base_url=episode.base_url, verify=False, trust_env=False) as http:
        body = {"model": episode.model, "messages": [{"role": "user", "content": f"number {task.payload}"}]}
        answer = await http.post("/chat/completions", json=body, headers={"Authorization": f"Bearer {episode.api_key}"})
    right = answer.raise_for_status().json()["choices"][0]["message"]["content"] == "2"
    return Reward(float(right), metrics={"right": float(right)})


def client(served: Served, token: str = TOKEN) -> AsyncSwarm:
    return AsyncSwarm(served.url, token, retry=Retry(patience=5.0))


def last_letter(prompt: str) -> str:
    """What follows the last "number" of the conversation."""
    return prompt.rpartition("number ")[2][0]


def test_train_evaluate_checkpoint_and_export(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
            report = await swarm.train(agent, TASKS, steps=3, concurrency=8, progress=False)
            assert [step.policy_version for step in report.steps] == [1, 2, 3]
            assert report.num_aborted == 0 and not report.errors
            assert report.steps[-1].metrics["reward/numbers/mean"] == report.rewards[-1]
            evaluated = await swarm.evaluate(agent, TASKS, repeats=2, progress=False)
            assert evaluated.mean_reward == 0.25
            status = await swarm.status()
            assert status.policy_version == evaluated.policy_versions[0] >= 3
            assert status.episodes["live"] == 0
            saved = await swarm.checkpoint()
            assert saved.policy_version == status.policy_version
            assert (await swarm.checkpoints())[-1] == saved
            exported = await swarm.export()
            assert Path(exported.path).is_dir()

    asyncio.run(scenario())


def test_the_way_of_one_episode_and_its_refusals(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
            async with swarm.episode("t", group="g") as episode:
                await agent(TASKS[0], episode)
                assert (await episode.heartbeat()).num_calls == 1
                with pytest.raises(InvalidRequest):
                    await episode.finish(float("inf"))
                assert (await episode.finish(0.5)).reward == 0.5
            assert (await episode.finish(0.5)).reward == 0.5
            with pytest.raises(Conflict):
                await episode.finish(0.75)
            async with swarm.episode("t", mode="eval") as left:
                pass
            assert left.status == "aborted"
            async with client(served, "not-the-token-not-the-token") as stranger:
                with pytest.raises(Unauthorized, match=r"'token' of its data dir.*AGENTJET_TOKEN"):
                    await stranger.status()

    asyncio.run(scenario())


def test_only_the_admin_token_configures_and_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data") as served, client(served) as swarm, client(served, ADMIN) as admin:
            job = await swarm.job()
            with pytest.raises(Forbidden, match="admin-token"):
                await swarm.set_job(job.job, revision=job.revision)
            changed = await admin.set_job({**job.job, "temperature": 0.5}, revision=job.revision)
            assert changed.job["temperature"] == 0.5
            with pytest.raises(Conflict):
                await admin.set_job(job.job, revision=job.revision)
            assert (await admin.stop()).state == "offline"
            with pytest.raises(Conflict, match="offline"):
                await swarm.train(agent, TASKS, steps=1, progress=False)
            await admin.start()
            await served.run.gateway.ready()
            assert (await swarm.status()).state == "rolling"

    asyncio.run(scenario())


def test_a_client_that_gives_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
            served.run.compute.may_sample.clear()
            training = asyncio.create_task(swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False))
            await served.run.until(lambda: len(served.run.compute.asked) == 4)
            training.cancel()
            with pytest.raises(asyncio.CancelledError):
                await training
            served.run.compute.may_sample.set()
            counts = served.run.gateway.swarm.status_counts()
            assert (counts["live"], counts["aborted"]) == (0, 4)

    asyncio.run(scenario())


def test_steps_are_not_missed_when_others_are_faster(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
            await served.run.batch()
            status = await swarm.status()
            assert status.last_event > 0
            await served.run.batch()
            async for event in swarm.events(after=status.last_event):
                if event.kind == "step":
                    assert event.body["policy_version"] == 2
                    break

    asyncio.run(scenario())
