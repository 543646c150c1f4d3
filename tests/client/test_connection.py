"""1. Retries: which failures, for how long, with which key. 2. Refusals become exceptions. 3. Sources of settings."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import pytest

from agentjet.client import AsyncSwarm
from agentjet.client.connection import DEFAULT_URL, load_settings
from agentjet.errors import ConfigError, Conflict, Later, RequestError, Unauthorized, Unreachable
from agentjet.protocol import Problem, status_of
from agentjet.types import Reward
from tests.client.server import TOKEN, URL, FakeServer, FakeTime

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


async def test_a_lost_answer_is_asked_for_again_and_has_one_effect(server: FakeServer, time: FakeTime) -> None:
    swarm = server.connect(time)
    await swarm.status()
    server.lose_answers = 2
    episode = await swarm.begin("t")
    server.lose_answers = 1
    await episode.finish(Reward(0.5))
    assert len(server.episodes) == 1
    assert server.episodes["ep0"].reward == 0.5
    assert server.requests["POST episodes"] == 3
    assert time.sleeps[:2] == [0.1, 0.2]


def test_a_server_never_reached_is_given_up_soon_with_the_address_and_the_way_out(
    server: FakeServer, time: FakeTime
) -> None:
    server.be_down = 10_000
    with pytest.raises(Unreachable, match=r"http://127.0.0.1:8400 .*agentjet serve"):
        asyncio.run(server.connect(time).status())
    assert time.now <= 3.0


async def test_a_server_that_was_there_is_waited_for_through_a_restart(server: FakeServer, time: FakeTime) -> None:
    swarm = server.connect(time)
    await swarm.status()
    server.be_down = 14
    await swarm.status()
    assert time.now > 60.0
    assert max(time.sleeps) == 10.0


class Scripted:
    """A server that answers by a script, one item a request: a status, or `None` for a lost connection."""

    def __init__(self, *script: int | None, body: str = "{}", **headers: str) -> None:
        self.script = list(script)
        self.body = body
        self.headers = headers

    def __call__(self, request: httpx.Request) -> httpx.Response:
        status = self.script.pop(0)
        if status is None:
            raise httpx.ReadError("connection reset", request=request)
        refusal = Problem(title="full", status=status, code="batch_full", detail="full", retry_after=20.0)
        body = self.body if status == 200 else refusal.model_dump_json()
        return httpx.Response(status, text=body, headers=self.headers)

    def connect(self, time: FakeTime) -> AsyncSwarm:
        return AsyncSwarm(URL, TOKEN, retry=time.retry(), transport=httpx.MockTransport(self))


def test_polite_waiting_takes_nothing_of_the_time_for_a_restart(time: FakeTime) -> None:
    server = Scripted(*[429] * 8, *[None] * 12, 429, *[None] * 12, 200)
    asyncio.run(server.connect(time).connection.request("POST", "/episodes", patience=math.inf))
    assert not server.script and time.now > 8 * 20 + 2 * 60

    silent = Scripted(*[429] * 8, *[None] * 1000)
    with pytest.raises(Unreachable):
        asyncio.run(silent.connect(time).connection.request("POST", "/episodes", patience=math.inf))
    assert 1000 - len(silent.script) < 30, "a server that stays away is given up all the same"


def test_a_restart_takes_nothing_of_the_time_to_wait_for_room(time: FakeTime) -> None:
    server = Scripted(429, *[None] * 8, *[429] * 100)
    with pytest.raises(Later):
        asyncio.run(server.connect(time).connection.request("POST", "/episodes", patience=100.0))
    assert 80 < time.now <= 100


def test_an_answer_that_is_no_json_is_that_of_something_else(time: FakeTime) -> None:
    portal = Scripted(*[200] * 100, body="<html>Please log in.</html>", **{"Content-Type": "text/html"})
    with pytest.raises(Unreachable, match=r"8400 answered with status 200 and text/html, .*: a proxy, a login page"):
        asyncio.run(portal.connect(time).status())
    assert 0 < time.now <= 3.0, "as an address that never answered"

    async def follow() -> None:
        async for _ in portal.connect(time).events():
            pass

    with pytest.raises(Unreachable, match="text/html"):
        asyncio.run(follow())


def test_retry_after_is_honoured(server: FakeServer, time: FakeTime) -> None:
    server.say_later = 2
    asyncio.run(server.connect(time).status())
    assert time.sleeps == [7.0, 7.0]


async def test_begin_waits_for_room_as_long_as_it_is_told(server: FakeServer, time: FakeTime) -> None:
    swarm = server.connect(time)
    for group in "ab":
        await swarm.begin("t", group=group)
    with pytest.raises(Later) as refused:
        await swarm.begin("t", group="c", wait=5.0)
    assert refused.value.code == "batch_full"
    assert 0 < time.now <= 5.0


def test_a_wrong_token_is_refused_at_once_and_told_where_the_token_is(server: FakeServer, time: FakeTime) -> None:
    with pytest.raises(Unauthorized, match=r"in the file 'token'.*AGENTJET_TOKEN") as refused:
        asyncio.run(server.connect(time, token="wrong").status())
    assert refused.value.code == "token_invalid"
    assert not time.sleeps


def test_an_answer_that_is_no_problem_body_still_becomes_an_error() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(500, text="<html>oops</html>"))
    swarm = AsyncSwarm(URL, TOKEN, transport=transport)
    with pytest.raises(RequestError, match="oops") as failed:
        asyncio.run(swarm.status())
    assert (status_of(failed.value), failed.value.code) == (500, "server_error")


def test_leaving_an_episode_without_a_reward_aborts_it() -> None:
    server = FakeServer(batch_size=3)
    with server.client() as swarm:
        with swarm.episode("a"):
            pass
        with pytest.raises(RuntimeError, match="broken tool"), swarm.episode("b"):
            raise RuntimeError("broken tool")
        with swarm.episode("c") as episode:
            assert episode.finish(1).status == "finished"
        with pytest.raises(Conflict):
            episode.finish(0.0)
    assert [view.status for view in server.episodes.values()] == ["aborted", "aborted", "finished"]
    assert server.episodes["ep1"].reason == "RuntimeError: broken tool"


def test_events_are_taken_up_where_they_broke_off(server: FakeServer, time: FakeTime) -> None:
    async def scenario() -> list[int]:
        for number in range(5):
            server.emit("state", {"state": "sampling", "n": number})
        server.drop_streams_after = 2
        seen: list[int] = []
        async for event in server.connect(time).events(after=1):
            seen.append(event.seq)
            if event.seq == 5:
                break
        return seen

    assert asyncio.run(scenario()) == [2, 3, 4, 5]
    assert server.requests["GET events"] == 2


def test_events_outlive_a_restart_that_drains_first(time: FakeTime) -> None:
    """Streams that end at once, as of a server that stops, use up no patience; silence does, by the clock."""
    line = b'id: 1\nevent: state\ndata: {"seq": 1, "kind": "state", "time": 0, "body": {}}\n\n'
    asked, began = 0, 0.0

    stream = {"Content-Type": "text/event-stream; charset=utf-8"}

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked, began
        asked += 1
        if asked <= 40:
            return httpx.Response(200, content=b"", headers=stream)
        if asked == 41:
            began = time.now
        if time.now - began < 100:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=line, headers=stream)

    async def scenario(transport: httpx.MockTransport) -> None:
        swarm = AsyncSwarm(URL, TOKEN, retry=time.retry(), transport=transport)
        async for event in swarm.events():
            assert event.seq == 1
            return

    asyncio.run(scenario(httpx.MockTransport(answer)))
    assert asked > 41

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    silent_since = time.now
    with pytest.raises(Unreachable):
        asyncio.run(scenario(httpx.MockTransport(refuse)))
    assert time.now - silent_since <= time.retry().patience


def test_arguments_come_before_the_environment() -> None:
    environ = {"AGENTJET_URL": "http://box:1/", "AGENTJET_TOKEN": "from-env"}
    assert load_settings(environ=environ).url == "http://box:1"
    assert load_settings(environ=environ).token == "from-env"
    assert not load_settings(environ=environ).is_loopback
    assert load_settings("http://localhost:2", "given", environ=environ).token == "given"
    assert load_settings(environ={}).url == DEFAULT_URL
    assert load_settings(environ={}).client_id != load_settings(environ={}).client_id


def test_a_token_is_read_without_the_newline_of_its_file() -> None:
    assert load_settings(environ={}).instance_id == "" != load_settings(client_id="me", environ={}).instance_id
    assert load_settings(token="secret\n", environ={}).token == "secret"
    assert load_settings(environ={"AGENTJET_TOKEN": " secret\n"}).token == "secret"


@pytest.mark.parametrize("token", ["secret-ü", "secret\nsecret", "secret\x00"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="a header cannot carry") as refused:
        load_settings(token=token, environ={})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("localhost:8400", "'localhost:8400'.*http://"),
        ("http://127.0.0.1:99999", "is not a server's address"),
        ("http://[::1", "is not a server's address"),
        ("http://127.0.0.1:abc", "is not a server's address"),
        ("http://127.0.0.1:0", "is not a server's address"),
        ("ftp://x", "is not a server's address"),
        (5, "is not a server's address"),
        ("http://box:1/runs", "'http://box:1/runs' names no run: add its name, or leave out /runs"),
        ("http://box:1/runs/", "names no run: add its name, or leave out /runs"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused_by_name(address: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        load_settings(address, environ={})
    assert str(address).rstrip("/") in str(refused.value)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/swarm/v1", "/swarm/v1//"])
@pytest.mark.parametrize("url", ["http://a", "http://a/runs/b", "http://a/runs/v1"])
def test_the_path_of_an_api_is_left_out_of_the_address(url: str, path: str) -> None:
    assert load_settings(f"{url}{path}", environ={}).url == url
