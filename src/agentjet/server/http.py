"""HTTP below the routes: the `Host` check, the paths of runs, the TLS certificate, the socket, the connections and
uvicorn's settings.

`HostCheck` prevents DNS rebinding: a web page can resolve its own host name to 127.0.0.1 and send requests to this
server, but the browser then sends that name in `Host`. Starlette's `TrustedHostMiddleware` is not used: it answers
in plain text and accepts a repeated `Host`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentjet.config import ServerConfig
from agentjet.config.schema import is_loopback
from agentjet.errors import ConfigError, InvalidRequest, RequestError
from agentjet.gateway import observability
from agentjet.server import error_handlers
from agentjet.server.limits import Limits
from agentjet.server.runs import RUN, AppDeps, ServedRuns, key_of, route_path, run_in_path


def allowed_hosts(server: ServerConfig) -> frozenset[str] | None:
    """Returns the allowed host names besides those of loopback, in lower case, without ports.

    None allows every name: the server has a non-loopback address and `server.allowed_hosts` is empty.
    """
    named = frozenset(_host(name) for name in server.allowed_hosts.split(",") if name.strip())
    if not is_loopback(server.host) and not named:
        return None
    return named | {server.host.lower()}


HOST = re.compile(r"([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?", re.ASCII)
"""Syntax of `Host` in lower case: a name or an address, with or without a port."""


class HostCheck:
    """Middleware that refuses requests whose `Host` is not allowed, malformed or repeated.

    Loopback names and those in `allowed` are allowed; None allows every name.
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
            f"The host {', '.join(given)[:200]!r} is not allowed: to allow it, add it to server.allowed_hosts.",
            code="host_not_allowed",
        )
        await error_handlers.error_response(route_path(scope), error)(scope, receive, send)

    def _is_allowed(self, given: list[str]) -> bool:
        host = _host(given[0]) if len(given) == 1 else ""
        if self._allowed is None:  # HTTP/1.0 requests can have no Host.
            return bool(host) or not given
        return is_loopback(host) or host in self._allowed


def _host(given: str) -> str:
    """Returns a host in lower case without port and brackets, or "" if it is malformed."""
    found = HOST.fullmatch(given.strip().lower())
    return found[1].strip("[]") if found else ""


class RunPaths:
    """Middleware that finds the run of a path below `/runs/NAME`, if the caller may enter it, or refuses the request.

    `NAME` becomes part of the root path, so routes match the rest and `request.base_url` is that of the run.
    """

    def __init__(self, app: ASGIApp, runs: ServedRuns) -> None:
        self._app = app
        self._runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = run_in_path(scope) if scope["type"] == "http" else None
        if named is None:
            await self._app(scope, receive, send)
            return
        root, name = named
        scope = {**scope, "root_path": root}
        try:
            # Agents check their base URL with HEAD and without a key. No answer to it depends on the run.
            if scope["method"] != "HEAD":
                scope[RUN] = self._entered(name, HTTPConnection(scope))
                observability.run.set(name)
        except RequestError as error:
            await error_handlers.error_response(route_path(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _entered(self, name: str, connection: HTTPConnection) -> AppDeps:
        """Raises `Unauthorized`, `Forbidden` or `NotFound`."""
        key, keys = key_of(connection), self._runs.default.keys
        if (entered := self._runs.enter(name, key)) is not None:
            return entered
        if error_handlers.INFERENCE_PATH.match(route_path(connection.scope)):
            keys.episode(key, 0.0)
        keys.control(key)
        raise AssertionError("no run has this token")


def check_certificate(server: ServerConfig) -> None:
    """Raises `ConfigError` if the certificate or its key is unreadable, or if they do not belong together."""
    for name, path in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        try:
            if path:
                Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"server.{name} = {path!r} cannot be read: {error.strerror}") from None
    if server.tls_cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The empty password stops OpenSSL from asking for a passphrase on the terminal.
            context.load_cert_chain(server.tls_cert, server.tls_key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise ConfigError(
                f"server.tls_cert = {server.tls_cert!r} and server.tls_key = {server.tls_key!r} cannot be used "
                f"together ({why}): use a certificate chain and its key without a passphrase, both PEM"
            ) from None


log = logging.getLogger(__name__)

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
    * the time of the rest of a body after an early response.

    A request can close its connection at once with `hang_up` in its state, even if the client does not read. When the
    server stops, connections whose client does not read are closed the same way.
    """

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head = True
        self._num_bytes = 0
        """Received bytes of the present headers, or of the present body with its framing."""
        self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        """Closes the connection if the headers or the body are not complete in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "hang_up": transport.abort}
        if len(self.connections) > self._limits.connections:
            log.warning("connection refused: %d are open (server.max_connections)", len(self.connections) - 1)
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
        if self._deadline is None:  # For the first request, the time runs since the connection.
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
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        self._must_end_within(None)
        super().on_message_complete()
        if self.cycle.response_complete and not self.pipeline:  # Answered early; idle from now on.
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
        """Closes the connection after `seconds` unless called again before. None: cancels the deadline."""
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
    """Returns uvicorn's settings for `app`. The caller provides the sockets."""
    return uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits=app.state.deps.limits),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,  # Request lines can contain keys.
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=server.tls_cert or None,
        ssl_keyfile=server.tls_key or None,
    )


def tune_gc() -> None:
    """Makes full garbage collections rare. Call it when everything is loaded.

    A full collection visits the trees of all live episodes: half a second for a thousand episodes. It frees little,
    because finished objects are freed by reference counting.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
