"""Bodies of the routes that open a session of the page."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentjet.protocol.base import Request, Response

Role = Literal["viewer", "client", "admin"]
"""Rights of a token or of a session. Each role has those of the roles before it."""


class SessionRequest(Request):
    """`POST /swarm/v1/sessions`."""

    role: Role = "viewer"
    """Role of the session: at most that of the token of the request."""


class SessionCode(Response):
    """A one-time code that opens a session."""

    code: str
    expires_in: float
    """Seconds until the code ends."""


class ExchangeRequest(Request):
    """`POST /swarm/v1/sessions/exchange`."""

    code: Annotated[str, Field(max_length=256)]


class SessionView(Response):
    """A session of the page."""

    key: str
    """Sent as the bearer token."""
    role: Role
    run: str
    expires: float
    """Unix seconds."""
    live: bool = True
    """False for the stored runs of `agentjet look`."""
