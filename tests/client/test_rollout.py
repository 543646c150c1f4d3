"""1. `train` fills batches and stops. 2. Failures abort, are retried, counted, never scored. 3. Nothing begun is left
live. 4. Sync and async agents, sync and async clients. 5. The end of a run whose server does not answer waits a bounded
time, and can be interrupted at once. 6. Reproducible runs: equal seeds give equal groups in the same order.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from agentjet.client import (
    AgentFailing,
    AsyncEpisode,
    AsyncSwarm,
    Episode,
    EpisodeResult,
    Retry,
    wilson_interval,
)
from agentjet.client.agent_source import AgentVersion
from agentjet.client.episode import STOPPED, wait_for_end
from agentjet.client.rollout import (
    Agent,
    RolloutQueue,
    RolloutSpec,
    Runner,
    wait_for_first,
)
from agentjet.client.threads import LoopThread
from agentjet.client.training import DELAYED_SECONDS, QUIET_SECONDS, Training
from agentjet.errors import Conflict, InvalidRequest, Later, Unauthorized, Unreachable
from agentjet.protocol import BeginRequest
from agentjet.types import Reward, Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime

pytestmark = pytest.mark.anyio

TASKS = [Task(f"t{number}", payload=number) for number in range(5)]


def sync_agent(task: Task, episode: Episode) -> float:
    assert episode.api_key == f"key-of-{episode.id}"
    return task.payload / 10


async def async_agent(task: Task, episode: AsyncEpisode) -> Reward:
    await asyncio.sleep(0)
    return Reward(task.payload / 10, metrics={"turns": 2.0})


@pytest.mark.parametrize("agent", [sync_agent, async_agent])
@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_train_learns_the_steps_asked_for(agent: Callable[..., float], concurrency: int) -> None:
    server = FakeServer()
    server.version = 7
    with server.client() as swarm:
        report = swarm.train(agent, TASKS, steps=3, concurrency=concurrency, progress=False)
    assert server.version >= 10
    assert {request.ends_at_version for request in server.begun} == {10}, "the page shows the time until then"
    assert [step.policy_version for step in report.steps] == [8, 9, 10]
    assert all(0 <= reward <= 0.4 for reward in report.rewards)
    assert len(report.finished) >= 3 * 2 * 2
    assert report.num_aborted == report.num_expired == 0
    assert server.by_status() == {"finished": len(report.finished), "aborted": report.num_not_needed} or (
        server.by_status() == {"finished": len(report.finished)} and not report.num_not_needed
    )
    assert not report.errors and f"{report.num_not_needed} not needed" in str(report)
    assert server.most_live <= concurrency
    assert all(view.reason.startswith("not needed: ") for view in server.episodes.values() if view.reason)


def test_steps_that_could_teach_nothing_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    with server.client() as swarm:
        report = swarm.train(lambda task, episode: 0.0, TASKS, steps=5, concurrency=4)
        shown = capsys.readouterr().out
        assert shown.count("batches in a row could teach nothing") == 1
        assert (
            "reward 0 x 2: 'Two.'" in shown and "the limit of answers: 50% of them were cut at job.max_tokens" in shown
        )
        assert "5 of these steps could teach nothing" in str(report)
        rewards = itertools.cycle([0.0, 1.0])
        report = swarm.train(lambda task, episode: next(rewards), TASKS, steps=5, concurrency=1)
    assert "teach nothing" not in capsys.readouterr().out + str(report)


def test_a_failing_agent_aborts_is_tried_again_and_never_scored() -> None:
    server = FakeServer()
    attempts: Counter[str] = Counter()

    def flaky(task: Task, episode: Episode) -> float:
        attempts[episode.group] += 1
        if attempts[episode.group] == 1:
            raise TimeoutError("the tool hung")
        return 1.0

    with server.client() as swarm:
        report = swarm.train(flaky, TASKS, steps=4, concurrency=4, progress=False)
    assert report.rewards == (1.0, 1.0, 1.0, 1.0)
    assert report.num_aborted >= 4 * 2
    assert report.errors["TimeoutError: the tool hung"] == report.num_aborted
    assert report.mean_reward == 1.0
    assert {view.reason for view in server.episodes.values() if view.reason} <= {
        "TimeoutError: the tool hung",
        "not needed: its client no longer waits for it",
        "not needed: the client's run has its steps",
    }


@pytest.mark.parametrize("returned", [None, float("nan"), "good"])
def test_an_agent_that_never_works_ends_the_run_with_its_reason(returned: object) -> None:
    server = FakeServer()
    with server.client() as swarm, pytest.raises(AgentFailing, match=r"every episode of \d tasks failed .* reward is"):
        swarm.train(lambda task, episode: returned, TASKS, steps=1, concurrency=4, progress=False)
    assert server.version == 0
    assert server.by_status().keys() == {"aborted"}


def test_an_agent_that_calls_no_model_ends_the_run() -> None:
    server = FakeServer(max_steps=0, batch_size=100)
    server.num_calls = 0
    with (
        server.client() as swarm,
        pytest.raises(AgentFailing, match=r"no episode .* \(8\) made a call .* episode\.base_url"),
    ):
        swarm.train(sync_agent, TASKS, steps=1, concurrency=4, progress=False)
    with server.client() as swarm:  # nothing is wrong with that where nothing is trained
        assert len(swarm.evaluate(sync_agent, TASKS, concurrency=1, progress=False).finished) == len(TASKS)


@pytest.mark.parametrize(
    ("num_tasks", "concurrency", "text"),
    [
        (1, 1, "every attempt at task 't0' failed so far (2), the last with KeyError: 'missing' at "),
        (1, 3, "every attempt at task 't0' failed so far (2), the last with "),
        (2, 3, "every episode of 2 tasks failed so far (4), the last with "),
        (5, 2, "every episode of 2 tasks failed so far (4), the last with "),
    ],
)
def test_the_reason_of_a_failing_agent_is_true_for_its_tasks(num_tasks: int, concurrency: int, text: str) -> None:
    """An evaluation of one task that is attempted twice is not one that tries it once."""
    with FakeServer().client() as swarm, pytest.raises(AgentFailing) as failed:
        swarm.evaluate(broken, TASKS[:num_tasks], concurrency=concurrency, progress=False)
    assert str(failed.value).startswith(text)
    assert ("evaluate it on one task" in str(failed.value)) == (num_tasks > 1)


def broken(task: Task, episode: Episode) -> float:
    return float({}["missing"])


async def broken_async(task: Task, episode: AsyncEpisode) -> float:
    return broken(task, episode)  # type: ignore[arg-type]


def refused(task: Task, episode: Episode) -> float:
    body = {"error": {"message": "temperature = 0 is not possible"}}
    httpx.Response(400, json=body, request=httpx.Request("POST", "http://server")).raise_for_status()
    return 1.0


class Silent:
    def __call__(self, task: Task, episode: Episode) -> None:
        pass


@pytest.mark.parametrize(
    ("agent", "line", "said"),
    [
        (broken, broken.__code__.co_firstlineno + 1, "KeyError: 'missing'"),
        (functools.partial(broken), broken.__code__.co_firstlineno + 1, "KeyError: 'missing'"),
        (broken_async, broken.__code__.co_firstlineno + 1, "KeyError: 'missing'"),
        (refused, refused.__code__.co_firstlineno + 2, "400 Bad Request.*: temperature = 0 is not possible at"),
        (Silent(), Silent.__call__.__code__.co_firstlineno, "reward is None"),
        (lambda task, episode: sys.exit("tired"), None, "SystemExit: tired"),
    ],
)
def test_what_ends_a_run_names_the_agents_own_line(agent: Callable[..., float], line: int | None, said: str) -> None:
    with FakeServer().client() as swarm, pytest.raises(AgentFailing, match=f"(?s){said}") as failed:
        swarm.train(agent, TASKS, steps=1, concurrency=1, progress=False)
    assert f" at {__file__}:{line or ''}" in str(failed.value)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (SystemExit(3), "RuntimeError: the agent called sys.exit(3)"),
        (Unreachable("no answer from the judge"), "Unreachable: no answer from the judge"),
    ],
)
def test_an_error_of_an_async_agent_ends_its_episode_only(error: BaseException, reason: str) -> None:
    server = FakeServer()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        if episode.id == "ep0":
            raise error
        return 1.0

    with server.client() as swarm:
        report = swarm.train(agent, TASKS, steps=1, concurrency=2, progress=False)
    assert len(report.steps) == 1 and report.mean_reward == 1.0
    assert [result.error for result in report.results if result.outcome == "aborted"] == [reason]
    assert server.episodes["ep0"].reason == reason


def inside(error: BaseException) -> list[str]:
    """The functions of ours that a traceback shows, outermost first; what was suppressed is not shown."""
    assert error.__suppress_context__ and error.__cause__ is None
    shown = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in shown if "agentjet" in Path(frame.filename).parts]


def test_tracebacks_show_one_frame_and_nothing_of_the_inside() -> None:
    with pytest.raises(AgentFailing) as failing, FakeServer().client() as swarm:
        swarm.train(broken, TASKS, steps=1, concurrency=1, progress=False)
    assert inside(failing.value) == ["run_agents"]
    with pytest.raises(AgentFailing) as failing, FakeServer().client() as swarm:
        swarm.evaluate(broken, TASKS, concurrency=1, progress=False)
    assert inside(failing.value) == ["run_agents"]
    with pytest.raises(Unauthorized) as refused, FakeServer().client("wrong") as swarm:
        swarm.train(sync_agent, TASKS, steps=1, progress=False)
    assert inside(refused.value) == ["run_agents"]
    down = FakeServer()
    down.be_down = 10_000
    brief = Retry(first_patience=0.0)
    with pytest.raises(Unreachable) as silent, down.client(retry=brief) as swarm:
        swarm.evaluate(sync_agent, TASKS, progress=False)
    assert inside(silent.value) == ["run_agents"]

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=FakeServer().transport()) as swarm:
            await swarm.train(broken_async, TASKS, steps=1, concurrency=1, progress=False)

    with pytest.raises(AgentFailing) as failing:
        asyncio.run(scenario())
    assert inside(failing.value) == ["train"]


def test_an_episode_the_server_reclaimed_is_expired_not_scored() -> None:
    server = FakeServer()

    def slow(task: Task, episode: Episode) -> float:
        if episode.id == "ep1":
            server.episodes["ep1"] = server.episodes["ep1"].model_copy(update={"status": "expired"})
        return 1.0

    with server.client() as swarm:
        report = swarm.evaluate(slow, TASKS[:2], concurrency=1, progress=False)
    assert [result.outcome for result in report.results] == ["finished", "finished"]
    assert server.by_status() == {"finished": 2, "expired": 1}


def test_what_the_server_ends_as_surplus_is_not_needed_and_not_tried_again() -> None:
    server = FakeServer()
    spared: list[str] = []

    def agent(task: Task, episode: Episode) -> float:
        if len(spared) < 3:
            spared.append(episode.id)
            ended = {"status": "aborted", "reason": "surplus: training had enough without it"}
            server.episodes[episode.id] = server.episodes[episode.id].model_copy(update=ended)
            server.groups.pop(episode.group, None)
        if len(spared) == 2:
            raise ConnectionError("409: the episode has ended")
        return 1.0

    with server.client() as swarm:
        report = swarm.train(agent, TASKS, steps=1, concurrency=1, progress=False)
    spare = [result for result in report.results if result.error.startswith("surplus: ")]
    assert [result.outcome for result in spare] == ["not_needed"] * 3
    assert len({server.episodes[id].group for id in spared}) == 3, "what was left of an unwanted group was not begun"
    assert report.num_aborted == 0 and not report.errors


def test_evaluate_reports_in_the_order_of_the_tasks_and_trains_nothing() -> None:
    server = FakeServer(batch_size=1, group_size=2)
    with server.client() as swarm:
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

    with server.client() as swarm:
        report = swarm.evaluate(agent, TASKS[:1], progress=False)
    assert report.mean_reward == 0.25


def test_an_impossible_number_of_steps_is_refused() -> None:
    server = FakeServer(max_steps=10)
    server.version = 8
    with server.client() as swarm:
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

    with server.client() as swarm, pytest.raises(Conflict, match="the disk is full"):
        swarm.train(agent, TASKS, steps=1, progress=False)
    assert server.by_status()["live"] == 0


def test_ctrl_c_aborts_the_live_episodes_and_is_raised() -> None:
    server = FakeServer()
    stuck, pressed = threading.Event(), threading.Lock()

    def agent(task: Task, episode: Episode) -> float:
        if len(server.episodes) == 4 and pressed.acquire(blocking=False):  # once: several may see the fourth
            os.kill(os.getpid(), signal.SIGINT)
        stuck.wait(30)
        return 1.0

    with server.client() as swarm, pytest.raises(KeyboardInterrupt, match="live episodes were aborted") as interrupted:
        swarm.train(agent, TASKS, steps=1, concurrency=12, progress=False)  # 8 of which wait for room
    stuck.set()
    assert server.by_status() == {"aborted": 4}, "no place that an abort freed was taken on the way out"
    assert {view.reason for view in server.episodes.values()} == {"the client stopped"}
    assert inside(interrupted.value) == ["run_agents"]


def test_sync_methods_inside_an_async_agent_are_refused_instead_of_hanging() -> None:
    server = FakeServer()
    with server.client() as swarm:

        async def agent(task: Task, episode: AsyncEpisode) -> float:
            swarm.status()
            return 1.0

        with pytest.raises(AgentFailing, match="own event loop"):
            swarm.evaluate(agent, TASKS[:1], progress=False)


def test_progress_lines_say_step_reward_speed_failures_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    with server.client() as swarm:
        swarm.train(lambda task, episode: 0.5, TASKS, steps=2, concurrency=4)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("training 1/2  reward 0.500  ") and first.endswith("left")
    assert "tokens/s" not in first, "the first batch's time began before there was anything to do"
    assert last == "training 2/2  reward 0.500  100 tokens/s"


async def test_a_run_that_gets_no_episode_says_what_the_server_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    server, time = FakeServer(batch_size=1), FakeTime()
    async with server.connect(time) as swarm:
        other = await swarm.begin("t", group="of somebody else")
        training = asyncio.create_task(swarm.train(async_agent, TASKS, steps=1, concurrency=2))
        while server.requests["GET status"] < 5:
            await asyncio.sleep(0)
        assert time.now >= QUIET_SECONDS
        await other.abort()
        await training
    said = capsys.readouterr().out.splitlines()
    assert set(said[:-1]) == {"waiting for somebody"}
    assert said[-1].startswith("training 1/1")


@pytest.mark.parametrize("fault", ["say_later", "be_down"])
async def test_a_server_that_refuses_or_is_away_is_named_once_and_so_is_its_return(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second lasts a millisecond, and timers keep their order."""
    server = FakeServer()
    retry = Retry(
        sleep=lambda seconds: asyncio.sleep(seconds / 1000), clock=lambda: 1000 * time.monotonic(), jitter=lambda: 1.0
    )

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        if len(server.begun) == 2:
            setattr(server, fault, 16)
        elif len(server.begun) > 2:  # The run outlasts the return.
            await asyncio.sleep(0.05)
        return 0.5

    async with AsyncSwarm(URL, TOKEN, transport=server.transport(), retry=retry) as swarm:
        await swarm.train(agent, TASKS, steps=1, concurrency=2)
    said = capsys.readouterr().out.splitlines()
    reason = "restarting" if fault == "say_later" else "no answer from"
    limit = "for 120 s without an answer." if fault == "be_down" else ("until the server takes them.", "for 120 s.")
    (named,) = [line for line in said if "repeats its requests" in line]
    assert (
        named.startswith(reason)
        and named.endswith(limit)
        and said.index(named) < said.index("the server takes requests again")
    ), said
    assert said.count("the server takes requests again") == 1


