"""For whoever runs the server: is it alive, may it be sent work, and its numbers. `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from agentjet.protocol import Problem
from agentjet.server import metrics
from agentjet.server.guards import BEARER, VIEWER, GuardedRoute
from agentjet.server.wiring import Wired
from agentjet.types import EngineState

READY: tuple[EngineState, ...] = ("rolling", "learning")

_PROBLEM: dict[str, Any] = {"model": Problem, "content": {"application/problem+json": {}}}
router = APIRouter(tags=["operations"], route_class=GuardedRoute)


class Health(BaseModel):
    """The process is alive and its event loop turns."""

    status: str = "alive"


class Readiness(BaseModel):
    """Whether calls are answered now."""

    ready: bool
    state: EngineState


@router.get("/healthz", responses={400: _PROBLEM})
async def healthz() -> Health:
    """Whether the process is alive. Needs no token."""
    return Health()


@router.get("/readyz", response_model=Readiness, responses={400: _PROBLEM, 503: {"model": Readiness}})
async def readyz(wired: Wired) -> JSONResponse:
    """200 while the policy can be sampled or learns, and the disk takes what is said; else 503, with the engine's
    state. Needs no token.
    """
    state = wired.gateway.engine.state
    found = Readiness(ready=state in READY and not wired.gateway.swarm.disk_refusal, state=state)
    return JSONResponse(found.model_dump(), 200 if found.ready else 503)


@router.get(
    "/metrics",
    dependencies=[Depends(BEARER), Depends(VIEWER)],
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}},
        **dict.fromkeys((400, 401, 403, 500), _PROBLEM),
    },
)
async def get_metrics(wired: Wired) -> Response:
    """The server's numbers for Prometheus. Takes any token of the server: the viewer's is meant for this."""
    return Response(metrics.exposition(wired.gateway), media_type=metrics.CONTENT_TYPE)
