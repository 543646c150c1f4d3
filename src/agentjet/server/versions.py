"""Routes about policy versions under `/swarm/v1/`: their scores on held-out tasks, and the tags of checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from agentjet.protocol import CheckpointInfo, EvaluationRequest, EvaluationView, TagRequest
from agentjet.server.control import client, control_router, leased, problems_of, stored, viewer
from agentjet.server.wiring import IdempotencyKey, Wired

TagName = Annotated[str, Path(max_length=256)]

router = control_router("versions")


@router.post("/evaluations", dependencies=client + leased, responses=problems_of(409, 503))
async def record_evaluation(
    body: EvaluationRequest, wired: Wired, idempotency_key: IdempotencyKey = None
) -> list[EvaluationView]:
    """Store the score of a policy version; the answer lists every evaluation, in the order they came."""
    return await wired.gateway.versions.record_evaluation(body, idempotency_key=idempotency_key)


@router.get("/evaluations", dependencies=viewer)
async def list_evaluations(wired: Wired) -> list[EvaluationView]:
    """Every evaluation, in the order they came."""
    found = wired.gateway.swarm.evaluations()
    await wired.gateway.durable()
    return found


@router.put("/tags/{name}", dependencies=client + leased, responses=problems_of(404, 409, 507))
async def put_tag(name: TagName, body: TagRequest, wired: Wired) -> list[CheckpointInfo]:
    """Name a checkpoint: it is kept until the tag is removed. The answer lists the checkpoints."""
    return await stored(wired.gateway.versions.tag(name, body.policy_version))


@router.delete("/tags/{name}", dependencies=client + leased, responses=problems_of(404, 409, 507))
async def delete_tag(name: TagName, wired: Wired) -> list[CheckpointInfo]:
    """Remove a name; its checkpoint is rotated like any other from the next one on."""
    return await stored(wired.gateway.versions.untag(name))
