"""Connections of the cluster: handshake, hub and the end of a process. Pinned here:

1. only a process that is expected, has this version and knows the secret is admitted; others learn the reason;
2. whatever strangers send or do not send, they delay no handshake, and nothing of theirs is unpickled;
3. a process that connects to a stranger notices that the stranger does not know the secret;
4. a machine that vanishes is noticed within seconds: keepalive at both ends;
5. the end of a connection is the death of the process, and the process ends with its connection;
6. a message that cannot be read ends the connection, and not only the task that read it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.compute.channel import Answer, WorkerRequest, encode, read
from agentjet.compute.cluster import handshake, hub
from agentjet.compute.cluster.handshake import dial, verify
from agentjet.compute.cluster.hub import Hub, Link, Peer
from agentjet.errors import ComputeError, WorkerDied
from agentjet.types import PolicyId

PATIENCE = 30.0
POLICY = PolicyId()
SECRET = b"the secret of this test"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE))


@asynccontextmanager
async def open_hub() -> AsyncGenerator[Hub, None]:
    found = Hub()
    await found.open()
    try:
        yield found
    finally:
        await found.close()


def address_of(opened: Hub) -> tuple[str, bytes]:
    address, _, secret = opened.environment("any").values()
    return address, secret.encode()


async def connect(opened: Hub, name: str) -> tuple[Peer, socket.socket]:
    """Both ends of a new connection."""
    expected = opened.expect(name)
    address, secret = address_of(opened)
    connection = await asyncio.to_thread(dial, address, name, secret)
    return await expected, connection


def stranger(opened: Hub, sent: bytes = b"") -> socket.socket:
    host, _, port = address_of(opened)[0].rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection.sendall(sent)
    return connection


def hello(**changes: Any) -> bytes:
    body = json.dumps({"name": "a", "version": handshake.__version__, "nonce": "n", **changes}).encode()
    return struct.pack("<H", len(body)) + body


async def ended(connection: socket.socket) -> bytes:
    """Returns what a stranger receives until the other end closes."""

    def receive() -> bytes:
        with connection:
            found = b""
            try:
                while part := connection.recv(4096):
                    found += part
            except ConnectionError:
                pass
            return found

    return await asyncio.to_thread(receive)


# ---- handshake ------------------------------------------------------------------------------------------------------


def test_requests_and_answers_after_the_handshake() -> None:
    async def test() -> None:
        async with open_hub() as opened:
            peer, connection = await connect(opened, "a")
            with connection, connection.makefile("rb") as stream:
                asked = asyncio.create_task(peer.ask("load", POLICY, 1))
                request: WorkerRequest = await asyncio.to_thread(read, stream)
                connection.sendall(encode(Answer(request.id, "loaded")))
                assert await asked == "loaded"
            assert (peer.host, peer.num_messages) == ("127.0.0.1", 1)
            assert "the connection to a ended" in str(await peer.died)

    run(test())


def test_refusals_are_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with open_hub() as opened:
            address, secret = address_of(opened)
            expected = opened.expect("a")
            with pytest.raises(ComputeError, match="'b': no process of that name is expected"):
                await asyncio.to_thread(dial, address, "b", secret)
            with pytest.raises(ComputeError, match="does not know the secret"):
                await asyncio.to_thread(dial, address, "a", b"guessed")
            assert b"has AgentJet '0.1' and the gateway has" in await ended(stranger(opened, hello(version="0.1")))
            assert not expected.done(), "it is still expected"
            first = await asyncio.to_thread(dial, address, "a", secret)
            with first, pytest.raises(ComputeError, match="no process of that name is expected"):
                await asyncio.to_thread(dial, address, "a", secret)
            (await expected).close()

    run(test())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\xff\xff" + b"x" * 70_000,
        struct.pack("<H", 4000) + b"[" * 4000,
        struct.pack("<H", 4) + b"null",
        encode(Answer(1)),
        hello(name=["a"], nonce={"a": 1}),
        hello(name="\ud800", nonce="\ud800") + hello(proof="\ud800\u00e9"),
        hello() + hello(proof="0" * 64),
        hello()[:-3],
    ],
)
def test_strangers_end_only_their_connection(sent: bytes) -> None:
    async def test() -> None:
        async with open_hub() as opened:
            connection = stranger(opened, sent)
            connection.shutdown(socket.SHUT_WR)
            assert b"accepted" not in await ended(connection)
            peer, connection = await connect(opened, "a")
            connection.close()
            await peer.died

    run(test())


@given(st.binary(max_size=300))
def test_random_strangers(sent: bytes) -> None:
    async def test() -> None:
        async with open_hub() as opened:
            expected = opened.expect("a")
            connection = stranger(opened, sent)
            connection.shutdown(socket.SHUT_WR)
            await ended(connection)
            assert not expected.done()

    run(test())


def test_silent_strangers_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_HANDSHAKES", 20)

    async def test() -> None:
        async with open_hub() as opened:
            silent = [stranger(opened, part) for part in (b"", hello()[:1], hello()[:20], hello()) for _ in range(12)]
            peer, connection = await connect(opened, "a")
            connection.close()
            await peer.died
            await ended(silent[0])  # The oldest were closed to make room.
            for one in silent:
                one.close()

    run(test())


def test_a_handshake_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.1)

    async def test() -> None:
        async with open_hub() as opened:
            await ended(stranger(opened, hello()[:20]))
            listening, connecting = socket.socketpair()
            with listening, connecting:
                connecting.sendall(hello()[:20])
                with pytest.raises(TimeoutError):
                    await asyncio.to_thread(verify, listening, SECRET)

    run(test())


def test_the_blocking_form() -> None:
    """As rank 0 serves weights."""
    for secret, outcome in ((SECRET, "a"), (b"another", "'a' does not know the secret")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            found: list[str] = []

            def serve(listener: socket.socket = listener, found: list[str] = found) -> None:
                connection, _ = listener.accept()
                with connection:
                    try:
                        found.append(verify(connection, SECRET))
                    except (ComputeError, OSError) as error:
                        found.append(str(error))

            thread = threading.Thread(target=serve)
            thread.start()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            if secret == SECRET:
                dial(address, "a", secret).close()
            else:
                with pytest.raises(ComputeError):
                    dial(address, "a", secret)
            thread.join()
            assert found == [outcome] or secret != SECRET


def test_a_listener_that_does_not_know_the_secret() -> None:
    answers = [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        hello(proof="0" * 64),
        hello(proof="\u00e9"),
        struct.pack("<H", 2) + b"{}",
    ]
    for answer in answers:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener: socket.socket = listener, answer: bytes = answer) -> None:
                connection, _ = listener.accept()
                with connection, suppress(OSError):  # The one that dialled may have hung up.
                    connection.recv(4096)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises((ComputeError, OSError)):
                dial(f"127.0.0.1:{listener.getsockname()[1]}", "a", SECRET)
            thread.join()


def test_a_machine_that_vanishes_is_noticed() -> None:
    async def test() -> None:
        async with open_hub() as opened:
            peer, connection = await connect(opened, "a")
            ends = [connection, peer._writer.get_extra_info("socket")]
            for end in ends:
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                idle, interval, count, unanswered = (
                    end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in handshake.KEEPALIVE | OTHERS
                )
                assert idle + interval * count <= 15 and unanswered >= 20_000
            connection.close()
            await peer.died

    run(test())


OTHERS = {"TCP_USER_TIMEOUT": 0}


# ---- hub and peers --------------------------------------------------------------------------------------------------


def test_a_name_can_be_expected_again() -> None:
    async def test() -> None:
        async with open_hub() as opened:
            waiting = opened.expect("a")
            waiting.cancel()  # As a start that was cancelled does.
            peer, connection = await connect(opened, "a")
            connection.close()
            await peer.died
            opened.forget("b")
            forgotten = opened.expect("b")
            opened.forget("b")
            assert forgotten.cancelled()
            with pytest.raises(ComputeError, match="no process of that name"):
                await asyncio.to_thread(dial, address_of(opened)[0], "b", address_of(opened)[1])

    run(test())


def test_a_hub_that_closes_ends_handshakes_and_keeps_connections() -> None:
    async def test() -> None:
        async with open_hub() as opened:
            peer, connection = await connect(opened, "a")
            half = stranger(opened, hello())
            while not opened._handshakes:
                await asyncio.sleep(0)
            expected = opened.expect("b")
            await opened.close()
            await opened.close()
            assert b"accepted" not in await ended(half)
            assert expected.cancelled()
            connection.sendall(encode(Answer(1)))
            while not peer.num_messages:
                await asyncio.sleep(0)
            connection.close()
            await peer.died

    run(test())


class Explosive:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.mark.parametrize("end", ["close", "reset", "unreadable", "cut"])
def test_the_end_of_a_connection_is_the_death_of_the_process(end: str) -> None:
    async def test() -> None:
        async with open_hub() as opened:
            peer, connection = await connect(opened, "a")
            asked = [asyncio.create_task(peer.ask("load", POLICY)) for _ in range(2)]
            while len(peer.pending) < 2:
                await asyncio.sleep(0)
            if end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif end == "unreadable":
                body = pickle.dumps(Explosive())
                connection.sendall(struct.pack("<Q", len(body)) + body)
            elif end == "cut":
                connection.sendall(encode(Answer(1))[:-1])
            if end != "unreadable":
                connection.close()
            reason = await peer.died
            assert "the connection to a" in str(reason)
            for one in asked:
                with pytest.raises(WorkerDied, match="the connection to a"):
                    await one
            with pytest.raises(WorkerDied, match="the connection to a"):
                await peer.ask("load", POLICY)
            if end == "unreadable":
                assert "ValueError" in str(reason) and await ended(connection) is not None

    run(test())


def test_a_peer_that_is_closed_did_not_die() -> None:
    async def test() -> None:
        async with open_hub() as opened:
            peer, connection = await connect(opened, "a")
            asked = asyncio.create_task(peer.ask("load", POLICY))
            while not peer.pending:
                await asyncio.sleep(0)
            peer.close()
            peer.close()
            with pytest.raises(WorkerDied, match="a was ended"):
                await asked
            await ended(connection)
            assert not peer.died.done()

    run(test())


# ---- processes ------------------------------------------------------------------------------------------------------

PROCESS = """
import sys, threading
from agentjet.compute.cluster.hub import Link
link = Link.from_environment()
link.before_exit = lambda: print("bye", flush=True)
link.read_forever(lambda request: None)
print(link.local_host, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(("sent", "code"), [(b"", 0), (struct.pack("<Q", 4) + b"\x80\x04x.", 1)])
def test_a_process_ends_with_its_connection(sent: bytes, code: int) -> None:
    """Also if it is sent what it cannot read."""

    async def test() -> None:
        async with open_hub() as opened:
            expected = opened.expect("a")
            source = str(Path(hub.__file__).parents[3])
            process = subprocess.Popen(
                [sys.executable, "-c", PROCESS],
                env={**os.environ, **opened.environment("a"), "PYTHONPATH": source},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            peer = await expected
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "127.0.0.1\n"
            peer._writer.write(sent)
            if sent:
                await peer.died
            peer.close()
            output, _ = await asyncio.to_thread(process.communicate)
            assert (output, process.returncode) == ("bye\n", code)

    run(test())


def test_a_link_needs_its_environment() -> None:
    with pytest.raises(KeyError):
        Link.from_environment({})
