"""AWR."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import Comparison
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import Facts, TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class AwrLoss(PolicyLoss):
    """Cross-entropy on the sampled tokens, weighted by the exponential of the advantage."""

    name: str = "awr"
    beta: float = Field(1.0, gt=0)
    """Temperature of the weights; smaller is closer to the best episodes only."""
    max_weight: float = Field(20.0, gt=0)
    """Largest weight."""

    reports: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        weight = (columns["advantage"] / self.beta).exp().clamp(max=self.max_weight)
        return -weight * logp, {}


class Awr(Grpo):
    """AWR: imitation of sampled episodes, weighted by the exponential of their advantage.

        L = -min(exp(A / beta), max_weight) log(policy), A as in GRPO

    Source: arXiv 1910.00177, with the group's mean as the value. Confidence: reproduced.
    Use: stale samples of any age: it needs no probability of the sampling policy.
    Cost: as GRPO; every token is computed.
    """

    name: str = "awr"
    loss: SerializeAsAny[PolicyLoss] = AwrLoss()
    """The policy loss."""

    def comparisons(self, facts: Facts) -> Iterator[Comparison]:
        """Comparisons of two or more episodes. The advantage 0 of a single one would be a weight of 1."""
        return (found for found in super().comparisons(facts) if len(found.episodes) > 1)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without sequences that are not compared: their advantage 0 would be a weight of 1."""
        return self.compared_tokens(batch)