@pytest.mark.parametrize("fault", ["say_later", "be_down"])
@pytest.mark.parametrize("ends", ["by a cancellation", "without an answer", "by an answer"])
async def test_the_end_of_a_delay_is_an_answer(ends: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    server, may_repeat, now = FakeServer(), asyncio.Event(), [0.0]

    async def sleep(seconds: float) -> None:
        await (asyncio.sleep(0) if seconds == DELAYED_SECONDS else may_repeat.wait())

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    retry = Retry(patience=60.0, sleep=sleep, clock=lambda: now[0])
    async with AsyncSwarm(URL, TOKEN, transport=server.transport(), retry=retry) as swarm:
        connection, version = swarm.connection, AgentVersion.of(print)
        status = await swarm.status()
        training = Training(connection, status, swarm.episode_request, version, TASKS, 1, 0, True, None, None)
        display = asyncio.create_task(training._show_delays())
        setattr(server, fault, 1 if ends == "by an answer" else 2)
        delayed = asyncio.create_task(connection.request("GET", "/status"))
        while not connection.delay_reason:
            await asyncio.sleep(0)
        await turns()
        if ends == "by a cancellation":
            delayed.cancel()
        else:
            now[0] = 100.0 if ends == "without an answer" else 1.0
            may_repeat.set()
        await asyncio.wait([delayed])
        assert delayed.cancelled() or bool(delayed.exception()) == (ends != "by an answer")
        await turns()
        display.cancel()
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if "repeats its requests for 60 s" in line]) == 1, said
    assert said.count("the server takes requests again") == (ends == "by an answer"), said


