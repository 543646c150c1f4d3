"""Which names this server answers to: the guard against DNS rebinding.

A page in a browser may point a name of its own at 127.0.0.1 and then talk to what listens there, but the browser sends
that name in `Host`. It is checked before anything else is. Starlette's `TrustedHostMiddleware` does the same, but
answers in plain text.
"""

from __future__ import annotations

import re
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from agentjet.config import ServerConfig
from agentjet.errors import InvalidRequest
from agentjet.server import problems


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
        await problems.answer(scope["path"], error)(scope, receive, send)

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
