"""CISPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import CLIP_FRACTION, PolicyLoss, log_ratio
from agentjet.recipes.shelf.grpo import Grpo

if TYPE_CHECKING:
    from torch import Tensor


class CispoLoss(PolicyLoss):
    """REINFORCE with a clipped, detached ratio as weight. Every token keeps a gradient."""

    name: str = "cispo"
    clip_low: float = Field(10.0, ge=0)
    """Weights are at least 1 - clip_low. 1 or more: no lower bound."""
    clip_high: float = Field(0.2, ge=0)
    """Weights are at most 1 + clip_high."""

    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = columns["advantage"]
        ratio = log_ratio(logp, columns["logprob"]).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight.detach() * advantage * logp, {CLIP_FRACTION: (weight != ratio) & (advantage != 0)}


class Cispo(Grpo):
    """CISPO: GRPO's advantage with a clipped ratio as a weight, so that no token loses its gradient.

        L = -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log(policy)

    Source: arXiv 2506.13585. Confidence: reproduced. `clip_high` is verl's; ScaleRL has 5.
    Use: rare, decisive tokens (reasoning words) that PPO's clip silences.
    Cost: as GRPO.
    """

    name: str = "cispo"
    loss: SerializeAsAny[PolicyLoss] = CispoLoss()
    """The policy loss."""