@pytest.mark.parametrize(("patience", "times"), [(0.0, 1), (3600.0, 2)])
def test_ctrl_c_waits_a_bounded_time_and_a_later_one_not_at_all(
    patience: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentjet.client.threads.INSISTING_SECONDS", 0.0)
    loop = LoopThread(patience)
    step, over = threading.Semaphore(0), threading.Event()

    async def stubborn() -> None:
        """No cancellation ends it."""
        step.release()
        while not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                step.release()

    def interrupt() -> None:
        for _ in range(times):
            assert step.acquire(timeout=30)
            os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=interrupt)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(stubborn())
    presses.join()
    assert loop.abandoned
    over.set()
    loop.run(asyncio.sleep(0.1))
    loop.stop()


def test_tasks_end_although_the_wait_for_them_is_cancelled() -> None:
    """A second failure cancels the wait for tasks that clean up after the first one."""

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)

    async def failing(seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise ValueError(str(seconds))

    async def scenario() -> int:
        inner = wait_for_first([slow(), slow(), failing(0)])
        with pytest.raises(ValueError, match=r"0\.05"):
            await wait_for_first([inner, failing(0.05)])
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_task_that_is_given_up_closes_its_group(concurrency: int) -> None:
    server = FakeServer(batch_size=2, group_size=3)
    begun: Counter[str] = Counter()

    def fails_for_one_place(task: Task, episode: Episode) -> float:
        begun[episode.group] += 1
        if 2 <= begun[episode.group] <= 4:  # all attempts of one place, or some of several
            raise RuntimeError("the tool broke")
        return 1.0

    with server.client() as swarm:
        swarm.train(fails_for_one_place, TASKS, steps=2, concurrency=concurrency, progress=False)
    if concurrency == 1:  # the second place uses up its attempts
        left = [name.group for request in server.closed if not request.not_needed for name in request.groups]
        assert len(left) >= 4 and len(set(left)) == len(left)
    assert all(request.client_id == server.begun[0].client_id for request in server.closed)


def test_the_end_of_a_run_closes_the_groups_that_lack_members() -> None:
    server = FakeServer(batch_size=2, group_size=2)

    with server.client() as swarm:
        swarm.train(sync_agent, TASKS, steps=1, concurrency=3, progress=False)
        assert all(request.not_needed for request in server.closed)
        assert not server.groups


@pytest.mark.parametrize(
    "error", [Conflict("it ended before"), Later("restarting", retry_after=1.0), Unreachable("no answer")]
)
def test_an_abort_that_is_not_answered_ends_no_run(error: Exception) -> None:
    async def asking() -> None:
        raise error

    asyncio.run(wait_for_end(asking(), 1.0))
    asyncio.run(wait_for_end(asyncio.sleep(60), 0.0))


class WithoutAborts(httpx.AsyncBaseTransport):
    """The fake server, of which no abort is answered: the connection is refused, or the client hangs."""

    def __init__(self, server: FakeServer, *, hangs: bool = False) -> None:
        self.inner = server.transport()
        self.hangs = hangs
        self.asked = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/abort"):
            self.asked.set()
            if self.hangs:
                await asyncio.Event().wait()
            raise httpx.ConnectError("connection refused", request=request)
        return await self.inner.handle_async_request(request)


def hanging_after_a_batch(server: FakeServer) -> Agent:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        if server.version:
            await asyncio.Event().wait()  # The run has its batch: these hang until they are ended.
        return 1.0

    return agent


async def test_a_run_whose_aborts_fail_has_its_report() -> None:
    server = FakeServer()
    async with AsyncSwarm(URL, TOKEN, transport=WithoutAborts(server), retry=FakeTime().retry()) as swarm:
        report = await swarm.train(hanging_after_a_batch(server), TASKS, steps=1, concurrency=8, progress=False)
    assert len(report.steps) == 1 and report.num_not_needed >= server.by_status()["live"] > 0


async def test_the_end_of_a_run_can_be_interrupted_at_once() -> None:
    server = FakeServer()
    way = WithoutAborts(server, hangs=True)
    async with AsyncSwarm(URL, TOKEN, transport=way, retry=FakeTime().retry()) as swarm:
        agent = hanging_after_a_batch(server)
        training = asyncio.create_task(swarm.train(agent, TASKS, steps=1, concurrency=8, progress=False))
        await way.asked.wait()
        training.cancel()
        _, running = await asyncio.wait([training], timeout=20)
        assert not running and training.cancelled()


@dataclass
class Slow(httpx.AsyncBaseTransport):
    """The fake server over a way that holds one request of each kind in `kinds` until the run ends. The server receives
    a request that is `lost` only if it is sent again, else it has handled the request before."""

    inner: httpx.AsyncBaseTransport
    kinds: tuple[str, ...]
    lost: bool
    held: dict[str, asyncio.Event] = field(default_factory=dict)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        kind = request.url.path.rpartition("/")[2]
        if kind not in self.kinds or kind in self.held:
            return await self.inner.handle_async_request(request)
        self.held[kind] = asyncio.Event()
        if not self.lost:
            await self.inner.handle_async_request(request)
        self.held[kind].set()
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")


async def until_held(slow: Slow) -> None:
    async with asyncio.timeout(20):
        while len(slow.held) < len(slow.kinds) or not all(held.is_set() for held in slow.held.values()):
            await asyncio.sleep(0)


ENDS = (
    "the agent fails",
    "the agent is interrupted",
    "the engine fails",
    "the caller is cancelled",
    "the steps are done",
)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_no_end_of_a_run_leaves_an_episode_live(end: str, lost: bool) -> None:
    """At the end one episode is being begun, one is being aborted for its agent's exception, and one is played."""
    server = FakeServer(batch_size=4, group_size=2)
    slow = Slow(server.transport(), ("episodes", "abort"), lost)
    num_failed = 0

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        nonlocal num_failed
        num_failed += 1
        if num_failed == 2:
            await asyncio.Event().wait()
        if num_failed > 2:
            await until_held(slow)
        if num_failed > 2 and end == "the agent is interrupted":
            raise KeyboardInterrupt
        if num_failed > 2 and end == "the steps are done":
            server.emit("step", {"policy_version": 1, "metrics": {"reward/mean": 0.0}})
        if num_failed > 2 and end in ENDS[2:]:
            await asyncio.Event().wait()
        raise ZeroDivisionError("division by zero")

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=slow, retry=FakeTime().retry()) as swarm:
            training = asyncio.create_task(swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False))
            await until_held(slow)
            if end == "the engine fails":
                server.emit("state", {"state": "failed", "reason": "out of memory"})
            elif end == "the caller is cancelled":
                training.cancel()
            _, running = await asyncio.wait([training], timeout=20)
            assert not running
            assert (training.cancelled() or training.exception() is not None) == (end != "the steps are done")
            assert server.by_status()["live"] == 0, server.by_status()
            assert not server.groups, "each group without a member is gone"

    loop = LoopThread()  # An exception that ends programs passes through this loop.
    try:
        loop.run(scenario())
    finally:
        loop.stop()


