"""Learning in this process: the steps of a batch without a rank, by the loop that the server uses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.protocol import Learner, LossSpec, Outputs, learn
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest
from agentjet.types import Op, PolicyId


@dataclass
class _Direct:
    """A learner with the batch of one version, behind the methods that `learn` calls."""

    learner: PolicyLearner
    batch: TrainingBatch

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        assert batch is self.batch

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        return self.learner.forward_backward(self.batch, loss)

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return self.learner.optim_step(optimizer, self.batch.id)


def learn_directly(
    learner: PolicyLearner, forest: Forest, job: JobConfig, version: int, facts: Facts | None = None
) -> dict[str, float]:
    """Trains on a batch; returns metrics."""
    batch = TrainingBatch(version, forest, facts)
    op = Op.of(PolicyId(), 0)
    metrics, _ = asyncio.run(learn(cast(Learner, _Direct(learner, batch)), op, batch, job))
    return metrics
