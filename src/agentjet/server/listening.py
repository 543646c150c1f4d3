"""How the application is served: its port, uvicorn's options, and a garbage collector that does not stop every call."""

from __future__ import annotations

import asyncio
import gc
import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentjet.config import ServerConfig

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
    """A connection that requests can close at once, even when its client does not read what was written: `hang_up` in
    their state. The stop of the server does so with all of that kind.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "hang_up": transport.abort}

    def shutdown(self) -> None:
        super().shutdown()
        if self.flow.write_paused:
            self.transport.abort()


def options(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    """Of a server of the gateway's application. Sockets are the caller's."""
    return uvicorn.Config(
        app,
        http=Connection,
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
