"""The end of a run whose server does not answer: it waits a bounded time, and can be interrupted at once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm
from agentjet.client.episode import wait_for_end
from agentjet.client.rollout import Agent
from agentjet.errors import Conflict, Later, Unreachable
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer, FakeTime


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


TASKS = [Task(f"t{number}") for number in range(5)]


def hanging_after_a_batch(server: FakeServer) -> Agent:
    async def agent(task: Task, episode: AsyncEpisode) -> float:
        if server.version:
            await asyncio.Event().wait()  # The run has its batch: these hang until they are ended.
        return 1.0

    return agent


def test_a_run_whose_aborts_fail_has_its_report() -> None:
    server = FakeServer()

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=WithoutAborts(server), retry=FakeTime().retry()) as swarm:
            report = await swarm.train(hanging_after_a_batch(server), TASKS, steps=1, concurrency=8, progress=False)
        assert len(report.steps) == 1 and report.num_not_needed >= server.by_status()["live"] > 0

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
            _, running = await asyncio.wait([training], timeout=20)
            assert not running and training.cancelled()

    asyncio.run(scenario())
