"""HTTP below the routes: the `Host` check, the paths of runs, the TLS certificate, the socket, the connections and
uvicorn's settings.

`RunMiddleware` prevents DNS rebinding: a web page can resolve its own host name to 127.0.0.1 and send requests to this
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
import sys
from functools import partial
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
from agentjet.gateway.concurrency import Turns
from agentjet.server.error_handlers import error_response
from agentjet.server.limits import Limits
from agentjet.server.runs import RUN, RUN_PATH, Entrance, route_path
from agentjet.types import RUN_NAME


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


REQUESTS_A_ROUND = 8
"""Requests that begin in one round of the event loop. A request usually takes 0.5 ms until it waits for something."""


class RunMiddleware:
    """Middleware that checks `Host`, and finds the run of a path below `/runs/NAME`, or refuses the request.

    Loopback names and those in `allowed` are allowed; None allows every name. `/runs/NAME` becomes the root path, so
    routes match the rest and `request.base_url` is that of the run. Requests that arrive together take turns.
    """

    def __init__(self, app: ASGIApp, runs: Entrance, allowed: frozenset[str] | None) -> None:
        self._app = app
        self._runs = runs
        self._allowed = allowed
        self._turns = Turns(REQUESTS_A_ROUND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._turns.turn()
            try:
                self._check_host(Headers(scope=scope).getlist("host"))
                if named := RUN_PATH.match(scope["path"]):
                    scope = self._enter({**scope, "root_path": named[0]}, named[1])
            except RequestError as error:
                await error_response(route_path(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, given: list[str]) -> None:
        host = _host(given[0]) if len(given) == 1 else ""
        any_host = self._allowed is None and (host or not given)  # HTTP/1.0 requests can have no Host.
        if not (any_host or is_loopback(host) or host in (self._allowed or ())):
            raise InvalidRequest(
                f"The host {', '.join(given)[:200]!r} is not allowed: to allow it, add it to server.allowed_hosts.",
                code="host_not_allowed",
            )

    def _enter(self, scope: Scope, name: str) -> Scope:
        """A name with percent signs, or one that no run can have, is looked up as a path, which no run has."""
        root = scope["root_path"]
        if not (RUN_NAME.fullmatch(name) and (scope["raw_path"] + b"/").startswith(f"{root}/".encode())):
            name = root
        # Agents check their base URL with HEAD and without a key. No answer to it depends on the run.
        if scope["method"] != "HEAD":
            scope[RUN] = self._runs.enter(name, HTTPConnection(scope))
            observability.run.set(name)
        return scope


def _host(given: str) -> str:
    """Returns a host in lower case without port and brackets, or "" if it is malformed."""
    found = HOST.fullmatch(given.strip().lower())
    return found[1].strip("[]") if found else ""


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
