"""AWR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.shelf.grpo import Grpo

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
    is_linear: ClassVar[bool] = False

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
