"""Rejection fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class CrossEntropy(PolicyLoss):
    """Cross-entropy on the sampled tokens, times the advantage."""

    name: str = "rft"

    reads: ClassVar[tuple[str, ...]] = ("advantage",)
    reports: ClassVar[tuple[str, ...]] = ()
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -columns["advantage"] * logp, {}


class Rft(PolicyGradient):
    """Rejection fine-tuning: cross-entropy on the episodes whose reward reaches a threshold.

        L = -log(policy), mean over the tokens of episodes with r_i >= threshold

    Source: standard, also called filtered behaviour cloning. Confidence: reproduced.
    Use: a first phase for models that rarely succeed; groups of one are enough.
    Cost: less than GRPO: failed episodes are not computed.
    """

    name: str = "rft"
    loss: SerializeAsAny[PolicyLoss] = CrossEntropy()
    """The policy loss."""
    threshold: float = Field(1.0)
    """Smallest reward of an episode that is imitated."""

    smallest_group: ClassVar[int] = 1
    no_kl_in_reward: ClassVar[str] = "compares the reward with a threshold"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return np.where(rewards_G >= self.threshold, 1.0, 0.0)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without rejected episodes."""
        return np.asarray(advantage != 0)
