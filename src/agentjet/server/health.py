"""The routes of the health of a run, and of the groups that training waits for."""

from __future__ import annotations

from fastapi import APIRouter, Depends

import agentjet.protocol as bodies
from agentjet.server.deps import BEARER, SHARED_VIEWER, Deps, GuardedRoute
from agentjet.server.error_handlers import PROBLEMS

router = APIRouter(
    prefix=bodies.PREFIX, tags=["records"], route_class=GuardedRoute, dependencies=[Depends(BEARER)], responses=PROBLEMS
)


@router.get("/health", dependencies=SHARED_VIEWER)
async def get_health(deps: Deps) -> bodies.HealthView:
    """Return the trend of the training reward with an interval, and the health rules with their results."""
    return await deps.gateway.overview.health()


@router.get("/waiting", dependencies=SHARED_VIEWER)
async def get_waiting(deps: Deps) -> bodies.WaitingView:
    """Return the groups that fill the present batch, with the state of each episode."""
    return await deps.gateway.overview.waiting()
