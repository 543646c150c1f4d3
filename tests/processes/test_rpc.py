"""Connections of processes: the handshake, requests, and the end of a process. Pinned here:

1. only a process that is expected, has this version and knows the secret is admitted; others learn the reason;
2. whatever strangers send or do not send, they delay no handshake, and nothing of theirs is unpickled;
3. a process that connects to a stranger notices that the stranger does not know the secret;
4. a machine that vanishes is noticed within seconds: keepalive at both ends;
5. the end of a connection is the death of the process, and the process ends with its connection;
6. a message that cannot be read ends the connection, and not only the task that read it;
7. a large request is encoded in a thread, and sent in small parts;
8. a front that reads nothing delays no one: its messages wait, in order, and beyond a limit its connection ends;
9. a system without a free thread delays connections, and loses none.
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
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.errors import ComputeError, WorkerDied
from agentjet.processes import rpc, supervisor
from agentjet.processes.guardian import Launch, ProcessEnd
from agentjet.processes.rpc import (
    IDS,
    PART_BYTES,
    Answer,
    FrontLink,
    LargeRequest,
    Link,
    Peer,
    ProcessRequest,
    dial,
    encode,
    host_and_port,
    read,
    requests,
    verify,
)
from agentjet.processes.supervisor import Supervisor
from agentjet.types import PolicyId

pytestmark = pytest.mark.anyio

PATIENCE = 30.0
POLICY = PolicyId()
SECRET = b"the secret of this test"


class Endless:
    """A process that ends when it is stopped."""

    pid, place, log_path = 0, "here", Path("log")

    def __init__(self) -> None:
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result(ProcessEnd("was stopped"))


class Nowhere:
    """A placement that starts nothing. The test connects in place of the process."""

    def __init__(self) -> None:
        self.started: dict[str, tuple[Endless, Mapping[str, str]]] = {}

    async def num_gpus(self) -> int | None:
        return None

    async def start(self, launch: Launch) -> Endless:
        self.started[launch.name] = process, _ = Endless(), launch.environment
        return process

    async def close(self) -> None:
        pass


class Scene:
    def __init__(self) -> None:
        self.placement = Nowhere()
        self.supervisor = Supervisor("127.0.0.1", self.placement)
        self.address = self.supervisor._listener.address

    async def expect(self, name: str) -> tuple[asyncio.Task[Peer], Mapping[str, str]]:
        """Begin a start; returns it with the environment of the process, whose connection it waits for."""
        starting = asyncio.create_task(self.supervisor.start(Launch(name, (), Path("log"))))
        self.placement.started.pop(name, None)
        while name not in self.placement.started:
            await asyncio.sleep(0)
        return starting, self.placement.started[name][1]

    async def dial(self, environment: Mapping[str, str], **changes: str) -> socket.socket:
        address, name, secret = ({**environment, **changes}[variable] for variable in Link.VARIABLES)
        return await asyncio.to_thread(dial, address, name, secret.encode())

    async def connect(self, name: str) -> tuple[Peer, socket.socket]:
        """Both ends of a new connection."""
        starting, environment = await self.expect(name)
        connection = await self.dial(environment)
        return await starting, connection

    def stranger(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(host_and_port(self.address), timeout=PATIENCE)
        with suppress(ConnectionError):
            connection.sendall(sent)
        return connection


@asynccontextmanager
async def scene() -> AsyncGenerator[Scene, None]:
    found = Scene()
    try:
        async with asyncio.timeout(PATIENCE):
            yield found
    finally:
        await found.supervisor.close()


def hello(**changes: Any) -> bytes:
    body = json.dumps({"name": "a", "version": rpc.__version__, "nonce": "n", **changes}).encode()
    return struct.pack("<H", len(body)) + body


async def ended(connection: socket.socket) -> bytes:
    """Returns what a stranger receives until the other end closes."""

    def receive() -> bytes:
        with connection:
            found = b""
            with suppress(ConnectionError):
                while part := connection.recv(4096):
                    found += part
            return found

    return await asyncio.to_thread(receive)


# ---- handshake ------------------------------------------------------------------------------------------------------


async def test_requests_and_answers_after_the_handshake() -> None:
    async with scene() as on:
        peer, connection = await on.connect("a")
        with connection, connection.makefile("rb") as stream:
            asked = asyncio.create_task(peer.ask("load", POLICY, 1))
            request: ProcessRequest = await asyncio.to_thread(read, stream)
            connection.sendall(encode(Answer(request.id, "loaded")))
            assert await asked == "loaded"
        assert peer.num_messages == 1 and on.supervisor.place("a") == "here"
        assert "the connection to a ended" in str(await peer.died)
        assert await peer.stop() == "was stopped"
        await asyncio.sleep(0)
        assert on.supervisor.place("a") == ""


async def test_refusals_have_their_reason() -> None:
    async with scene() as on:
        starting, environment = await on.expect("a")
        with pytest.raises(ComputeError, match="'b': no process of that name is expected"):
            await on.dial(environment, AGENTJET_NAME="b")
        with pytest.raises(ComputeError, match="does not know the secret"):
            await on.dial(environment, AGENTJET_SECRET="guessed")
        assert b"has AgentJet '0.1' and the gateway has" in await ended(on.stranger(hello(version="0.1")))
        assert not starting.done(), "it is still expected"
        with await on.dial(environment), pytest.raises(ComputeError, match="no process of that name is expected"):
            await on.dial(environment)
        (await starting).close()


STRANGE = [
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
]


async def test_strangers_end_only_their_connection() -> None:
    async with scene() as on:
        starting, environment = await on.expect("a")
        for sent in STRANGE:
            connection = on.stranger(sent)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            assert b"accepted" not in await ended(connection)
        (await on.dial(environment)).close()
        await (await starting).died


@given(st.binary(max_size=300))
async def test_random_strangers(sent: bytes) -> None:
    async with scene() as on:
        starting, _ = await on.expect("a")
        connection = on.stranger(sent)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        await ended(connection)
        assert not starting.done()
        starting.cancel()


async def test_silent_strangers_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_HANDSHAKES", 20)
    async with scene() as on:
        silent = [on.stranger(part) for part in (b"", hello()[:1], hello()[:20], hello()) for _ in range(12)]
        peer, connection = await on.connect("a")
        connection.close()
        await peer.died
        await ended(silent[0])  # The oldest were closed to make room.
        for one in silent:
            one.close()


async def test_a_connection_waits_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ACCEPT_SECONDS", 0.01)
    start, failed = threading.Thread.start, list[threading.Thread]()

    def start_late(thread: threading.Thread) -> None:
        if len(failed) < 3 and getattr(thread, "_target", None) == on.supervisor._listener._admit:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    async with scene() as on:
        monkeypatch.setattr(threading.Thread, "start", start_late)
        peer, connection = await on.connect("a")
        connection.close()
        await peer.died
        assert len(failed) == 3


async def test_a_handshake_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_SECONDS", 0.1)
    async with scene() as on:
        await ended(on.stranger(hello()[:20]))
        listening, connecting = socket.socketpair()
        with listening, connecting:
            connecting.sendall(hello()[:20])
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(verify, listening, SECRET, lambda name: print)


def test_a_server_that_is_stopped_while_a_process_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(rpc, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def go_on() -> None:
            connection, _ = listener.accept()
            now[0] = 60.0
            with connection:
                verify(connection, SECRET, lambda name: print)
                connection.recv(1)

        server = threading.Thread(target=go_on)
        server.start()
        values = f"127.0.0.1:{listener.getsockname()[1]}", "a", SECRET.decode()
        link = Link.from_environment(dict(zip(Link.VARIABLES, values, strict=True)))
        link._stream.close()
        link._connection.close()
        server.join()


def test_a_listener_that_does_not_know_the_secret() -> None:
    answers = [
        b"",
        b"HTTP/1.1 400 Bad ProcessRequest\r\n\r\n",
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


async def test_a_machine_that_vanishes_is_noticed() -> None:
    async with scene() as on:
        peer, connection = await on.connect("a")
        for end in (connection, peer._writer.get_extra_info("socket")):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            idle, interval, count, unanswered = (
                end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in (*rpc.KEEPALIVE, "TCP_USER_TIMEOUT")
            )
            assert idle + interval * count <= 15 and unanswered >= 20_000
        connection.close()
        await peer.died


# ---- starts and peers -----------------------------------------------------------------------------------------------


async def test_a_start_that_is_cancelled_or_ends_early_leaves_no_process() -> None:
    async with scene() as on:
        starting, environment = await on.expect("a")
        process = on.placement.started["a"][0]
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert process.ended.done()
        with pytest.raises(ComputeError, match="no process of that name"):
            await on.dial(environment)
        starting, _ = await on.expect("a")
        await on.placement.started["a"][0].stop()
        with pytest.raises(WorkerDied, match="a was stopped"):
            await starting
        peer, connection = await on.connect("a")  # The name can be used again.
        connection.close()
        await peer.died


async def test_a_connection_of_a_process_that_is_being_stopped_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver, delivered = supervisor._deliver, list[socket.socket]()

    def note(connection: asyncio.Future[socket.socket], taken: socket.socket) -> None:
        deliver(connection, taken)
        delivered.append(taken)

    async def connect() -> None:
        with await on.dial(environment):
            while not delivered:
                await asyncio.sleep(0)

    monkeypatch.setattr(supervisor, "_deliver", note)
    async with scene() as on:
        starting, environment = await on.expect("a")
        monkeypatch.setattr(on.placement.started["a"][0], "stop", connect)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert delivered[0].fileno() == -1


async def test_an_end_that_is_cancelled_waits_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "REASON_SECONDS", 0.1)
    async with scene() as on:
        peer, connection = await on.connect("a")
        connection.close()
        await peer.died
        stopping = asyncio.create_task(peer.stop())
        for _ in range(2):
            await asyncio.sleep(0)  # It waits for the process to end by itself.
            await asyncio.sleep(0)
            stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert on.placement.started["a"][0].ended.done()


async def test_a_supervisor_that_closes_ends_handshakes_and_keeps_connections() -> None:
    async with scene() as on:
        peer, connection = await on.connect("a")
        half = on.stranger(hello())
        await asyncio.to_thread(half.recv, 1)
        starting, _ = await on.expect("b")
        await on.supervisor.close()
        await on.supervisor.close()
        assert b"accepted" not in await ended(half)
        with pytest.raises(asyncio.CancelledError):
            await starting
        connection.sendall(encode(Answer(1)))
        while not peer.num_messages:
            await asyncio.sleep(0)
        connection.close()
        await peer.died


class Explosive:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.mark.parametrize("end", ["close", "reset", "unreadable", "cut"])
async def test_the_end_of_a_connection_is_the_death_of_the_process(end: str) -> None:
    async with scene() as on:
        peer, connection = await on.connect("a")
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
        for one in asked:
            with pytest.raises(WorkerDied, match="the connection to a"):
                await one
        with pytest.raises(WorkerDied, match="the connection to a"):
            await peer.ask("load", POLICY)
        assert len(peer.unanswered) == 2
        if end == "unreadable":
            assert "ValueError" in str(reason) and await ended(connection) is not None


async def test_a_peer_that_is_closed_did_not_die() -> None:
    async with scene() as on:
        peer, connection = await on.connect("a")
        asked = asyncio.create_task(peer.ask("load", POLICY))
        while not peer.pending:
            await asyncio.sleep(0)
        peer.close()
        peer.close()
        with pytest.raises(WorkerDied, match="a was ended"):
            await asked
        await ended(connection)
        assert not peer.died.done()


class Marked:
    """An argument that records the threads which encode it."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __reduce__(self) -> tuple[type, tuple[int]]:
        self.threads.append(threading.get_ident())
        return bytes, (1,)