async def test_a_second_failure_does_not_cut_the_end_of_a_run_short() -> None:
    """The agent fails; the engine fails while the other episodes are being aborted."""
    server = FakeServer(batch_size=4, group_size=2)
    inner = server.transport()
    num_begun = 0

    class Failing(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if STOPPED.encode() in request.content:
                server.emit("state", {"state": "failed", "reason": "out of memory"})
                for _ in range(50):
                    await asyncio.sleep(0)
            return await inner.handle_async_request(request)

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        nonlocal num_begun
        num_begun += 1
        if num_begun <= 2:
            await asyncio.Event().wait()
        raise ZeroDivisionError("division by zero")

    async with AsyncSwarm(URL, TOKEN, transport=Failing(), retry=FakeTime().retry()) as swarm:
        with pytest.raises((AgentFailing, Conflict)):
            await swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False)
        assert server.by_status()["live"] == 0, server.by_status()


async def test_an_episode_that_is_begun_after_the_end_of_its_run_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.client.episode.ABORT_SECONDS", 0.0)
    server = FakeServer()
    async with server.connect() as swarm:
        server.hold_answers = asyncio.Event()
        beginning = asyncio.create_task(swarm.begin("t1"))
        while not server.episodes:
            await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.wait([beginning], timeout=20)
        assert beginning.cancelled() and server.by_status()["live"] == 1, "the server is slow"
        server.hold_answers.set()
        async with asyncio.timeout(20):
            while server.by_status()["live"]:
                await asyncio.sleep(0)


