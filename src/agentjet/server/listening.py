"""How the application is served: its port, its connections, and a garbage collector that does not stop every call."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentjet.config import ServerConfig
from agentjet.server.limits import Limits

log = logging.getLogger(__name__)

GRACE_SECONDS = 5
"""How long open connections may take to end at the stop, once the engine has stopped."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection, so that it is they who close it: not while they send a request on it."""


def listen(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """A bound port whose connections send at once. Raises `OSError`.

    An answer is written in pieces, and without TCP_NODELAY the second waits until the client's system acknowledges the
    first: up to 40 ms. asyncio sets it only for sockets that name their protocol, as those of `create_server` do not;
    connections take it over from the listener.
    """
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class Connection(HttpToolsProtocol):
    """A connection within its `Limits`: so many at the same time, headers of such a size and in such a time, a body in
    such a time and with not more framing than content, and an end soon after an answer that did not wait for the body.

    Requests can close it at once, even when its client does not read what was written: `hang_up` in their state. The
    stop of the server does so with all of that kind.
    """

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head = True
        self._num_bytes = 0
        """Of the headers, or of the body with its framing, so far."""
        self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        """For the rest of the headers, or of the body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "hang_up": transport.abort}
        if len(self.connections) > self._limits.connections:
            log.warning("a connection was refused: %d are open", len(self.connections) - 1)
            transport.abort()
            return
        self._must_end_within(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._must_end_within(None)
        super().connection_lost(exc)

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
            framing = self._num_bytes - self._body_bytes
            if framing > min(self._body_bytes, self._limits.body_bytes) + self._limits.header_bytes:
                self.transport.abort()

    def on_message_begin(self) -> None:
        if self._deadline is None:  # The first request has the time since its connection.
            self._must_end_within(self._limits.header_seconds)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # What stands behind a body is of no use to anybody here.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes, self._body_bytes = False, 0, 0
        self._must_end_within(self._limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        self._must_end_within(None)
        super().on_message_complete()
        if self.cycle.response_complete and not self.pipeline:  # Answered early, and idle only now.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._must_end_within(self._limits.linger_seconds)

    def shutdown(self) -> None:
        super().shutdown()
        if self.flow.write_paused:
            self.transport.abort()

    def _must_end_within(self, seconds: float | None) -> None:
        """Close the connection after so many seconds, unless this is called again before; None: not at all."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    def _refuse_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # An earlier request is being answered.
            self.transport.abort()
            return
        message = f"The request line and the headers are larger than {self._limits.header_bytes} bytes."
        head = (
            "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(message)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + message).encode())
        self.transport.close()


def options(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    """Of a server of the gateway's application. Sockets are the caller's."""
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=app.state.wiring.limits),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,  # Request lines may carry keys.
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=server.tls_cert or None,
        ssl_keyfile=server.tls_key or None,
    )


def calm_collector() -> None:
    """Look for cycles among what is young, and seldom among what has grown old: call it once everything is loaded.

    A full collection walks every tree of every open episode, half a second with a thousand of them, and finds a few
    exceptions: what is finished goes by its reference count.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
