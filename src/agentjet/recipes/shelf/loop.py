"""LOOP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import CLIP_FRACTION, PolicyLoss, log_ratio
from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.rloo import Rloo

if TYPE_CHECKING:
    from torch import Tensor


class LoopLoss(PolicyLoss):
    """PPO's surrogate with a clip that is symmetric in the log-ratio."""

    name: str = "loop"
    clip: float = Field(0.1, gt=0)
    """Ratios outside [1 / (1 + clip), 1 + clip] have no gradient."""

    aggregation: ClassVar[str] = "sequence_mean"

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = columns["advantage"]
        ratio = log_ratio(logp, columns["logprob"]).exp()
        free, clipped = -advantage * ratio, -advantage * ratio.clamp(1 / (1 + self.clip), 1 + self.clip)
        return free.maximum(clipped), {CLIP_FRACTION: clipped > free}


class Loop(Rloo):
    """LOOP: leave-one-out PPO, without episodes whose advantage is small.

        A_i = r_i - mean of the others, 0 if |A_i| < min_advantage
        L = max(-A r, -A clip(r, 1 / (1 + clip), 1 + clip)), mean over each episode's tokens

    Source: github.com/apple/ml-loop at 6ade7b9. Confidence: reproduced, without the rounding to workers.
    Use: long interactive tasks; with `epochs` and `mini_batches` above 1.
    Cost: as GRPO.
    """

    name: str = "loop"
    loss: SerializeAsAny[PolicyLoss] = LoopLoss()
    """The policy loss."""
    min_advantage: float = Field(0.01, ge=0)
    """Smaller advantages become 0."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        advantages_G = super().group_advantages(rewards_G)
        return np.where(np.abs(advantages_G) < self.min_advantage, 0.0, advantages_G)