def agent_of_tasks(task: Task, episode: Episode) -> float:
    return float(task.payload)


def reproducible(
    concurrency: int, seed: int, fails_at: int = -1, steps: int = 3
) -> tuple[list[str], list[tuple[str, int]]]:
    """The tasks of the groups in the order they began, and each episode's task and seed in the order of the groups.
    Agents take different times.
    """
    server = FakeServer()
    calls = itertools.count()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        number = next(calls)
        for _ in range((7 * number) % 11):
            await asyncio.sleep(0)
        if number == fails_at:
            raise OSError("away")
        return task.payload / 10

    with server.client() as swarm:
        swarm.train(agent, TASKS, steps=steps, concurrency=concurrency, seed=seed, progress=False, reproducible=True)
    groups: dict[str, list[BeginRequest]] = {}
    for request in server.begun:
        groups.setdefault(request.group, []).append(request)
    learned = list(groups.values())[: steps * server.batch_size]
    members = [(one.task_id, one.seed or 0) for group in learned for one in sorted(group, key=lambda one: one.place)]
    return [group[0].task_id for group in learned], members


def test_a_reproducible_run_has_the_same_groups_and_seeds() -> None:
    order, members = reproducible(3, seed=1)
    assert [reproducible(concurrency, seed=1) for concurrency in (4, 16)] == [(order, members)] * 2
    assert len({seed for _, seed in members}) == len(members)
    assert not {seed for _, seed in members} & {seed for _, seed in reproducible(3, seed=2)[1]}
    again = reproducible(3, seed=1, fails_at=0)[1]
    assert {*members} < {*again}, "a failed episode is attempted again with another seed"
    with FakeServer().client() as swarm, pytest.raises(ValueError, match="tasks of one task set"):
        swarm.train(agent_of_tasks, [Task("a"), Task("b", task_set="x")], steps=1, reproducible=True, progress=False)


