"""Scores of policy versions on held-out tasks, as their clients report them. Each is one event of the journal."""

from __future__ import annotations

from agentjet.errors import InvalidRequest
from agentjet.protocol import EvaluationRequest, EvaluationView
from agentjet.swarm.journal import Journal
from agentjet.swarm.ledger import Ledger

KIND = "evaluation"


def record(ledger: Ledger, request: EvaluationRequest, idempotency_key: str | None) -> None:
    """Journal an evaluation, once per key. Raises `InvalidRequest` for a version that was not learned yet."""
    scope = f"evaluation/{request.client_id}"
    if ledger.recall(scope, idempotency_key, request) is not None:
        return
    if request.policy_version > ledger.policy_version:
        raise InvalidRequest(
            f"policy_version = {request.policy_version}: the policy is at version {ledger.policy_version}; report the "
            "version that was evaluated",
            code="version_unknown",
            status=422,
            param="policy_version",
        )
    with ledger.transaction():
        ledger.emit(KIND, request.model_dump())
        ledger.remember(scope, idempotency_key, request, str(request.policy_version))


def listing(journal: Journal) -> list[EvaluationView]:
    """All recorded evaluations, in the order they came."""
    events = journal.events_of(KIND)
    scores = [event.body["score"] for event in events]
    best = scores.index(max(scores)) if scores else -1
    return [EvaluationView(**event.body, time=event.time, best=number == best) for number, event in enumerate(events)]
