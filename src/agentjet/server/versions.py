"""Routes about policy versions under `/swarm/v1/`: their scores on held-out tasks."""

from __future__ import annotations

from fastapi import APIRouter

from agentjet.protocol import PREFIX, EvaluationRequest, EvaluationView
from agentjet.server.control import client, problems_of, viewer
from agentjet.server.wiring import IdempotencyKey, Wired

router = APIRouter(prefix=PREFIX, tags=["versions"], responses=problems_of(400, 401, 403, 413, 422, 500))


@router.post("/evaluations", dependencies=client, responses=problems_of(409, 503))
async def record_evaluation(
    body: EvaluationRequest, wired: Wired, idempotency_key: IdempotencyKey = None
) -> list[EvaluationView]:
    """Store the score of a policy version; the answer lists every evaluation, in the order they came."""
    return await wired.gateway.record_evaluation(body, idempotency_key=idempotency_key)


@router.get("/evaluations", dependencies=viewer)
async def list_evaluations(wired: Wired) -> list[EvaluationView]:
    """Every evaluation, in the order they came."""
    found = wired.gateway.swarm.evaluations()
    await wired.gateway.durable()
    return found
