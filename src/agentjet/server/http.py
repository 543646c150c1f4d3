"""Which names this server answers to: the guard against DNS rebinding.

A page in a browser may point a name of its own at 127.0.0.1 and then talk to what listens there, but the browser sends
that name in `Host`. It is checked before anything else is. Starlette's `TrustedHostMiddleware` does the same, but
answers in plain text.

The certificate a server shows, checked before anything slow happens.

How the application is served: its port, its connections, and a garbage collector that does not stop every call.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import ssl
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentjet.config import ServerConfig
from agentjet.errors import ConfigError, InvalidRequest
from agentjet.server import error_handlers
from agentjet.server.limits import Limits


def allowed_hosts(server: ServerConfig) -> frozenset[str] | None:
    """The names besides loopback's own, without ports, in lower case; None: any, on a server whose address is no
    loopback one and that was given no names.
    """
    named = frozenset(_host(name) for name in server.allowed_hosts.split(",") if name.strip())
    if not _is_loopback(server.host) and not named:
        return None
    return named | {server.host.lower()}


HOST = re.compile(r"([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?", re.ASCII)
"""A name or an address, with or without a port, in lower case: the only forms that `Host` may have."""


class HostCheck:
    """Refuses requests whose `Host` is neither loopback's nor one of `allowed` (None: allows any), is malformed, or is
    given twice.
    """

    def __init__(self, app: ASGIApp, allowed: frozenset[str] | None) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).getlist("host") if scope["type"] == "http" else []
        if scope["type"] != "http" or self._is_allowed(given):
            await self._app(scope, receive, send)
            return
        error = InvalidRequest(
            f"This server does not answer to the host {', '.join(given)[:200]!r}. If it is meant to, name it in "
            "server.allowed_hosts.",
            code="host_not_allowed",
        )
        await error_handlers.answer(scope["path"], error)(scope, receive, send)

    def _is_allowed(self, given: list[str]) -> bool:
        host = _host(given[0]) if len(given) == 1 else ""
        if self._allowed is None:  # HTTP/1.0 has requests without a host.
            return bool(host) or not given
        return _is_loopback(host) or host in self._allowed


def _host(given: str) -> str:
    """A `Host` header, or a name in the settings, without its port and brackets; empty when it is neither."""
    found = HOST.fullmatch(given.strip().lower())
    return found[1].strip("[]") if found else ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_certificate(server: ServerConfig) -> None:
    """Raises `ConfigError` when the certificate or its key is not there, unreadable, or one is not the other's."""
    for name, path in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"server.{name} = {path!r} cannot be read: {error.strerror}") from None
    if server.tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a passphrase would make OpenSSL ask for it on the terminal.
            context.load_cert_chain(server.tls_cert, server.tls_key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise ConfigError(
                f"server.tls_cert = {server.tls_cert!r} and server.tls_key = {server.tls_key!r} cannot be used "
                f"together ({why}): give a certificate chain and its own key without a passphrase, both PEM"
            ) from None


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


def uvicorn_config(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    """Of a server of the gateway's application. Sockets are the caller's."""
    return uvicorn.Config(
        app,
        http=partial(Connection, limits=app.state.deps.limits),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,  # Request lines may carry keys.
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=server.tls_cert or None,
        ssl_keyfile=server.tls_key or None,
    )


def tune_gc() -> None:
    """Look for cycles among what is young, and seldom among what has grown old: call it once everything is loaded.

    A full collection walks every tree of every open episode, half a second with a thousand of them, and finds a few
    exceptions: what is finished goes by its reference count.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
