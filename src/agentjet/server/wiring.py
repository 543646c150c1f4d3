"""What every route has at hand: the gateway, the keys, and who is asking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from agentjet.gateway import Gateway, log_context
from agentjet.server.auth import Keys
from agentjet.server.lease import Lease
from agentjet.server.runs import Runs


@dataclass(frozen=True, slots=True)
class Wiring:
    """Put on the app by `create_app`."""

    runs: Runs
    keys: Keys
    lease: Lease

    @property
    def gateway(self) -> Gateway:
        return self.runs.gateway


async def _wiring(request: Request) -> Wiring:
    wiring = request.app.state.wiring
    assert isinstance(wiring, Wiring)
    return wiring


async def _bearer(
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
) -> str:
    return credentials.credentials if credentials is not None else ""


Wired = Annotated[Wiring, Depends(_wiring)]
Token = Annotated[str, Depends(_bearer)]
"""The bearer token or key of the request; empty when there is none."""
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
LeaseEpoch = Annotated[int | None, Header(alias="AgentJet-Lease", ge=0, le=2**53)]
"""The epoch of the lease that the caller believes to have."""


# Coroutines, because FastAPI runs plain functions in a thread, where what they say to the log's context is lost.


async def require_viewer(wired: Wired, token: Token) -> None:
    """Any token of the server."""
    wired.keys.control(token)


async def require_client(wired: Wired, token: Token) -> None:
    """A token of the server, client's or admin's."""
    wired.keys.client(token)


async def require_admin(wired: Wired, token: Token) -> None:
    """The admin token."""
    wired.keys.admin(token)


async def require_episode(episode_id: str, wired: Wired, token: Token) -> None:
    """A client's or admin's token, or the key of this very episode."""
    wired.keys.client(token, episode_id=episode_id)
    log_context.episode_id.set(episode_id)


async def require_episode_reader(episode_id: str, wired: Wired, token: Token) -> None:
    """Any token of the server, or the key of this very episode."""
    wired.keys.control(token, episode_id=episode_id)
    log_context.episode_id.set(episode_id)


async def require_lease(wired: Wired, epoch: LeaseEpoch = None) -> None:
    """The present lease's epoch, while there is one. What a lease that ran out left being served is left."""
    wired.lease.check(epoch)
    if not wired.lease.seconds_left:
        await wired.runs.enter("", None)