def test_the_order_holds_over_many_batches() -> None:
    """Answers may differ by rounding of the model; groups, seeds and order may not."""
    assert reproducible(8, seed=1, steps=60) == reproducible(1, seed=1, steps=60)


def test_an_evaluation_has_the_seeds_of_its_tasks_and_repeats() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        server = FakeServer()
        with server.client() as swarm:
            swarm.evaluate(agent_of_tasks, TASKS, repeats=2, seed=seed, progress=False)
        return sorted((one.seed for one in server.begun), key=lambda one: one or 0)

    assert seeds(3) == seeds(3) != seeds(4) and len({*seeds(3)}) == 2 * len(TASKS)
    assert {*seeds(None)} == {None}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [KeyError, asyncio.CancelledError, None])
def test_an_abort_that_fails_does_not_replace_the_exception_of_its_block(
    kind: type[BaseException] | None, is_async: bool
) -> None:
    server, error = FakeServer(), kind and kind("the user's")

    def fail() -> None:
        server.be_down = 10**6
        if error is not None:
            raise error

    async def scenario() -> None:
        async with server.connect() as swarm, swarm.episode("t1"):
            fail()

    with pytest.raises(kind or Unreachable) as raised:
        if is_async:
            asyncio.run(scenario())
        else:
            with server.client(retry=FakeTime().retry()) as swarm, swarm.episode("t1"):
                fail()
    if error is not None:
        [note] = raised.value.__notes__
        assert note.startswith("its episode was not aborted: no answer from ")


