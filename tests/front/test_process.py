"""`Front`: what the server's messages do, in their order."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agentjet.client.connection import Connection, Retry, load_settings
from agentjet.compute.remote import RemoteSamplers
from agentjet.config import ServeConfig
from agentjet.errors import Conflict, Later, NotFound
from agentjet.front.addresses import FrontPath
from agentjet.front.calls import CallRequest
from agentjet.front.http import HttpServer
from agentjet.front.inference import CALL_PATHS
from agentjet.front.keys import Keys
from agentjet.front.tracing import Tracing
from agentjet.fronts.process import (
    PART_BYTES,
    SOCKET,
    Front,
    FrontPolicies,
    FrontRun,
    FrontSettings,
    RunState,
    ask_for_batch,
)
from agentjet.processes.rpc import Link
from agentjet.protocol import AbortRequest
from agentjet.swarm import EpisodeRecord, Journal
from agentjet.swarm.journal_file import JournalFile, segment_of
from agentjet.types import DEFAULT_RUN, JOURNAL, Conversation, Message
from tests.front.test_segment import FRONTS, Run
from tests.swarm.world import refused_commits

pytestmark = pytest.mark.anyio

OTHER = "other"


def state(*, is_open: bool) -> RunState:
    return RunState((), "", is_open, None, {}, -1)


async def test_a_run_is_drained_after_its_gate_was_shut(tmp_path: Path) -> None:
    """Also if the file of another run is opened meanwhile, which takes long while a killed front still has it. That run
    is closed if the server closes it in that time.
    """
    config = ServeConfig.model_validate({"server": {"data_dir": str(tmp_path)}})
    for run in (DEFAULT_RUN, OTHER):
        Journal.open(tmp_path / "runs" / run / JOURNAL).close()
    front: Any = Front(cast(Link, SimpleNamespace(name="front-0")))
    await front._begin(FrontSettings(0, ("http://front0",), config, time.time() - time.monotonic()))
    await front._open(DEFAULT_RUN, config, state(is_open=True))
    held = JournalFile.open(segment_of(tmp_path / "runs" / OTHER / JOURNAL, 0))
    opening = asyncio.create_task(front._open(OTHER, config, state(is_open=True)))
    await asyncio.sleep(0)
    shut = asyncio.create_task(front._open(DEFAULT_RUN, config, state(is_open=False)))
    drained = asyncio.create_task(front._drained(DEFAULT_RUN))
    closed = asyncio.create_task(front._close(OTHER))
    await asyncio.sleep(0.1)
    assert not drained.done()
    held.close()
    await asyncio.gather(opening, shut, drained, closed)
    assert not front._runs[DEFAULT_RUN].gate.is_open and OTHER not in front._runs
    for run in (DEFAULT_RUN, OTHER):
        await front._close(run)


@pytest.mark.parametrize("path", ["/", "/swarm/v1/status", "/swarm/v1/episodes", "/metrics", "/healthz", "/readyz"])
async def test_a_front_says_where_the_server_is(tmp_path: Path, path: str) -> None:
    config = ServeConfig.model_validate({"server": {"data_dir": str(tmp_path), "port": 8400}})
    Journal.open(tmp_path / "runs" / DEFAULT_RUN / JOURNAL).close()
    front: Any = Front(cast(Link, SimpleNamespace(name="front-0")))
    await front._begin(FrontSettings(0, ADDRESSES, config, 0.0))
    await front._open(DEFAULT_RUN, config, state(is_open=True))
    transport = httpx.ASGITransport(front._app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.get(path)
        assert answer.status_code == 404
        assert "This is front 0" in answer.text and "to the server, at port 8400 (server.port)" in answer.text
        assert (await client.head("/")).status_code == 200, "agents check their base URL"
        without_v1 = await client.post("/chat/completions", json={})
        assert without_v1.status_code == 404 and "add /v1 to the base URL" in without_v1.json()["error"]["message"]
    connection = Connection(load_settings("http://127.0.0.1:8401/v1", environ={}), retry=Retry(), transport=transport)
    with pytest.raises(NotFound, match=r"This is front 0, .* to the server, at port 8400"):
        await connection.request("GET", "/status")
    await connection.close()
    await front._close(DEFAULT_RUN)


@pytest.mark.parametrize("error", [None, OSError("no sockets are left")])
async def test_a_front_whose_http_server_ends_or_fails_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    async def serve(_: HttpServer, sockets: list[socket.socket]) -> None:
        sockets[0].close()
        if error is not None:
            raise error

    monkeypatch.setattr(HttpServer, "serve", serve)
    monkeypatch.setattr("agentjet.fronts.process.tune_python", lambda: None)
    monkeypatch.setenv(SOCKET, str(socket.create_server(("127.0.0.1", 0)).detach()))
    config = ServeConfig.model_validate({"server": {"data_dir": str(tmp_path)}})
    Journal.open(tmp_path / "runs" / DEFAULT_RUN / JOURNAL).close()
    exits: list[int] = []
    front: Any = Front(cast(Link, SimpleNamespace(name="front-0", exit=exits.append)))
    await front._begin(FrontSettings(0, ADDRESSES, config, 0.0))
    await front._open(DEFAULT_RUN, config, state(is_open=True))
    others = set(front._tasks)
    await front._listen()
    await asyncio.wait(front._tasks - others)
    assert exits == [1] and f"the front ends: {error or 'the HTTP server ended'}" in caplog.text
    await front._close(DEFAULT_RUN)


ADDRESSES = tuple(f"https://agents.example/f{front}" for front in range(2))


@pytest.mark.parametrize(
    ("sent", "path"),
    [
        ("/v1/models", "/v1/models"),  # A proxy removed the prefix, or there is none.
        ("/f1/v1/models", "/v1/models"),
        ("/f1/runs/other/v1/models", "/runs/other/v1/models"),
        ("/f1", "/"),
        ("/f1/", "/"),
        ("/f1/f1/v1/models", "/f1/v1/models"),
        ("/f/v1/models", "/f/v1/models"),
        ("/f1x/v1/models", "/f1x/v1/models"),
        ("/f01/v1/models", "/f01/v1/models"),  # Numbers have one form.
        ("/f00", "/f00"),
    ],
)
async def test_a_front_removes_its_prefix_where_a_proxy_did_not(sent: str, path: str) -> None:
    assert (await asked(sent)).json() == {"path": path, "raw_path": path}


@pytest.mark.parametrize(
    ("front", "sent", "said"),
    [
        (1, "/f0/v1/models", "This is front 1, and the path is one of front 0: https://agents.example/f0."),
        (1, "/f7/v1/models", "There is no front 7: the server has fronts 0 to 1 (server.fronts = 2)."),
        (1, "/f0/runs/other/v1/chat/completions", "This is front 1, and the path is one of front 0"),
        (None, "/f7/v1/models", "There is no front 7: the server has fronts 0 to 1"),
        (None, "/f1/v1/models", "This is the server, and the path is one of front 1: https://agents.example/f1."),
        (None, "/f1", "This is the server, and the path is one of front 1"),
    ],
)
async def test_the_paths_of_other_fronts_are_refused(front: int | None, sent: str, said: str) -> None:
    answer = await asked(sent, front)
    assert answer.status_code == 403 and '"other_front"' in answer.text
    assert said in answer.text and "check the proxy's rules for /f0/, /f1/ and so on" in answer.text
    assert ("error" in answer.json()) == ("/v1/" in sent), "agents read the errors of their dialect"


async def asked(path: str, front: int | None = 1) -> httpx.Response:
    """The answer of one front of two, or of the server, whose application repeats its path."""

    async def repeat(scope: Scope, receive: Receive, send: Send) -> None:
        found = {"path": scope["path"], "raw_path": scope["raw_path"].decode()}
        await JSONResponse(found)(scope, receive, send)

    app = FrontPath(repeat, front, ADDRESSES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
        return await client.get(path)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path)) as world:
        yield world


def serving(world: Run, episode: EpisodeRecord) -> FrontRun:
    """The run on the front of an episode."""
    policies = FrontPolicies(DEFAULT_RUN, ServeConfig(), RemoteSamplers("front-0"))
    return FrontRun(world.front(episode), policies, cast(Keys, None), Tracing(), lambda: world.now)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/policy", *CALL_PATHS])
async def test_other_fronts_refuse_the_key_of_an_episode_on_every_path(world: Run, path: str) -> None:
    """Before they read the body."""
    episode, keys = world.begin("", mode="eval"), Keys({}, clock=lambda: world.now)
    key = keys.sign(episode.id, episode.begun)
    for number in range(FRONTS):
        front: Any = Front(cast(Link, SimpleNamespace(name=f"front-{number}")))
        front._settings = FrontSettings(number, ADDRESSES, ServeConfig(), 0.0)
        policies = FrontPolicies(DEFAULT_RUN, ServeConfig(), RemoteSamplers("front-0"))
        segment = world.segment(number)
        front._runs[DEFAULT_RUN] = FrontRun(segment, policies, keys, Tracing(), lambda: world.now)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(front._app()), base_url="http://127.0.0.1"
        ) as client:
            for sent, headers in ((path, {"x-api-key": key}), (f"/k/{key}{path}", {})):
                answer = await client.request("GET" if "models" in path else "POST", sent, headers=headers)
                is_refused = answer.status_code == 403 and "belongs to front" in answer.text
                assert is_refused == (segment is not world.front(episode)), answer.text


async def test_a_repeated_end_waits_for_the_disk_like_the_first(world: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = world.begin("", mode="eval")
    run = serving(world, episode)
    disk, sync = threading.Event(), run.segment.file.sync
    monkeypatch.setattr(run.segment.file, "sync", lambda: (disk.wait(), sync()))
    world.speak(run.segment, episode)
    ends = [asyncio.create_task(run.finish(episode.id)) for _ in range(2)]
    await asyncio.wait(ends, timeout=0.1)
    assert not any(end.done() for end in ends)
    disk.set()
    first, second = await asyncio.gather(*ends)
    assert first == second and first is not None and first.num_calls == 1
    await run.close()


async def test_an_end_that_the_disk_refuses_leaves_the_episode_live(world: Run) -> None:
    episode, other = (world.begin("g") for _ in range(2))
    run = serving(world, episode)
    world.speak(run.segment, episode)
    await run.commits.durable()
    with refused_commits(run.segment.journal):
        world.speak(run.segment, other)
        with pytest.raises(Later):
            await run.finish(episode.id)
    world.speak(run.segment, episode)
    counts = await run.finish(episode.id)
    assert counts is not None and counts.num_calls == 2
    await run.close()


@pytest.mark.parametrize("refused", ["commit", "mark"])
async def test_calls_of_an_episode_that_has_ended_end_also_if_the_disk_refuses_their_record(
    refused: str, world: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise Later("The disk is full.", retry_after=1)

    episode = world.begin("", mode="eval")
    run = serving(world, episode)
    with run.calls._track(episode, "", CallRequest(Conversation((Message("user", "hello"),)))) as call:
        world.speak(run.segment, episode)
        world.swarm.abort(episode.id, AbortRequest(reason="crash"))
        if refused == "mark":
            run.calls.of(episode.id).undelivered.append("call")
            monkeypatch.setattr(run.segment, "undelivered", refuse)
        with refused_commits(run.segment.journal), pytest.raises(Later):
            await run.finish(episode.id)
        assert isinstance(call.outbox.get_nowait(), Conflict) and not run.calls.active
    with pytest.raises(Conflict, match="aborted"):
        run.segment.heartbeat(episode.id)
    await run.close()


async def test_settings_that_were_not_committed_yet_are_read_with_the_next_state(world: Run) -> None:
    """A batch may open or hold the gate between a change of the job and its commit."""
    run = serving(world, world.begin("", mode="eval"))
    world.swarm.defer_commits(lambda: None)
    world.swarm.replace_job(world.job.model_copy(update={"max_tokens": 7}))
    present = RunState((), "", True, None, {}, world.swarm.job_revision)
    await run.change(present)
    world.swarm.commit()
    await run.change(present)
    assert run.segment.job.max_tokens == 7
    await run.close()


async def test_the_gate_closes_also_if_new_settings_cannot_be_read(world: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server learns once no call is inside, and would change the weights of further calls."""

    def refuse() -> int:
        raise OSError("too many open files")

    run = serving(world, world.begin("", mode="eval"))
    await run.change(state(is_open=True))
    monkeypatch.setattr(run.segment, "read_job", refuse)
    with pytest.raises(OSError, match="too many"):
        await run.change(replace(state(is_open=False), job_revision=2))
    assert not run.gate.is_open
    await run.close()


