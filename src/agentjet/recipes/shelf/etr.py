"""ETR: elastic trust regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny, model_validator

from agentjet.recipes.losses import CLIP_FRACTION, PolicyLoss, log_ratio
from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class EtrLoss(PolicyLoss):
    """PPO's surrogate with a bound per token."""

    name: str = "etr"

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "bound")
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        advantage, bound = columns["advantage"], columns["bound"]
        ratio = log_ratio(logp, columns["logprob"]).exp()
        free, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - bound, 1 + bound)
        return free.maximum(clipped), {CLIP_FRACTION: clipped > free}


class Etr(Grpo):
    """ETR: GRPO with wider clip bounds for large advantages, and for tasks that are neither easy nor hard.

        bound_i = bound [1 + micro (tanh|A_i| - tanh 1)] [1 + macro (min(var(r) / full_variance, 1) - 0.5)]

    Source: the abstract about elastic trust regions; the formula is ours. Confidence: inspired by.
    Use: several steps on one batch, tasks of different difficulty. With micro = macro = 0 it is GRPO.
    Cost: as GRPO.
    """

    name: str = "etr"
    loss: SerializeAsAny[PolicyLoss] = EtrLoss()
    """The policy loss."""
    bound: float = Field(0.2, gt=0)
    """Distance of the ratio from 1 beyond which there is no gradient, for an advantage of 1."""
    micro: float = Field(0.5, ge=0)
    """Influence of the advantage."""
    macro: float = Field(0.5, ge=0)
    """Influence of the group's variance."""
    full_variance: float = Field(0.25, gt=0)
    """Population variance of a group's rewards with the widest bound: 0.25 for rewards of 0 and 1."""
    smallest: float = Field(0.05, gt=0)
    """Lower limit of the bounds."""
    largest: float = Field(0.4, gt=0)
    """Upper limit of the bounds."""

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if not self.smallest <= self.bound <= self.largest:
            raise ValueError(
                f"bound = {self.bound} must lie between smallest = {self.smallest} and largest = {self.largest}"
            )
        return self

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        if batch.facts is None:
            variance: FloatArray = np.full(len(advantage), self.full_variance)
        else:
            variance_ER = np.zeros(batch.facts.spoke.shape)
            for episodes, role, rewards_G in self.comparisons(batch.facts):
                variance_ER[episodes, role] = np.var(rewards_G)
            variance = batch.facts.of_tokens(variance_ER, batch.forest)
        micro = 1 + self.micro * (np.tanh(np.abs(advantage)) - np.tanh(1))
        macro = 1 + self.macro * (np.minimum(variance / self.full_variance, 1) - 0.5)
        return {"bound": np.clip(self.bound * micro * macro, self.smallest, self.largest).astype(np.float32)}
