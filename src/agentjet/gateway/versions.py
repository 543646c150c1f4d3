"""`PolicyVersions`: scores and checkpoints of policy versions, and which checkpoints are kept by name."""

from __future__ import annotations

import logging

from agentjet.errors import CheckpointError, InvalidRequest, RequestError
from agentjet.gateway.checkpoints import BEST, CheckpointStore
from agentjet.gateway.concurrency import GroupCommit
from agentjet.gateway.engine import Engine
from agentjet.protocol import CheckpointInfo, EvaluationRequest, EvaluationView
from agentjet.swarm import SwarmState

log = logging.getLogger(__name__)


class PolicyVersions:
    """The policy versions of one run."""

    def __init__(self, swarm: SwarmState, commits: GroupCommit, engine: Engine, store: CheckpointStore) -> None:
        self._swarm = swarm
        self._commits = commits
        self._engine = engine
        self._store = store

    async def record_evaluation(
        self, request: EvaluationRequest, *, idempotency_key: str | None = None
    ) -> list[EvaluationView]:
        """Store the score of a policy version, and keep its checkpoint if it is the best and `job.keep_best` is set;
        returns all evaluations. Raises `InvalidRequest`.
        """
        self._swarm.record_evaluation(request, idempotency_key=idempotency_key)
        await self._commits.durable()
        found = self._swarm.queries.evaluations()
        best = next(evaluation.policy_version for evaluation in found if evaluation.best)
        if self._swarm.job.keep_best and best == request.policy_version:
            await self._keep_best(best)
        return found

    async def _keep_best(self, version: int) -> None:
        """Give the tag `best` to the checkpoint of a version, which is saved first if that is the present version.

        A failure is logged: the score is recorded all the same.
        """

        async def save() -> None:
            if self._swarm.policy_version == version:
                await self._engine.checkpoint()

        try:
            await self._engine.between_batches("checkpoint", save)
            self._store.check_there(version)
            self._store.tags.put(BEST, version)
            self._store.rotate(self._swarm.job.keep_checkpoints)
        except (CheckpointError, RequestError) as error:
            log.error("the checkpoint of policy version %d, which scored best, is not kept: %s", version, error)

    async def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints on disk, oldest first, with their tags and scores. Raises `CheckpointError`."""
        scores = {evaluation.policy_version: evaluation.score for evaluation in self._swarm.queries.evaluations()}
        tags = self._store.tags.read()
        return [
            info.model_copy(
                update={
                    "tags": sorted(name for name, version in tags.items() if version == info.policy_version),
                    "score": scores.get(info.policy_version),
                }
            )
            for info in self._store.listing()
        ]

    async def tag(self, name: str, policy_version: int) -> list[CheckpointInfo]:
        """Name a checkpoint, which is then kept; returns all. Raises `InvalidRequest`, `NotFound`, `Conflict`,
        `CheckpointError`.
        """
        self._store.tags.check_new(name, policy_version)
        self._store.check_there(policy_version)
        self._store.tags.put(name, policy_version)
        return await self.checkpoints()

    async def untag(self, name: str) -> list[CheckpointInfo]:
        """Remove a name; returns all checkpoints. Raises `InvalidRequest`, `NotFound`, `CheckpointError`."""
        if name == BEST and self._swarm.job.keep_best:
            raise InvalidRequest(
                f"The tag {BEST!r} is the server's own: it marks the best recorded evaluation. Set job.keep_best=false "
                "first.",
                code="tag_reserved",
                status=422,
                param="name",
            )
        self._store.tags.remove(name)
        return await self.checkpoints()
