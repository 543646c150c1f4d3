"""Heartbeats do not depend on the agents' loop.

1. The lease of an episode is renewed while the loop of its agent is blocked: in `train`, `evaluate` and `with`.
2. They end with the episode, with the server's knowledge of it, and with the client, whose thread ends. A reward that
   the server has is reported, whoever sent it.
3. An agent that blocks its loop is named once; one that does not is never named.
4. A process that is forked later makes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from agentjet.client import AsyncEpisode, AsyncSwarm, Episode, Swarm, connection
from agentjet.client.connection import Heartbeats
from agentjet.errors import Conflict, NotFound, Unreachable
from agentjet.types import Task
from tests.client.server import TOKEN, URL, FakeServer

PATIENCE = 20.0


class Server(FakeServer):
    """Sets `beat` when a heartbeat arrives. It may come from another thread than that of the agents."""

    def __init__(self) -> None:
        super().__init__(batch_size=1, group_size=1)
        self.beats: dict[str, threading.Event] = {}
        self.may_answer_finish = threading.Event()
        self.may_answer_finish.set()

    def transport(self) -> httpx.MockTransport:
        async def handle(request: httpx.Request) -> httpx.Response:
            _, _, path = request.url.path.partition("/episodes/")
            if path.endswith("/heartbeat"):
                self.beat_of(path.partition("/")[0]).set()
            answer = await self._handle(request)
            while path.endswith("/finish") and not self.may_answer_finish.is_set():
                await asyncio.sleep(0.001)
            return answer

        return httpx.MockTransport(handle)

    def beat_of(self, episode_id: str) -> threading.Event:
        return self.beats.setdefault(episode_id, threading.Event())


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of the fake server are 60 s: heartbeats every 12 ms."""
    monkeypatch.setattr(connection, "LEASE_SHARE", 0.0002)


def in_train(server: Server) -> bool:
    return blocked_run(server, lambda swarm, agent: swarm.train(agent, [Task("a")], steps=1, progress=False))


def in_evaluate(server: Server) -> bool:
    return blocked_run(server, lambda swarm, agent: swarm.evaluate(agent, [Task("a")], progress=False))


def blocked_run(server: Server, run: Callable[[Swarm, object], object]) -> bool:
    seen: list[bool] = []

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        seen.append(server.beat_of(episode.id).wait(PATIENCE))  # Blocks the loop.
        return 1.0

    with server.client() as swarm:
        run(swarm, agent)
    return seen[0]


def in_with(server: Server) -> bool:
    with (
        server.client() as swarm,
        swarm.episode("a") as episode,
    ):
        return server.beat_of(episode.id).wait(PATIENCE)


def in_async_with(server: Server) -> bool:
    async def scenario() -> bool:
        async with (
            AsyncSwarm(URL, TOKEN, transport=server.transport()) as swarm,
            swarm.episode("a") as episode,
        ):
            return server.beat_of(episode.id).wait(PATIENCE)

    return asyncio.run(scenario())


@pytest.mark.parametrize("way", [in_train, in_evaluate, in_with, in_async_with])
def test_a_blocked_loop_keeps_its_leases(way: Callable[[Server], bool]) -> None:
    before = set(threading.enumerate())
    assert way(Server())
    assert before.issuperset(threading.enumerate()), "the threads of the client end with it"


class Live:
    """An episode whose server answers heartbeats by `errors`, one after the other."""

    status, lease_seconds, reward = "live", 0.0, None

    def __init__(self, *errors: Exception, is_finishing: bool = False) -> None:
        self.errors, self.is_finishing = list(errors), is_finishing

    async def renew(self, connection: object) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.status = "finished"


class Line:
    async def close(self) -> None:
        pass


@contextlib.contextmanager
def beating() -> Iterator[Heartbeats]:
    made = Heartbeats(Line)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        asyncio.run(made.close())


@pytest.mark.parametrize(
    ("errors", "has_ended"),
    [
        ([], False),
        ([Unreachable("away"), Unreachable("away")], False),
        ([OSError(24, "Too many open files"), RuntimeError("unexpected")], False),
        ([NotFound("There is no episode 'ep_1' in this run.")], True),
        ([Unreachable("away"), Conflict("expired", code="episode_expired")], True),
    ],
)
def test_heartbeats_end_with_the_servers_knowledge_of_the_episode(errors: list[Exception], has_ended: bool) -> None:
    with beating() as beats:
        assert beats.follow(Live(*errors)).result(PATIENCE) is has_ended


