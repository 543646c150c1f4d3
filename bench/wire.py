"""A lean HTTP/1.1 client: one keep-alive connection, one request at a time, answers as bytes.

A general client (httpx) costs about as much per request as the gateway, and would dominate the measurement. This
client reads only the two forms that the servers of the benches send: a body with its length, or a chunked one.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

TIMEOUT = 600.0
LAST_CHUNK = b"0\r\n\r\n"
# A connection that was idle for longer is not used again, as in SDKs: uvicorn closes it after 5 seconds, and a request
# that crosses the closing is lost.
IDLE_SECONDS = 4.0


def ask(method: str, url: str, key: str = "", body: object = None) -> Any:
    """An answer as JSON, also a refusal. For requests outside of a measurement."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, url, headers=headers, json=body, timeout=TIMEOUT, trust_env=False).json()


class BrokenConnection(Exception):
    """The server closed the connection under a request."""


class WrongAnswer(ValueError):
    """An answer with another content, or another status than 200."""


@dataclass(frozen=True, slots=True)
class Reply:
    """`sent` and `done` are `time.perf_counter()` before the request's first byte and after the reply's last."""

    status: int
    body: bytes
    sent: float
    done: float

    def json(self) -> Any:
        """Raises `WrongAnswer`."""
        if self.status != 200:
            raise WrongAnswer(f"{self.status} {self.body[:300]!r}")
        return json.loads(self.body)

    def text(self) -> str:
        """The content of a chat completion, plain or streamed to its end. Raises `WrongAnswer`."""
        if self.status == 200 and not self.body.startswith(b"data: "):
            return str(self.json()["choices"][0]["message"]["content"])
        events = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        if self.status != 200 or events[-1].strip() != b"[DONE]":
            raise WrongAnswer(f"{self.status}, or a stream without its end: {self.body[-200:]!r}")
        choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
        return "".join(str(choice["delta"].get("content") or "") for choice in choices)


class Connection(asyncio.Protocol):
    """To one server. Reconnects after a while without requests."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, f"{url} names no host and port"
        self._address = (parts.hostname, parts.port)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiting: asyncio.Future[float] | None = None
        self._head_end = -1
        self._idle_since = 0.0

    async def request(self, method: str, path: str, token: str, body: object = None) -> Reply:
        """Raises `BrokenConnection`, or `OSError` if the server cannot be reached."""
        loop, content = asyncio.get_running_loop(), b"" if body is None else json.dumps(body).encode()
        if time.perf_counter() - self._idle_since > IDLE_SECONDS:
            self.close()
        if self._transport is None:
            await loop.create_connection(lambda: self, *self._address)
        assert self._transport is not None
        self._received.clear()
        self._head_end, self._waiting = -1, loop.create_future()
        host, port = self._address
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        sent = time.perf_counter()
        self._transport.write(head.encode() + content)
        done = self._idle_since = await self._waiting
        raw = bytes(self._received)
        answer = raw[self._head_end + 4 :]
        is_chunked = _content_length(raw[: self._head_end]) is None
        return Reply(int(raw[9:12]), dechunked(answer) if is_chunked else answer, sent, done)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._waiting is not None and not self._waiting.done() and self._is_whole():
            self._waiting.set_result(time.perf_counter())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(BrokenConnection(str(exc or "closed by the server")))

    def _is_whole(self) -> bool:
        if self._head_end < 0:
            self._head_end = self._received.find(b"\r\n\r\n")
            if self._head_end < 0:
                return False
        length = _content_length(bytes(self._received[: self._head_end]))
        if length is None:
            return self._received.endswith(LAST_CHUNK)
        return len(self._received) >= self._head_end + 4 + length


def dechunked(raw: bytes) -> bytes:
    """The content of a chunked body."""
    content, at = bytearray(), 0
    while True:
        line_end = raw.index(b"\r\n", at)
        size = int(raw[at:line_end], 16)
        if size == 0:
            return bytes(content)
        content += raw[line_end + 2 : line_end + 2 + size]
        at = line_end + 2 + size + 2


def _content_length(head: bytes) -> int | None:
    """None for a chunked body."""
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    return None if at < 0 else int(lower[at + 17 :].split(b"\r\n", 1)[0])
