"""The client against the real application over a scripted worker: the two halves of the protocol agree.

1. Training, evaluation, checkpoints, policies, runs, signals and stragglers.
2. Records of a run: filters, orders and pages of episodes; batches; chosen metrics of steps. `EpisodeFilters` has the
   fields of `EpisodeQuery`, except those of pages. `test_inputs` has wrong filters.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm, Episode, Retry, Swarm
from agentjet.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthorized
from agentjet.protocol import EpisodeFilters, EpisodeQuery
from agentjet.types import Reward, Task
from tests.fakes import saying
from tests.server.serving import ADMIN, TOKEN, Served, in_thread, serving

pytestmark = pytest.mark.anyio

TASKS = [Task(f"t{number}", task_set="numbers", payload=number) for number in range(4)]


async def ask(episode: AsyncEpisode | Episode, text: str, **more: Any) -> httpx.Response:
    """Asks with plain HTTP: to make a client of OpenAI's SDK for each episode would be most of this file's time."""
    async with httpx.AsyncClient(base_url=episode.base_url, verify=False, trust_env=False) as http:
        body = {"model": episode.model, "messages": [{"role": "user", "content": text}], **more}
        return await http.post("/chat/completions", json=body, headers={"Authorization": f"Bearer {episode.api_key}"})


async def agent(task: Task, episode: AsyncEpisode | Episode) -> Reward:
    answer = await ask(episode, f"number {task.payload}")
    right = answer.raise_for_status().json()["choices"][0]["message"]["content"] == "2"
    return Reward(float(right), metrics={"right": float(right)})


def client(served: Served, token: str = TOKEN) -> AsyncSwarm:
    return AsyncSwarm(served.url, token, retry=Retry(patience=5.0))


def last_letter(prompt: str) -> str:
    """The character after the last "number " of the conversation."""
    return prompt.rpartition("number ")[2][0]


async def test_train_evaluate_checkpoint_and_export(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
        report = await swarm.train(agent, TASKS, steps=3, concurrency=8, progress=False)
        assert [step.policy_version for step in report.steps] == [1, 2, 3]
        assert report.num_aborted == 0 and not report.errors
        assert report.steps[-1].metrics["reward/numbers/mean"] == report.rewards[-1]
        counts = served.run.gateway.swarm.queries.journal.outcomes()
        assert (counts["live"], counts["finished"], counts["expired"]) == (0, len(report.finished), report.num_expired)
        assert (counts["aborted"], counts["not_needed"]) == (report.num_aborted, report.num_not_needed)
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


async def test_policies_and_a_run_beside_the_default_one(tmp_path: Path) -> None:
    async def played(task: Task, episode: AsyncEpisode) -> dict[str, float | Reward]:
        for episode.model in ("planner", "coder@critic", "coder"):
            await agent(task, episode)
        coder = Reward(float(task.payload % 2), by_role={"critic": 0.25}, metrics={"lines": 3})
        return {"planner": 1.0, "coder": coder}

    policies: dict[str, Any] = {"planner": {}, "coder": {}}
    async with (
        serving(tmp_path / "data", saying(last_letter)) as served,
        client(served, ADMIN) as server,
    ):
        run = await server.start_run("two", policies=policies)
        assert (run.policies, run.is_open) == (("planner", "coder"), True)
        async with server.of_run("two") as swarm:
            async with asyncio.timeout(30):
                reports = await asyncio.gather(
                    swarm.train(played, TASKS, steps=2, concurrency=4, progress=False),
                    server.train(agent, TASKS, steps=2, concurrency=4, progress=False),
                )
            assert reports[0].rewards_of("planner") == (1.0, 1.0)
            means = zip(reports[0].rewards, reports[0].rewards_of("coder"), strict=True)
            assert all(whole == (1.0 + coder) / 2 for whole, coder in means)
            with pytest.raises(ValueError, match="no policy 'planner'"):
                reports[1].rewards_of("planner")
            view = next(view for view in (await swarm.episodes()).episodes if view.status == "finished")
            assert view.by_role.keys() == {"planner", "coder", "coder/critic"} and view.metrics == {"lines": 3.0}
            async with swarm.episode("t", mode="eval") as episode:
                with pytest.raises(InvalidRequest, match="no reward for policy 'coder'") as raised:
                    await episode.finish(Reward(1.0, by_role={"planner": 1.0}))
                await swarm.finish(episode.id, {"planner": 1.0, "coder": 0.0})
                with pytest.raises(Conflict):
                    await episode.heartbeat()
            assert raised.value.param == "coder"
            evaluated = await swarm.evaluate(played, TASKS, progress=False, at_version="newest")
            assert evaluated.of_policy("coder").mean_reward == 0.5
        assert [view.name for view in await server.runs()] == ["default", "two"]
        assert not (await server.end_run("two")).is_open


async def test_one_client_with_two_task_sets_fills_the_batches_by_weight(tmp_path: Path) -> None:
    """Most tasks are of one set. Its workers must not wait for room in it while the other set's place is free: no other
    client would take that place."""
    tasks = [Task(f"{name}{n}", name, n) for name, count in (("many", 8), ("one", 1)) for n in range(count)]
    job = {"task_weights": {"many": 1.0, "one": 1.0}}
    async with serving(tmp_path / "data", saying(last_letter), job=job) as served, client(served) as swarm:
        async with asyncio.timeout(60):
            report = await swarm.train(agent, tasks, steps=6, concurrency=4, progress=False)
    shares = [step.metrics.get("batch/share/one", 0.0) for step in report.steps]
    assert sum(shares) >= 2.5, "of the first batch it may have none: it had not been asked for"


async def test_the_way_of_one_episode_and_its_refusals(tmp_path: Path) -> None:
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
            with pytest.raises(Unauthorized, match=r"file 'token' in the server's data dir.*AGENTJET_TOKEN"):
                await stranger.status()


async def test_only_the_admin_token_configures_and_stops(tmp_path: Path) -> None:
    async with serving(tmp_path / "data") as served, client(served) as swarm, client(served, ADMIN) as admin:
        with pytest.raises(Forbidden, match="admin-token"):
            await swarm.change_job({"temperature": 0.5})
        assert (await admin.change_job({"temperature": 0.5})).job["temperature"] == 0.5
        assert (await admin.stop()).state == "offline"
        with pytest.raises(Conflict, match="offline"):
            await swarm.train(agent, TASKS, steps=1, progress=False)
        await admin.start()
        await served.run.gateway.engine.wait_until_up()
        assert (await swarm.status()).state == "sampling"


async def test_a_client_that_gives_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
        served.run.compute.may_sample.clear()
        training = asyncio.create_task(swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False))
        await served.run.until(lambda: len(served.run.compute.asked) == 4)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        served.run.compute.may_sample.set()
        counts = served.run.gateway.swarm.queries.journal.outcomes()
        assert (counts["live"], counts["aborted"]) == (0, 4)


HANGING = """
import sys, time
from agentjet import Swarm, Task

