"""What every route has at hand: the gateway, the keys, and who is asking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from agentjet.gateway import Gateway
from agentjet.server.auth import Keys


@dataclass(frozen=True, slots=True)
class Wiring:
    """Put on the app by `create_app`."""

    gateway: Gateway
    keys: Keys


def _wiring(request: Request) -> Wiring:
    wiring = request.app.state.wiring
    assert isinstance(wiring, Wiring)
    return wiring


def _bearer(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
) -> str:
    return credentials.credentials if credentials is not None else ""


Wired = Annotated[Wiring, Depends(_wiring)]
Token = Annotated[str, Depends(_bearer)]
"""The bearer token or key of the request; empty when there is none."""
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]


def require_client(wired: Wired, token: Token) -> None:
    """A token of the server, client's or admin's."""
    wired.keys.control(token)


def require_admin(wired: Wired, token: Token) -> None:
    """The admin token."""
    wired.keys.admin(token)


def require_episode(episode_id: str, wired: Wired, token: Token) -> None:
    """A token of the server, or the key of this very episode."""
    wired.keys.control(token, episode_id=episode_id)
