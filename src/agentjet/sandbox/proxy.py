"""`ModelProxy`: the only way from a sandbox to a network. It forwards requests to one server, below given paths.

The sandbox's program connects to a socket in its own network, which this process holds. A parser reads each request and
writes a new one, so the server sees no byte that the parser did not understand: no second request in a body, no other
host, no upgrade. Answers stream, and a hang-up on one side closes the other.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Iterable, Sequence
from contextlib import suppress
from urllib.parse import unquote, urlsplit

import h11

CHUNK_BYTES = 2**16
MAX_HEAD_BYTES = 2**17
CONNECT_SECONDS = 30.0
OWN_HEADERS = frozenset(
    b"host connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade "
    b"expect".split()
)
"""Headers that belong to one connection: they are not forwarded."""
DISCARD_SECONDS = 2.0
MAX_CONNECTIONS = 64
"""Open connections of one sandbox. Others are closed: each takes two descriptors of this process."""


def refusal(target: bytes, method: bytes, headers: Iterable[tuple[bytes, bytes]], allowed: Sequence[str]) -> str:
    """The reason not to forward a request, or ""."""
    if method == b"CONNECT" or any(name == b"upgrade" for name, _ in headers):
        return "tunnels and upgrades are not forwarded"
    raw, _, _ = target.decode("ascii", "replace").partition("?")
    if not raw.startswith("/"):
        return f"the target {raw[:200]!r} is not a path"
    path = unquote(raw)
    # A server may decode once more, or treat these as separators.
    if re.search(r"(^|[/\\])\.\.?([/\\;]|$)|[\\\x00-\x1f\x7f#]", unquote(path)):
        return f"the path {raw[:200]!r} is not in its shortest form"
    if not any(path == begin.rstrip("/") or path.startswith(f"{begin.rstrip('/')}/") for begin in allowed):
        return f"the path {raw[:200]!r} is not below {' or '.join(allowed)}"
    return ""


class ModelProxy:
    """The proxy of one sandbox. It runs in the event loop that calls `start`."""

    def __init__(self, url: str, allowed: Sequence[str]) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self.host, self.allowed = parts.hostname, allowed
        self.name = parts.netloc.rpartition("@")[2]
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=CHUNK_BYTES)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS:
                with suppress(OSError, h11.ProtocolError, asyncio.CancelledError):
                    await _Connection(self, reader, writer).serve()
        finally:
            self._tasks.discard(task)
            writer.close()


class _Connection:
    """One connection of the program."""

    def __init__(self, proxy: ModelProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy, self.reader, self.writer = proxy, reader, writer
        self.program = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def serve(self) -> None:
        """Answers requests until the program ends the connection."""
        while True:
            try:
                event = await self._received()
            except h11.RemoteProtocolError as error:
                await self._refuse(error.error_status_hint, f"the request is malformed: {error}")
                return
            if not isinstance(event, h11.Request):
                return
            headers = [(name.lower(), value) for name, value in event.headers]
            if reason := refusal(event.target, event.method, headers, self.proxy.allowed):
                await self._refuse(403, f"the sandbox forwards requests of the episode's model only: {reason}")
                return
            await self._forward(event, headers)
            if self.program.our_state is not h11.DONE or self.program.their_state is not h11.DONE:
                return
            self.program.start_next_cycle()

    async def _forward(self, request: h11.Request, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends one request on, and its answer back. A hang-up of the program closes the server's connection."""
        proxy = self.proxy
        try:
            connecting = asyncio.open_connection(proxy.host, proxy.port, ssl=proxy.tls, limit=CHUNK_BYTES)
            reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        except (OSError, TimeoutError) as error:
            await self._refuse(502, f"the model's server {proxy.name} does not answer: {error or 'time-out'}")
            return
        server = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        head = h11.Request(method=request.method, target=request.target, headers=forwarded(headers, proxy.name))
        writer.write(server.send(head) or b"")
        sending = asyncio.create_task(self._send_body(server, writer))
        answering = asyncio.create_task(self._send_answer(server, reader))
        try:
            await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.close()
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _send_body(self, server: h11.Connection, writer: asyncio.StreamWriter) -> None:
        """Sends the request's body on. Returns when the program hangs up."""
        if self.program.they_are_waiting_for_100_continue:
            await self._write(h11.InformationalResponse(status_code=100, headers=[]))
        event: h11.Event | None = None
        try:
            while not isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                event = await self._received()
                if isinstance(event, h11.Data):
                    writer.write(server.send(h11.Data(data=event.data)) or b"")
                elif isinstance(event, h11.EndOfMessage):
                    writer.write(server.send(h11.EndOfMessage()) or b"")
                await writer.drain()
        except (OSError, h11.LocalProtocolError):  # A server may answer, and close, before it has read the body.
            await self._discard()
            return
        waiting = 0
        while waiting < MAX_HEAD_BYTES and (content := await self.reader.read(CHUNK_BYTES)):
            self.program.receive_data(content)  # The next request, before this one's answer.
            waiting += len(content)

    async def _send_answer(self, server: h11.Connection, reader: asyncio.StreamReader) -> None:
        """Sends the server's answer back as it arrives."""
        try:
            while True:
                event = server.next_event()
                if event is h11.NEED_DATA:
                    server.receive_data(await reader.read(CHUNK_BYTES))
                elif isinstance(event, h11.Response):
                    headers = [(name, value) for name, value in event.headers if name.lower() not in OWN_HEADERS]
                    answer = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
                    await self._write(answer)
                elif isinstance(event, h11.Data):
                    await self._write(h11.Data(data=event.data))
                elif isinstance(event, h11.EndOfMessage):
                    await self._write(h11.EndOfMessage())
                    return
        except (OSError, h11.RemoteProtocolError) as error:
            await self._refuse(502, f"the model's server {self.proxy.name} broke off: {error}")

    async def _received(self) -> h11.Event:
        """The next event of the program. Raises `h11.RemoteProtocolError`."""
        await asyncio.sleep(0)  # A body of small chunks is many events: the watch of all sandboxes runs between them.
        while (event := self.program.next_event()) is h11.NEED_DATA:
            self.program.receive_data(await self.reader.read(CHUNK_BYTES))
        assert not isinstance(event, type)  # Requests are read one by one, so it is never PAUSED.
        return event

    async def _write(self, event: h11.Event) -> None:
        self.writer.write(self.program.send(event) or b"")
        await self.writer.drain()

    async def _refuse(self, status: int, reason: str) -> None:
        """Answers with an error in the form of OpenAI's API. After the head of an answer it breaks off instead."""
        if self.program.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.writer.transport.abort()
            return
        body = json.dumps({"error": {"message": reason, "type": "sandbox", "code": "not_forwarded"}}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        await self._write(h11.Response(status_code=status, headers=headers))
        await self._write(h11.Data(data=body))
        await self._write(h11.EndOfMessage())
        self.writer.write_eof()
        with suppress(TimeoutError):  # A close with unread input would reset the connection before the answer is read.
            await asyncio.wait_for(self._discard(), DISCARD_SECONDS)

    async def _discard(self) -> None:
        while await self.reader.read(CHUNK_BYTES):
            pass


def forwarded(headers: Sequence[tuple[bytes, bytes]], host: str) -> list[tuple[bytes, bytes]]:
    """The headers of a request to the server. Those of the program's connection are left out."""
    named = [word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")]
    kept = [(name, value) for name, value in headers if name not in OWN_HEADERS.union(named)]
    if any(name == b"transfer-encoding" for name, _ in headers):
        kept = [(name, value) for name, value in kept if name != b"content-length"]
        kept.append((b"transfer-encoding", b"chunked"))
    return [(b"host", host.encode()), *kept, (b"connection", b"close")]
