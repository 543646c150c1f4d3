"""AEPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import Clip, PolicyLoss, log_ratio
from agentjet.recipes.recipe import Need
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor

LOWEST = -5.0
"""Bound of standardised entropies, so that no advantage changes its sign."""


class AepoLoss(Clip):
    """PPO's surrogate that keeps the gradient of the bound above the upper clip."""

    name: str = "aepo"
    dual_clip: float = Field(3.0, ge=0)
    """Maximum ratio for negative advantages, above 1. 0: no maximum."""

    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().token_loss(logp, columns)
        advantage, ratio = columns["advantage"], log_ratio(logp, columns["logprob"]).exp()
        above = (advantage > 0) & (ratio > 1 + self.clip_high)
        return (-(1 + self.clip_high) * advantage * (1 + logp - logp.detach())).where(above, loss), metrics


class Aepo(Grpo):
    """AEPO: GRPO that weighs uncertain tokens more and keeps their gradient above the upper clip.

        A_t = A (1 + entropy_weight z_t),  z = (H - mean(H)) / std(H) over the batch's tokens, at least -5
        r > 1 + clip_high and A > 0:  the gradient is (1 + clip_high) A instead of 0

    Source: the authors' code in public forks, with entropies of the weights before the batch. Confidence: reproduced,
    without the branching of its sampling.
    Use: tool agents whose entropy collapses.
    Cost: one more forward pass for the entropies.
    """

    name: str = "aepo"
    loss: SerializeAsAny[PolicyLoss] = AepoLoss()
    """The policy loss."""
    entropy_weight: float = Field(0.2, ge=0, le=0.2)
    """Weight of the standardised entropy in the advantage."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"entropy"}

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        entropies = batch.forest["entropy"].astype(np.float64)
        weights = 1 + self.entropy_weight * standardised(entropies)
        return (super().token_advantages(batch) * weights).astype(np.float32)


def standardised(entropies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the entropies [M] with mean 0 and sample standard deviation 1; 0 if all are equal."""
    if len(entropies) < 2 or np.ptp(entropies) == 0:
        return np.zeros_like(entropies)
    return np.asarray(np.maximum((entropies - entropies.mean()) / np.std(entropies, ddof=1), LOWEST))
