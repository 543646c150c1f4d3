"""LOOP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import CLIP_FRACTION, PolicyLoss, log_ratio
from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.rloo import Rloo
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class LoopLoss(PolicyLoss):
    """PPO's surrogate with a clip that is symmetric in the log-ratio."""

    name: str = "loop"
    clip: float = Field(0.1, gt=0)
    """Ratios outside [1 / (1 + clip), 1 + clip] have no gradient."""

    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = columns["advantage"]
        ratio = log_ratio(logp, columns["logprob"]).exp()
        free, clipped = -advantage * ratio, -advantage * ratio.clamp(1 / (1 + self.clip), 1 + self.clip)
        return free.maximum(clipped), {CLIP_FRACTION: clipped > free}


class Loop(Rloo):
    """LOOP: leave-one-out PPO, without episodes whose advantage is small.

        A_i = r_i - mean of the others, left out if |A_i| < min_advantage
        L = max(-A r, -A clip(r, 1 / (1 + clip), 1 + clip)), mean over each episode's tokens

    Source: github.com/apple/ml-loop at 6ade7b9. Confidence: reproduced, without the rounding to
    workers and without the stop at a large mean log-ratio.
    Use: long interactive tasks; with several `mini_batches`.
    Cost: twice GRPO's: two epochs.
    """

    name: str = "loop"
    loss: SerializeAsAny[PolicyLoss] = LoopLoss()
    """The policy loss."""
    epochs: Int64 = Field(2, ge=1)
    """Passes over each batch."""
    min_advantage: float = Field(0.01, ge=0)
    """Episodes with a smaller advantage are left out. 0: none."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        advantages_G = super().group_advantages(rewards_G)
        return np.where(np.abs(advantages_G) < self.min_advantage, 0.0, advantages_G)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without rejected episodes."""
        if not self.min_advantage:
            return super().counting(batch, advantage)
        return np.asarray(advantage != 0)
