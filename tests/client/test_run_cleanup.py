"""The end of a run. 1. A run that has its steps waits longer for aborts than an interrupted one. 2. An episode that was
left behind is counted and reported."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm
from agentjet.client.episode import RunCleanup
from agentjet.client.rollout import Agent
from agentjet.errors import Conflict, Later, Unreachable
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime


def test_an_interrupted_run_waits_for_little() -> None:
    assert RunCleanup().seconds == 2.5
    assert RunCleanup(goal_reached=True).seconds == 30.0


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (None, 0),
        (Conflict("it ended before"), 0),
        (Later("no room: nothing was begun", retry_after=1.0), 0),
        (Later("restarting", retry_after=1.0, status=503), 1),
        (Unreachable("no answer"), 1),
        (TimeoutError(), 1),
    ],
)
def test_what_may_be_live_still_is_counted(error: Exception | None, left: int) -> None:
    async def asking() -> None:
        if error is not None:
            raise error

    cleanup = RunCleanup()
    asyncio.run(cleanup.wait_for_abort(asking()))
    assert cleanup.num_left == left


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


TASKS = [Task(f"t{number}") for number in range(5)]


def hanging_after_a_batch(server: FakeServer) -> Agent:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        if server.version:
            await asyncio.Event().wait()  # The run has its batch: these hang until they are ended.
        return 1.0

    return agent


def test_a_run_says_how_many_episodes_it_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=WithoutAborts(server), retry=FakeTime().retry()) as swarm:
            report = await swarm.train(hanging_after_a_batch(server), TASKS, steps=1, concurrency=8)
        live = server.by_status()["live"]
        assert report.num_left == live > 0
        assert f"{live} episodes could not be aborted" in str(report)
        assert f"{live} episodes could not be aborted" in capsys.readouterr().out

    asyncio.run(scenario())


def test_the_end_of_a_run_can_be_interrupted_at_once() -> None:
    server = FakeServer()

    async def scenario() -> None:
        way = WithoutAborts(server, hangs=True)
        async with AsyncSwarm(URL, TOKEN, transport=way, retry=FakeTime().retry()) as swarm:
            agent = hanging_after_a_batch(server)
            training = asyncio.create_task(swarm.train(agent, TASKS, steps=1, concurrency=8, progress=False))
            await way.asked.wait()
            training.cancel()
            async with asyncio.timeout(20):
                with pytest.raises(asyncio.CancelledError):
                    await training

    asyncio.run(scenario())
