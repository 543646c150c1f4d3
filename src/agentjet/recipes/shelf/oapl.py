"""OAPL."""

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


class OaplLoss(PolicyLoss):
    """The squared distance between a sequence's log-ratio and its advantage, as a share of each token."""

    name: str = "oapl"
    beta: float = Field(1e-3, gt=0)
    """Factor of the log-ratio: smaller moves the policy further from the sampling policy."""

    reads: ClassVar[tuple[str, ...]] = ("sequence_log_ratio", "advantage", "sequence_tokens")
    reports: ClassVar[tuple[str, ...]] = ()
    aggregation: ClassVar[str] = "sequence_sum"

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = columns["sequence_tokens"]
        gap = self.beta * tokens * columns["sequence_log_ratio"] - columns["advantage"]
        # The second term is 0. Its gradient, summed over the tokens, is that of the squared gap.
        return gap**2 / tokens + 2 * self.beta * gap * (logp - logp.detach()), {}


class Oapl(PolicyGradient):
    """OAPL: regression of each sequence's log-ratio on the advantage of the best policy near the one that sampled.

        A_i = r_i - temperature log(mean of exp(r / temperature))
        L_i = (beta (log(policy) - log(sampling policy)) - A_i)^2, with the sums of the episode's tokens

    Source: NeMo-RL's description of it, the loss of KARL. Confidence: reproduced.
    Use: samples that are many versions old, large batches with several passes: no ratio, no clip. Groups with equal
    rewards pull towards the sampling policy.
    Cost: twice the forward passes of GRPO; every token is computed.
    """

    name: str = "oapl"
    loss: SerializeAsAny[PolicyLoss] = OaplLoss()
    """The policy loss."""
    temperature: float = Field(1.0, gt=0)
    """Softness of the best policy: large values compare with the mean of the rewards, small ones with the best."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        below_best_G = rewards_G - rewards_G.max()
        value = self.temperature * np.log(np.mean(np.exp(below_best_G / self.temperature)))
        return np.asarray(below_best_G - value)

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        sequence = batch.forest["sequence"]
        return {"sequence_tokens": np.bincount(sequence)[sequence].astype(np.float32)}

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Without sequences that are not compared."""
        return self.compared_tokens(batch)