async def test_each_call_that_a_stopped_engine_refuses_gets_another_error(world: Run) -> None:
    """One error would keep the frames of all of them in its traceback."""
    run, refusal = serving(world, world.begin("", mode="eval")), Later("The engine is stopped.", retry_after=10.0)
    await run.change(replace(state(is_open=False), refusal=refusal))
    for _ in range(2):
        with pytest.raises(Later, match="is stopped"):
            async with run.gate.enter(1.0):
                pass
    assert refusal.__traceback__ is None
    await run.close()


async def test_a_batch_comes_in_parts_that_hold_no_event_loop_for_long() -> None:
    built = {"forest": np.arange(2_000_000), "empty": np.zeros(0)}, {"tokens": 2.0}
    front: Any = Front(cast(Link, SimpleNamespace(name="front-0")))
    front._runs["r"] = SimpleNamespace(batch=lambda batch_id: built)
    sizes = []

    async def ask(op: str, _: None, *args: Any) -> Any:
        answer = await getattr(front, f"_{op}")(*args)
        sizes.append(len(pickle.dumps(answer)))
        return answer

    given_up = await ask("batch", None, "r", 3)
    forests, metrics = await ask_for_batch(ask, "r", 3)
    assert given_up and np.array_equal(cast(Any, forests)["forest"], built[0]["forest"]) and metrics == {"tokens": 2.0}
    assert max(sizes) < PART_BYTES + 1000 < built[0]["forest"].nbytes and not front._batches