async def test_an_episode_that_another_process_has_finished_is_left_without_an_error() -> None:
    server = FakeServer()
    async with server.connect() as swarm, swarm.episode("t1") as episode:
        await swarm.finish(episode.id, 1.0)
    with server.client() as swarm, swarm.episode("t1") as episode:
        swarm.finish(episode.id, 1.0)
    assert server.by_status() == {"finished": 2}


async def test_a_reward_that_was_accepted_as_the_run_ended_is_reported() -> None:
    """The agent finishes its episode itself, and the run is cancelled before the answer arrives."""

    class Late(FakeServer):
        async def _handle(self, request: httpx.Request) -> httpx.Response:
            answer = await super()._handle(request)
            if request.url.path.endswith("/finish"):
                await asyncio.Event().wait()
            return answer

    async def agent(task: Task, episode: AsyncEpisode) -> None:
        await episode.finish(0.75)

    server, reported = Late(), list[EpisodeResult]()
    async with server.connect() as swarm:

        async def start(spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
            return await swarm.begin(spec.task.id, mode="eval"), agent

        runner = Runner(start, lambda spec, result, last: reported.append(result))
        running = asyncio.create_task(runner.run(RolloutQueue.once(TASKS[:1]), 1))
        while not server.by_status()["finished"]:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    assert [(result.outcome, result.reward) for result in reported] == [("finished", 0.75)]
