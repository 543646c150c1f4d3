"""The routes that open a session of the page: a token gives a one-time code, and the code gives a session key.

The browser thus never receives a token, and the URL contains nothing that is valid for more than a minute.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request

import agentjet.protocol as bodies
from agentjet.errors import Forbidden
from agentjet.server.auth import CODE_SECONDS, LEVELS, SESSION_PREFIX, Bearer
from agentjet.server.deps import BEARER, SMALL_BODY, VIEWER, Deps, GuardedRoute
from agentjet.server.error_handlers import PROBLEMS
from agentjet.server.runs import bearer_of

router = APIRouter(prefix=bodies.PREFIX, tags=["page"], route_class=GuardedRoute, responses=PROBLEMS)


@router.post("/sessions", dependencies=[Depends(BEARER), *VIEWER])
async def create_session_code(
    deps: Deps, request: Request, body: bodies.SessionRequest | None = None
) -> bodies.SessionCode:
    """Create a one-time code for a session of the page. Needs a token; a session cannot prolong itself."""
    token, wanted = bearer_of(request), (body or bodies.SessionRequest()).role
    if token.startswith(SESSION_PREFIX):
        raise Forbidden("A session cannot open another one: run `agentjet open`.", code="token_needed")
    held: Bearer | None = deps.keys.bearer(token)
    if held is None or LEVELS.index(held) < LEVELS.index(wanted):
        raise Forbidden(
            f"role = {wanted!r} needs a token of that role or above: this one is the {held} token.",
            code=f"{wanted}_token_needed",
        )
    return bodies.SessionCode(code=deps.runs.codes.create(deps.gateway.run, wanted), expires_in=CODE_SECONDS)


@router.post("/sessions/exchange", dependencies=SMALL_BODY)
async def exchange_session_code(deps: Deps, body: bodies.ExchangeRequest) -> bodies.SessionView:
    """Exchange a one-time code for the key of a session. Needs no token; the code names the run."""
    run, role, key, expires = deps.runs.exchange(body.code)
    return bodies.SessionView(key=key, role=role, run=run, expires=expires)
