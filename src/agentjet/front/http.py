"""HTTP below the routes: the limits, the TLS certificate, the socket, the connections and uvicorn's settings.

Two limits are settings. The others are constants far above what clients need; `docs/operations.md` has the table.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import ssl
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentjet.config import ServerConfig
from agentjet.errors import ConfigError

log = logging.getLogger(__name__)

RESERVED_FILES = 128
"""Open files and pipes that the server needs besides its connections."""
MIN_BODY_RATE = 64 * 2**10
"""Minimum rate of a body in bytes per second, after the first `header_seconds`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    body_bytes: int
    connections: int
    header_bytes: int = 64 * 2**10
    """Request line and headers."""
    small_body_bytes: int = 4096
    """A body on a route that needs no token."""
    values: int = 300_000
    """Values in a body, including those inside arrays and objects."""
    containers: int = 50_000
    """Arrays and objects in a body."""
    keys: int = 10_000
    """Keys of one object."""
    depth: int = 200
    """Nesting of arrays and objects."""
    header_seconds: float = 30.0
    """From the connection, or from the first byte of a request, to the end of the headers."""
    linger_seconds: float = 10.0
    """For the rest of a body after an early response; then the connection is closed."""
    stall_seconds: float = 300.0
    """For a client that reads nothing of its response; then the connection is closed."""

    @classmethod
    def of(cls, server: ServerConfig) -> Limits:
        """Returns the limits of a server. The limit on open files of the process can lower `connections`."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = server.max_connections if files == resource.RLIM_INFINITY else files - RESERVED_FILES
        return cls(body_bytes=server.max_body_mb * 2**20, connections=max(16, min(server.max_connections, most)))

    @property
    def body_seconds(self) -> float:
        """For a whole body, from the end of the headers."""
        return self.header_seconds + self.body_bytes / MIN_BODY_RATE


def check_certificate(server: ServerConfig) -> None:
    """Raises `ConfigError` if the certificate or its key is unreadable, or if they do not belong together."""
    if not server.tls_cert:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The empty password stops OpenSSL from asking for a passphrase on the terminal.
        context.load_cert_chain(server.tls_cert, server.tls_key, password=lambda: b"")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"server.tls_cert = {server.tls_cert!r} and server.tls_key = {server.tls_key!r} cannot be used together "
            f"({why}): use a certificate chain and its key without a passphrase, both PEM"
        ) from None


GRACE_SECONDS = 5
"""Seconds that open connections have to end after the engine has stopped."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections: the client closes first, so no request meets a closing connection."""


def listen(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """Returns a bound socket with TCP_NODELAY. Raises `OSError`.

    Responses are written in pieces. Without TCP_NODELAY, the second piece waits up to 40 ms for the acknowledgement of
    the first. asyncio sets the option only on sockets with an explicit protocol number, which those of `create_server`
    do not have; connections inherit it from the listener.
    """
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class LimitedConnection(HttpToolsProtocol):
    """A connection that enforces `Limits`:

    * the number of open connections;
    * the size of the headers and the time they take;
    * the time of the body, and its framing, which must not be larger than its content;
    * the time of the rest of a body after an early response, and of a response that its client does not read.
    """

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head = True
        self._num_bytes = 0
        """Received bytes of the present headers, or of the framing of the present body."""
        self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            log.warning("connection refused: %d are open (server.max_connections)", len(self.connections) - 1)
            transport.abort()
            return
        self._must_end_within(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._must_end_within(None)

    def data_received(self, data: bytes) -> None:
        while data and self._in_head and not self.transport.is_closing():
            room = self._limits.header_bytes - self._num_bytes
            if not room:
                self._refuse_headers()
                return
            head, data = data[:room], data[room:]
            self._num_bytes += len(head)
            super().data_received(head)
        if data and not self.transport.is_closing():
            self._num_bytes += len(data)
            super().data_received(data)
            if self._num_bytes > self._body_bytes + self._limits.header_bytes:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._must_end_within(self._limits.header_seconds)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Trailers after a body are ignored.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes, self._body_bytes = False, 0, 0
        self._must_end_within(self._limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes -= len(body)
        self._body_bytes = min(self._body_bytes + len(body), self._limits.body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        if not self.cycle.response_complete:  # After an early response, the connection is closed.
            self._must_end_within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._must_end_within(self._limits.linger_seconds)

    def pause_writing(self) -> None:
        self._must_end_within(self._limits.stall_seconds)
        super().pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._must_end_within(None)

    def shutdown(self) -> None:
        super().shutdown()
        if self.flow.write_paused:
            self.transport.abort()

    def _must_end_within(self, seconds: float | None) -> None:
        """Closes the connection after `seconds` unless called again before. None: cancels the deadline.

        While the client does not read, further requests do not change its deadline.
        """
        if self.flow.write_paused:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _refuse_headers(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # Else an earlier request is being answered.
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()


def uvicorn_config(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    """Returns uvicorn's settings for `app`. The caller provides the sockets."""
    return uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits=app.state.default.limits),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,  # Request lines can contain keys.
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=server.tls_cert or None,
        ssl_keyfile=server.tls_key or None,
    )


SWITCH_SECONDS = 0.001
"""Time for which a thread that computes may keep Python's lock from the event loop; Python's default is 0.005."""


def tune_python() -> None:
    """Makes full garbage collections rare, and changes between threads frequent. Call it when everything is loaded.

    A full collection visits the trees of all live episodes: half a second for a thousand episodes. It frees little,
    because finished objects are freed by reference counting.

    The loop gives Python's lock up at each read of a socket or the journal, and then waits for a thread that computes.
    Ten reads within a request would take 50 ms.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