def test_a_heartbeat_that_meets_a_finish_on_its_way_is_not_the_end_of_the_agent() -> None:
    """The server has the reward and refuses heartbeats, and its answer to the agent's `finish` is late."""
    server = Server()

    async def agent(task: Task, episode: AsyncEpisode) -> None:
        server.may_answer_finish.clear()
        finishing = asyncio.ensure_future(episode.finish(0.75))
        while episode.status == "live":
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # The agent would be cancelled here.
        server.may_answer_finish.set()
        await finishing

    with server.client() as swarm:
        [result] = swarm.evaluate(agent, [Task("a")], progress=False).results
    assert (result.outcome, result.reward, result.error) == ("finished", 0.75, "")
    assert len(server.episodes) == 1, "it was not attempted again"
    with beating() as beats:
        refused = Live(Conflict("finished", code="episode_finished"), is_finishing=True)
        assert beats.follow(refused).result(PATIENCE) is False  # type: ignore[arg-type]


@pytest.mark.parametrize("then", ["waits", "returns", "raises"])
def test_the_reward_that_another_process_sent_is_reported(then: str) -> None:
    """An application finishes its episode over HTTP, with its key."""
    server = Server()

    async def agent(task: Task, episode: AsyncEpisode) -> float:
        finished = {"status": "finished", "reward": 0.75, "metrics": {"turns": 2.0}, "reward_text": "it was solved"}
        server.episodes[episode.id] = server.episodes[episode.id].model_copy(update=finished)
        if then == "raises":
            raise OSError("the application has ended")
        if then == "waits":
            await asyncio.Event().wait()
        return 0.0

    with server.client() as swarm:
        [result] = swarm.evaluate(agent, [Task("a")], progress=False).results
    assert (result.outcome, result.reward, result.metrics) == ("finished", 0.75, {"turns": 2.0})
    assert len(server.episodes) == 1, "it was not attempted again"


@pytest.mark.parametrize("blocks", [True, False])
def test_an_agent_that_blocks_its_loop_is_named_once(
    blocks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "PING_SECONDS", 0.05)
    monkeypatch.setattr(connection, "PUNCTUAL_SECONDS", PATIENCE)
    warned = threading.Event()
    caplog.handler.addFilter(lambda record: warned.set() or True)

    async def dozing_agent(task: Task, episode: AsyncEpisode) -> float:
        if blocks:
            warned.wait(PATIENCE)
        else:
            for _ in range(20):
                await asyncio.sleep(0.02)
        return 1.0

    with Server().client() as swarm, caplog.at_level(logging.WARNING):
        swarm.train(dozing_agent, [Task("a")], steps=2, progress=False)
    messages = [record.getMessage() for record in caplog.records if record.name == connection.__name__]
    assert len(messages) == blocks
    if blocks:
        assert "dozing_agent" in messages[0] and __file__ in messages[0]


@pytest.mark.parametrize("why", ["the machine is busy", "a plain function"])
def test_a_late_loop_is_no_reason_to_blame_an_agent(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a busy machine the loop's thread waits for a processor; the thread of a plain function takes long to start."""
    is_busy = why == "the machine is busy"
    monkeypatch.setattr(connection, "PING_SECONDS", 0.01)
    monkeypatch.setattr(connection, "PUNCTUAL_SECONDS", PATIENCE)
    pings, enough = itertools.count(), threading.Event()

    def queued_seconds(task: Path) -> float:
        ping = next(pings)
        if ping > 8 * connection.NUM_LATE:
            enough.set()
        return ping * 2 * PATIENCE if is_busy else 0.0

    async def waiting_agent(task: Task, episode: AsyncEpisode) -> float:
        assert enough.wait(PATIENCE)
        return 1.0

    class Starting(threading.Thread):
        def start(self) -> None:
            assert self.name != "agentjet-agent" or enough.wait(PATIENCE)
            super().start()

    monkeypatch.setattr(connection, "queued_seconds", queued_seconds)
    if not is_busy:
        monkeypatch.setattr("agentjet.client.threads.threading.Thread", Starting)
    with Server().client() as swarm, caplog.at_level(logging.WARNING):
        swarm.train(waiting_agent if is_busy else lambda task, episode: 1.0, [Task("a")], steps=1, progress=False)
    assert enough.is_set()
    assert not [record for record in caplog.records if record.name == connection.__name__]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_makes_its_own() -> None:
    with beating() as beats:
        assert beats.follow(Live()).result(PATIENCE) is False
        child = os.fork()
        if not child:
            try:
                try:
                    beats.follow(Live())
                    os._exit(1)
                except RuntimeError:
                    with beating() as own:
                        os._exit(0 if own.follow(Live()).result(PATIENCE) is False else 2)
            finally:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_leaving_an_episode_ends_its_heartbeats() -> None:
    server = Server()
    with server.client() as swarm:
        with swarm.episode("a") as episode:
            assert isinstance(episode, Episode) and server.beat_of(episode.id).wait(PATIENCE)
            episode.finish(1.0)
        assert episode._heartbeats.cancelled() or episode._heartbeats.done()
        assert episode.status == "finished"
