"""HAPO: clip bounds and advantages that follow the entropy of the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import CLIP_FRACTION, PolicyLoss, log_ratio
from agentjet.recipes.recipe import Need
from agentjet.recipes.shelf.hapo_tlga import HapoTlga
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 1e-6
"""Smallest entropy whose logarithm is taken."""


class HapoLoss(PolicyLoss):
    """PPO's surrogate with bounds and advantages that follow the relative entropy h of the token, in [-1, 1]."""

    name: str = "hapo"
    clip: float = Field(0.2, gt=0, lt=0.5)
    """Bound of the ratio at h = 0, in both directions."""
    clip_alpha: float = Field(1.0, ge=0, le=1)
    """Widening of the lower bound for certain tokens (h < 0) and of the upper one for uncertain tokens (h > 0)."""
    adv_beta: float = Field(1.0, ge=0, le=1)
    """Change of the advantage by h: certain tokens near ratio 1 get less, uncertain ones far from it get more."""
    dual_clip: float = Field(10.0, gt=1)
    """Maximum ratio for negative advantages."""

    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "relative_entropy")
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h, ratio = columns["relative_entropy"], log_ratio(logp, columns["logprob"]).exp()
        low = self.clip * (1 - self.clip_alpha * h.clamp(max=0))
        high = self.clip * (1 + self.clip_alpha * h.clamp(min=0))
        near = ((ratio > 1 - low / 2) & (ratio < 1 + high / 2)).detach()
        advantage = columns["advantage"] * (1 + self.adv_beta * h).where((h > 0) ^ near, h.new_ones(()))
        free, bounded = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
        loss, cap = free.maximum(bounded), -advantage * self.dual_clip
        is_capped = (advantage < 0) & (loss > cap)
        return cap.where(is_capped, loss), {CLIP_FRACTION: (bounded > free) | is_capped}


class Hapo(HapoTlga):
    """HAPO: token-level group average, with clip bounds and advantages that follow the entropy of each token.

        h = (log H - q) / s, scaled to [-1, 1]; q = 0.8-quantile of log H, s = root mean square about q
        lower bound 0.2 (1 - min(h, 0)), upper bound 0.2 (1 + max(h, 0))
        A = A (1 + h) for h > 0 outside half the bounds, and for h <= 0 inside them

    Source: github.com/starriver030515/HAPO at 7671dde, with signed h as its formulas need (the released code loses the
    sign), and with entropies of the weights before the batch. Confidence: reproduced, without its temperature.
    Use: long reasoning, with a mean over tokens.
    Cost: one more forward pass for the entropies.
    """

    name: str = "hapo"
    loss: SerializeAsAny[PolicyLoss] = HapoLoss()
    """The policy loss."""
    drop_zero_variance: bool = True
    """Dynamic sampling: drop groups whose rewards are all equal, and sample others instead."""

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"entropy"}

    def loss_columns(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        return {"relative_entropy": relative(batch.forest["entropy"].astype(np.float64)).astype(np.float32)}


def relative(entropies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns h [M]: -1 for the smallest entropy, 0 at the 0.8-quantile, 1 for the largest."""
    logs = np.log(np.maximum(entropies, FLOOR))
    gaps = logs - np.sort(logs)[round(0.8 * (len(logs) - 1))] if len(logs) else logs
    scales = np.where(gaps > 0, gaps.max(initial=0), -gaps.min(initial=0))
    return np.asarray(gaps / np.where(scales > 0, scales, 1))