async def test_a_large_request_is_encoded_in_a_thread_and_sent_in_small_parts() -> None:
    """Python's lock is held for one part at a time, and the event loop encodes no batch."""
    marked, numbers = Marked(), np.arange(4 * PART_BYTES, dtype=np.uint8)
    large = await LargeRequest.encoded(ProcessRequest("load_batch", next(IDS), POLICY, (marked, numbers)))
    assert len(marked.threads) == 1 and threading.get_ident() not in marked.threads
    sizes = [len(part) for part in large.parts()]
    assert len(sizes) >= 5 and max(sizes) < PART_BYTES + 1000 < 2**20
    async with scene() as on:
        peer, connection = await on.connect("a")
        with connection, connection.makefile("rb") as stream:
            asked = asyncio.create_task(peer.send_large(large))
            request = await asyncio.to_thread(next, requests(stream))
            assert request.op == "load_batch" and (request.args[1] == numbers).all()
            connection.sendall(encode(Answer(request.id, "loaded")))
            assert await asked == "loaded" and not peer.pending


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError("no answer")], ids=["reset", "gone"])
async def test_a_connection_that_ends_ends_the_sending_of_a_large_request(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the machine is gone: that is no `ConnectionError`. The rest of the request is not encoded."""
    zeros = np.zeros(256 * PART_BYTES, np.uint8)
    large = await LargeRequest.encoded(ProcessRequest("load_batch", next(IDS), POLICY, (zeros,)))
    parts, sizes = large.parts(), list[int]()

    def counted(large: LargeRequest) -> Iterator[bytes]:
        for part in parts:
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(LargeRequest, "parts", counted)
    async with scene() as on:
        peer, connection = await on.connect("a")
        with connection:
            asked = asyncio.create_task(peer.send_large(large))
            while not peer.pending:
                await asyncio.sleep(0)
            peer._writer.transport.get_protocol().connection_lost(error)
            with pytest.raises(WorkerDied, match=f"the connection to a ended: {error}"):
                await asked
        assert len(sizes) < 256 and [one.op for one in peer.unanswered] == [rpc.SENDING]


def test_a_front_that_reads_nothing_delays_no_one() -> None:
    ours, theirs = socket.socketpair()
    delivered, left = [], threading.Event()

    def deliver(link: Link, request: ProcessRequest) -> None:
        delivered.append(request.op)
        left.set()

    front, body = FrontLink(ours, "front", b"", deliver), bytes(2**16)
    with theirs, theirs.makefile("rb") as stream:
        for _ in range(2):
            for id in range(1, 300):
                front.send(Answer(id, body))
            assert [read(stream).id for _ in range(1, 300)] == list(range(1, 300))
        for _ in range(rpc.MAX_UNSENT_BYTES // len(body) + 100):
            front.send(Answer(1, body))
        assert left.wait(PATIENCE) and delivered == ["leave"]
        front.send(Answer(1))


def test_a_front_whose_messages_wait_for_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    left, start = threading.Event(), threading.Thread.start
    front = FrontLink(ours, "front", b"", lambda link, request: left.set())

    def fail(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) == front._send_rest:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with theirs:
        for _ in range(300):
            front.send(Answer(1, bytes(2**16)))
        assert left.wait(PATIENCE)


# ---- processes ------------------------------------------------------------------------------------------------------

PROCESS = """
import threading
from agentjet.processes.rpc import Link
link = Link.from_environment()
link.before_exit = lambda: print("bye", flush=True)
link.read_forever(lambda request: None)
print(link.local_host, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(("sent", "code"), [(b"", 0), (struct.pack("<Q", 4) + b"\x80\x04x.", 1)])
async def test_a_process_ends_with_its_connection(sent: bytes, code: int) -> None:
    """Also if it is sent what it cannot read, such as a recipe whose module only the server can import."""
    async with scene() as on:
        starting, environment = await on.expect("a")
        source = str(Path(rpc.__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={**os.environ, **environment, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        peer = await starting
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "127.0.0.1\n"
        peer._writer.write(sent)
        if sent:
            await peer.died
        peer.close()
        output, _ = await asyncio.to_thread(process.communicate)
        assert (output, process.returncode) == ("bye\n", code)
