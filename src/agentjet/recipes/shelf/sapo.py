"""SAPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss, log_ratio
from agentjet.recipes.shelf.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class SapoLoss(PolicyLoss):
    """A smooth gate of the ratio instead of a clip."""

    name: str = "sapo"
    positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages."""
    negative: float = Field(1.05, gt=0)
    """Steepness of the gate for negative advantages."""

    reports: ClassVar[tuple[str, ...]] = ()
    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = columns["advantage"]
        steepness = (advantage > 0).to(logp.dtype) * (self.positive - self.negative) + self.negative
        ratio = log_ratio(logp, columns["logprob"]).exp()
        return -advantage * (steepness * (ratio - 1)).sigmoid() * 4 / steepness, {}


class Sapo(Grpo):
    """SAPO: GRPO's advantage with a smooth gate of the ratio, whose gradient fades instead of ending at a bound.

        L = -A 4 / s sigmoid(s (r - 1)),  s = positive if A > 0, else negative

    Source: arXiv 2511.20347. Confidence: inspired by: checked against no numbers of others.
    Use: several steps on one batch, and mixtures of experts, where a hard clip loses many tokens.
    Cost: as GRPO.
    """

    name: str = "sapo"
    loss: SerializeAsAny[PolicyLoss] = SapoLoss()
    """The policy loss."""
