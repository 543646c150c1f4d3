"""An agent that stops reading its answer, over real sockets with small buffers.

1. It does not renew its lease: the episode ends with the lease. The connection is closed after
   `RequestLimits.stall_seconds`.
2. Chunks that it had not received when its episode ended, or when it left, are not trained after any `finish`.
3. A slow reader stays alive, and what it has read is trained.
4. A server that stops does not wait for it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentjet.front.http import RequestLimits
from tests.fakes import saying
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio
TOKENS = 500
"""Of each choice; its events, with log-probabilities, are many times what fits into the buffers."""
CHOICES = 2
STALL_SECONDS = 1.5
"""Long enough for a busy machine to record an answer after its reader stopped reading."""


async def stalled(served: Served, episode: dict[str, Any]) -> socket.socket:
    """A connection with a streamed answer that is fully recorded and not read at all."""
    served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader, served.listener.getsockname())
    asked = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "logprobs": True,
        "n": CHOICES,
        "max_tokens": TOKENS,
    }
    body = json.dumps(asked).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {episode['api_key']}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    await loop.sock_sendall(reader, head.encode() + body)
    swarm, lease = served.run.gateway.swarm, served.run.gateway.swarm.job.lease_seconds
    await served.run.until(lambda: swarm.episode(episode["episode_id"]).num_calls == CHOICES)
    # While the server was at work the lease stood still, and only `max_episode_seconds` counted.
    await served.run.until(
        lambda: swarm.expires_at(swarm.episode(episode["episode_id"])) == served.run.clock.now + lease
    )
    assert served.run.gateway.status().calls_active == 1
    return reader


async def rest_of(reader: socket.socket) -> bytes:
    """Reads until the connection ends in any way."""
    read = b""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        try:
            while piece := await loop.sock_recv(reader, 65536):
                read += piece
        except ConnectionResetError:
            pass
    return read


def long_answers() -> Any:
    return saying(lambda prompt: "word " * TOKENS)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    of = RequestLimits.of
    monkeypatch.setattr(RequestLimits, "of", lambda server: replace(of(server), stall_seconds=STALL_SECONDS))


@pytest.mark.usefixtures("impatient")
async def test_a_reader_that_stalls_is_cut_off(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", long_answers(), job={"lease_seconds": 10}) as served:
        episode = await served.begin()
        with await stalled(served, episode) as reader:
            served.run.clock.advance(11)
            swarm = served.run.gateway.swarm
            await served.run.until(lambda: swarm.episode(episode["episode_id"]).status == "expired")
            await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
            await asyncio.sleep(STALL_SECONDS + 0.5)
            assert b"[DONE]" not in await rest_of(reader)
        assert await served.orphans(episode) == ["undelivered"] * CHOICES


@pytest.mark.usefixtures("impatient")
async def test_a_finish_does_not_train_what_is_still_being_handed_out(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", long_answers()) as served:
        episode = await served.begin()
        with await stalled(served, episode) as reader:
            await served.http.post(f"/swarm/v1/episodes/{episode['episode_id']}/finish", json={"reward": 1.0})
            assert await served.orphans(episode) == ["undelivered"] * CHOICES
            await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
            await asyncio.sleep(STALL_SECONDS + 0.5)
            assert b"[DONE]" not in await rest_of(reader)


@pytest.mark.usefixtures("impatient")
async def test_a_second_request_does_not_prolong_the_stall(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", long_answers()) as served:
        with await stalled(served, await served.begin()) as reader:
            await asyncio.get_running_loop().sock_sendall(reader, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await asyncio.sleep(STALL_SECONDS + 0.5)
            assert b"[DONE]" not in await rest_of(reader)


async def test_who_leaves_without_reading_has_not_heard(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", long_answers()) as served:
        episode = await served.begin()
        with await stalled(served, episode):
            pass
        await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
        assert await served.orphans(episode) == ["undelivered"] * CHOICES


async def test_who_reads_late_has_heard(tmp_path: Path) -> None:
    async with serving(tmp_path / "d", long_answers(), job={"lease_seconds": 10}) as served:
        episode = await served.begin()
        with await stalled(served, episode) as reader:
            served.run.clock.advance(9)
            read = b""
            while b"[DONE]" not in read:
                read += await asyncio.get_running_loop().sock_recv(reader, 65536)
            await served.run.until(lambda: served.run.gateway.status().calls_active == 0)
        assert served.run.gateway.swarm.episode(episode["episode_id"]).status == "live"
        assert await served.orphans(episode) == [""] * CHOICES


async def test_a_stop_does_not_wait_for_readers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path / "d", long_answers()) as served:
        episode = await served.begin()
        reader = await stalled(served, episode)
    reader.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    async with serving(tmp_path / "d") as served:
        assert await served.orphans(episode) == ["undelivered"] * CHOICES