def agent(task, episode):
    print("hanging", flush=True)
    time.sleep(3600)

swarm = Swarm(sys.argv[1], sys.argv[2])
swarm.train(agent, [Task("a")], steps=1, concurrency=int(sys.argv[3]), progress=False)
"""


async def end_while_agents_hang(served: Served, folder: Path, number: signal.Signals, concurrency: int) -> list[str]:
    """Ends a real process by a real signal; afterwards its episodes are aborted. Returns its stderr."""
    script = folder / "train.py"
    script.write_text(HANGING)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), served.url, TOKEN, str(concurrency)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        hanging = [await process.stdout.readline(), await process.stdout.readline()]
        process.send_signal(number)
        out, err = await process.communicate()
    counts = served.run.gateway.swarm.queries.journal.outcomes()
    assert (counts["live"], counts["finished"]) == (0, 0)
    assert len(hanging) + out.count(b"hanging") <= counts["aborted"] <= 4
    assert process.returncode == (1 if number == signal.SIGINT else 128 + number)
    return err.decode().splitlines()


@pytest.mark.parametrize(
    ("number", "concurrency", "said"),
    [
        (signal.SIGINT, 2, ["interrupted: this client's live episodes were aborted"]),
        (signal.SIGINT, 8, ["interrupted: this client's live episodes were aborted"]),
        (signal.SIGTERM, 8, []),
    ],
)
async def test_a_signal_on_a_script_whose_agents_hang_leaves_no_live_episode(
    tmp_path: Path, number: signal.Signals, concurrency: int, said: list[str]
) -> None:
    """At most four of eight requested episodes find room."""
    async with serving(tmp_path / "data") as served:
        lines = await end_while_agents_hang(served, tmp_path, number, concurrency)
    assert [line.partition(" (")[0] for line in lines] == said


async def test_steps_are_not_missed_when_others_are_faster(tmp_path: Path) -> None:
    async with serving(tmp_path / "data", saying(last_letter)) as served, client(served) as swarm:
        await served.run.batch()
        status = await swarm.status()
        assert status.last_event > 0
        await served.run.batch()
        async for event in swarm.events(after=status.last_event):
            if event.kind == "step":
                assert event.body["policy_version"] == 2
                break


async def test_stragglers_do_not_hold_up_a_run_with_spares(tmp_path: Path) -> None:
    """One episode in each group hangs; spare ones take its place, and it ends as not needed, never scored."""
    hung: set[str] = set()

    async def sometimes_hangs(task: Task, episode: AsyncEpisode | Episode) -> float:
        if task.id not in hung:
            hung.add(task.id)
            await asyncio.sleep(3600)
        await agent(task, episode)
        return float(len(hung) % 2)

    job = {"spare_episodes": 1, "batch_size": 2, "group_size": 2, "lease_seconds": 600}
    async with serving(tmp_path / "data", saying(last_letter), job=job) as served, client(served) as swarm:
        async with asyncio.timeout(20):
            report = await swarm.train(sometimes_hangs, TASKS, steps=2, concurrency=12, progress=False)
        assert len(report.steps) == 2 and report.num_not_needed >= 4
        groups = [event for event in served.run.gateway.swarm.queries.journal.events() if event.kind == "group"]
        complete = [event for event in groups if event.body["state"] == "complete"]
        assert all(len(event.body["episodes"]) == 2 and not event.body["reason"] for event in complete)


def test_an_agent_whose_episode_the_server_ended_gives_its_place_back(tmp_path: Path) -> None:
    """With room for one agent at a time, the run goes on only because the one that hangs is given up."""
    hung: list[str] = []

    async def hangs_once(task: Task, episode: AsyncEpisode | Episode) -> float:
        if not hung:
            hung.append(episode.id)
            served.run.clock.advance(10)
            await asyncio.sleep(3600)
        await agent(task, episode)
        return float(task.payload % 2)

    async def scenario() -> None:
        nonlocal served
        job = {"batch_size": 1, "group_size": 2, "lease_seconds": 0.3}
        async with serving(tmp_path / "data", saying(last_letter), job=job) as served, client(served) as swarm:
            async with asyncio.timeout(20):
                report = await swarm.train(hangs_once, TASKS, steps=1, concurrency=1, progress=False)
            assert len(report.steps) == 1
            assert served.run.gateway.swarm.episode(hung[0]).status == "expired"

    served: Served
    asyncio.run(scenario())


# ---- records ---------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.anyio


def test_the_filters_are_those_of_the_route() -> None:
    assert get_type_hints(EpisodeFilters).keys() | {"limit", "before"} == EpisodeQuery.model_fields.keys()


def test_episodes_by_filter_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.protocol.MOST_EPISODES", 2)

    async def play(served: Served) -> None:
        for number in range(5):
            await served.run.episode(number / 4, task=f"t{number // 2}")

    with (
        in_thread(serving(tmp_path / "d", saying(lambda prompt: "hi"), job={"batch_size": 8})) as (served, loop),
        Swarm(served.url, TOKEN) as swarm,
    ):
        loop.run(play(served))
        with swarm.episode("lost", task_set="s & t"):
            pass
        assert [view.reward for view in swarm.episodes(2, sort="-reward").episodes] == [1.0, 0.75]
        page = swarm.episodes(2, status="finished", max_reward=0.5, count=True)
        assert (len(page.episodes), page.total) == (2, 3) and page.next is not None
        [last] = swarm.episodes(2, before=page.next, status="finished", max_reward=0.5).episodes
        assert last.reward == 0.0
        assert [view.task_id for view in swarm.episodes(task_set="s & t").episodes] == ["lost"]
        rewards = [view.reward for view in swarm.all_episodes(sort="oldest", status="finished")]
        assert rewards == [0.0, 0.25, 0.5, 0.75, 1.0]
        with pytest.raises(NotFound, match="no episode 'gone'"):
            swarm.episodes(before="gone")


async def test_batches_and_steps(tmp_path: Path) -> None:
    async with serving(tmp_path / "d") as served, AsyncSwarm(served.url, TOKEN) as swarm:
        for _ in range(3):
            await served.run.batch()
        page = await swarm.batches(2)
        assert ([batch.id for batch in page.batches], page.next) == ([2, 1], 1)
        assert [batch.id for batch in (await swarm.batches(before=page.next)).batches] == [0]
        batch = await swarm.batch(0)
        assert batch.metrics["reward/mean"] == 0.5 and len(batch.groups) == 2
        with pytest.raises(NotFound, match="no batch 9"):
            await swarm.batch(9)
        steps = await swarm.steps(0, metrics=["reward/mean", "reward/std"])
        assert steps.versions == [1, 2, 3] and steps.metrics.keys() == {"reward/mean", "reward/std"}
