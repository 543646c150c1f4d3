"""The end of a run whose server does not answer: it waits a bounded time, and can be interrupted at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx
import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm
from agentjet.client.episode import STOPPED, wait_for_end
from agentjet.client.rollout import Agent, AgentFailing
from agentjet.client.threads import LoopThread
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


def test_a_second_failure_does_not_cut_the_end_of_a_run_short() -> None:
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

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=Failing(), retry=FakeTime().retry()) as swarm:
            with pytest.raises((AgentFailing, Conflict)):
                await swarm.train(agent, TASKS, steps=1, concurrency=4, progress=False)
            assert server.by_status()["live"] == 0, server.by_status()

    asyncio.run(scenario())


def test_an_episode_that_is_begun_after_the_end_of_its_run_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentjet.client.episode.ABORT_SECONDS", 0.0)
    server = FakeServer()

    async def scenario() -> None:
        async with AsyncSwarm(URL, TOKEN, transport=server.transport(), retry=FakeTime().retry()) as swarm:
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

    asyncio.run(scenario())
