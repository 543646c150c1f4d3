"""The client's settings: the only place in the client that reads the environment.

`AGENTJET_URL` and `AGENTJET_TOKEN` stand in for arguments that were not given.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from agentjet.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8400"
URL_VARIABLE = "AGENTJET_URL"
TOKEN_VARIABLE = "AGENTJET_TOKEN"
PROCESS = uuid.uuid4().hex
"""This process, as the clients in it name it to servers. Processes forked from it are the same."""
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the server is and how the client introduces itself."""

    url: str
    token: str
    client_id: str
    lease: int | None = None
    """Epoch of the lease that its requests show."""
    instance_id: str = ""
    """The process, for a client that has a name of its own: see `PROCESS`."""

    @property
    def is_loopback(self) -> bool:
        """Whether the server is on this machine: then no proxy of the environment is asked."""
        return urlsplit(self.url).hostname in LOOPBACK


def load_settings(
    url: str | None = None,
    token: str | None = None,
    client_id: str | None = None,
    lease: int | None = None,
    instance_id: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClientSettings:
    """Arguments first, then the environment, then the default address.

    Raises `ConfigError` when the address is not an http(s) URL, or no header can carry the token.
    """
    address = url or environ.get(URL_VARIABLE) or DEFAULT_URL
    if not _is_address(address):
        raise ConfigError(f"{address!r} is not a server's address: expected something like {DEFAULT_URL}")
    return ClientSettings(
        url=address.rstrip("/"),
        token=_checked_token(token if token is not None else environ.get(TOKEN_VARIABLE, "")),
        client_id=client_id or f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:6]}",
        lease=lease,
        instance_id=(PROCESS if client_id else "") if instance_id is None else instance_id,
    )


def _is_address(address: object) -> bool:
    """Whether requests can be sent there: an http(s) URL with a host and, if any, a port that there is."""
    if not isinstance(address, str):
        return False
    try:
        httpx.URL(address)
        parts = urlsplit(address)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False


def _checked_token(token: str) -> str:
    """Without the white space around it, such as the newline of the file it was read from. Never part of a message."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"the token (an argument, or {TOKEN_VARIABLE}) has a character that no header can carry, such as a line "
            "break or a letter with an accent: give what is in the file 'token' of the server's data dir"
        )
    return token


def inherited_environment() -> dict[str, str]:
    """What a program that the client starts inherits."""
    return dict(os.environ)
