"""1. `train` fills batches and stops. 2. Failures abort, are retried, counted, never scored. 3. Nothing begun is left
live. 4. Sync and async agents, sync and async clients."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from agentjet.client import AgentFailing, AsyncEpisode, AsyncSwarm, Episode, Swarm, wilson_interval
from agentjet.client.rollout import training_slots
from agentjet.errors import Conflict, InvalidRequest
from agentjet.types import Reward, Task
from tests.client.server import TOKEN, URL, FakeServer

TASKS = [Task(f"t{number}", payload=number) for number in range(5)]


def sync_agent(task: Task, episode: Episode) -> float:
    assert episode.api_key == f"key-of-{episode.id}"
    return task.payload / 10


async def async_agent(task: Task, episode: AsyncEpisode) -> Reward:
    await asyncio.sleep(0)
    return Reward(task.payload / 10, metrics={"turns": 2.0})


def client(server: FakeServer) -> Swarm:
    return Swarm(URL, TOKEN, transport=server.transport())


@pytest.mark.parametrize("agent", [sync_agent, async_agent])
@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_train_learns_the_steps_asked_for(agent: Callable[..., float], concurrency: int) -> None:
    server = FakeServer()
    server.version = 7
    with client(server) as swarm:
        report = swarm.train(agent, TASKS, steps=3, concurrency=concurrency, progress=False)
    assert server.version >= 10
    assert [step.policy_version for step in report.steps] == [8, 9, 10]
    assert all(0 <= reward <= 0.4 for reward in report.rewards)
    assert len(report.finished) >= 3 * 2 * 2
    assert report.num_aborted == report.num_expired == 0
    assert server.by_status()["live"] == 0
    assert server.most_live <= concurrency


@pytest.mark.parametrize("agent", [sync_agent, async_agent])
def test_the_async_client_is_the_same(agent: Callable[..., float]) -> None:
    server = FakeServer()

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=server.transport()) as swarm:
            report = await swarm.train(agent, TASKS, steps=2, progress=False)
            assert len(report.steps) == 2

    asyncio.run(scenario())
    assert server.by_status()["live"] == 0


def test_a_failing_agent_aborts_is_tried_again_and_never_scored() -> None:
    server = FakeServer()
    attempts: Counter[str] = Counter()

    def flaky(task: Task, episode: Episode) -> float:
        attempts[episode.group] += 1
        if attempts[episode.group] == 1:
            raise TimeoutError("the tool hung")
        return 1.0

    with client(server) as swarm:
        report = swarm.train(flaky, TASKS, steps=4, concurrency=4, progress=False)
    assert report.rewards == (1.0, 1.0, 1.0, 1.0)
    assert report.num_aborted >= 4 * 2
    assert report.errors["TimeoutError: the tool hung"] == report.num_aborted
    assert report.mean_reward == 1.0
    assert {view.reason for view in server.episodes.values() if view.reason} <= {
        "TimeoutError: the tool hung",
        "the client stopped",
    }


@pytest.mark.parametrize("returned", [None, float("nan"), "good"])
def test_an_agent_that_never_works_ends_the_run_with_its_reason(returned: object) -> None:
    server = FakeServer()
    with client(server) as swarm, pytest.raises(AgentFailing, match=r"first 8 episodes .* reward is"):
        swarm.train(lambda task, episode: returned, TASKS, steps=1, concurrency=4, progress=False)
    assert server.version == 0
    assert server.by_status().keys() == {"aborted"}


def test_an_episode_the_server_reclaimed_is_expired_not_scored() -> None:
    server = FakeServer()

    def slow(task: Task, episode: Episode) -> float:
        if episode.id == "ep1":
            server.episodes["ep1"] = server.episodes["ep1"].model_copy(update={"status": "expired"})
        return 1.0

    with client(server) as swarm:
        report = swarm.evaluate(slow, TASKS[:2], concurrency=1, progress=False)
    assert [result.outcome for result in report.results] == ["finished", "finished"]
    assert server.by_status() == {"finished": 2, "expired": 1}


def test_evaluate_reports_in_the_order_of_the_tasks_and_trains_nothing() -> None:
    server = FakeServer(batch_size=1, group_size=2)
    with client(server) as swarm:
        report = swarm.evaluate(async_agent, TASKS, repeats=2, concurrency=3, progress=False)
    assert [result.task_id for result in report.results] == [task.id for task in TASKS for _ in range(2)]
    assert report.mean_reward == pytest.approx(0.2)
    assert report.mean_metric("turns") == 2.0
    assert report.policy_versions == (0, 0)
    assert server.version == 0
    assert {view.mode for view in server.episodes.values()} == {"eval"}


def test_an_agent_may_finish_its_episode_itself() -> None:
    server = FakeServer()

    def agent(task: Task, episode: Episode) -> None:
        episode.heartbeat()
        episode.finish(Reward(0.25))

    with client(server) as swarm:
        report = swarm.evaluate(agent, TASKS[:1], progress=False)
    assert report.mean_reward == 0.25


def test_an_impossible_number_of_steps_is_refused() -> None:
    server = FakeServer(max_steps=10)
    server.version = 8
    with client(server) as swarm:
        with pytest.raises(InvalidRequest, match=r"max_steps = 10.*2 steps are left, 3 were asked for"):
            swarm.train(sync_agent, TASKS, steps=3, progress=False)
        with pytest.raises(ValueError, match="no tasks"):
            swarm.train(sync_agent, [], steps=1, progress=False)
        server.state = "offline"
        with pytest.raises(Conflict, match="the engine is offline"):
            swarm.train(sync_agent, TASKS, steps=1, progress=False)


def test_a_failed_engine_ends_the_training() -> None:
    server = FakeServer()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        server.emit("state", {"state": "failed", "reason": "the disk is full"})
        await asyncio.sleep(60)
        return 0.0

    with client(server) as swarm, pytest.raises(Conflict, match="the disk is full"):
        swarm.train(agent, TASKS, steps=1, progress=False)
    assert server.by_status()["live"] == 0


def test_ctrl_c_aborts_the_live_episodes_and_is_raised() -> None:
    server = FakeServer()
    stuck = threading.Event()

    def agent(task: Task, episode: Episode) -> float:
        if len(server.episodes) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        stuck.wait(30)
        return 1.0

    with client(server) as swarm, pytest.raises(KeyboardInterrupt):
        swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False)
    stuck.set()
    assert server.by_status() == {"aborted": 4}
    assert {view.reason for view in server.episodes.values()} == {"the client stopped"}


def test_sync_methods_inside_an_async_agent_are_refused_instead_of_hanging() -> None:
    server = FakeServer()
    with client(server) as swarm:

        async def agent(task: Task, episode: AsyncEpisode) -> float:
            swarm.status()
            return 1.0

        with pytest.raises(AgentFailing, match="own event loop"):
            swarm.evaluate(agent, TASKS[:1], progress=False)


def test_tasks_are_visited_in_an_order_the_seed_determines() -> None:
    def visits(seed: int) -> list[str]:
        slots = training_slots(TASKS, 2, seed)
        return [next(slots).task.id for _ in range(20)]

    assert visits(1) == visits(1)
    assert visits(1) != visits(2)
    assert sorted(visits(1)[:10:2]) == sorted(task.id for task in TASKS)
    slots = training_slots(TASKS[:1], 2, 0)
    groups = [next(slots).group for _ in range(4)]
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_progress_lines_say_step_reward_speed_failures_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    with client(server) as swarm:
        swarm.train(lambda task, episode: 0.5, TASKS, steps=2, concurrency=4)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("training 1/2  reward 0.500  100 tokens/s") and first.endswith("left")
    assert last == "training 2/2  reward 0.500  100 tokens/s"


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)
