"""GSPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import CLIP_FRACTION, PolicyLoss, surrogate
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.section import Int64

if TYPE_CHECKING:
    from torch import Tensor


class GspoLoss(PolicyLoss):
    """PPO's surrogate on the sequence's geometric mean ratio. The gradient flows through each token."""

    name: str = "gspo"
    clip_low: float = Field(3e-4, ge=0)
    """With a negative advantage, sequence ratios below 1 - clip_low have no gradient."""
    clip_high: float = Field(4e-4, ge=0)
    """With a positive advantage, sequence ratios above 1 + clip_high have no gradient."""

    reads: ClassVar[tuple[str, ...]] = ("sequence_log_ratio", "advantage")
    aggregation: ClassVar[str] = "sequence_mean"
    is_linear: ClassVar[bool] = True

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (columns["sequence_log_ratio"] + logp - logp.detach()).clamp(max=10.0).exp()
        loss, clipped = surrogate(ratio, columns["advantage"], self.clip_low, self.clip_high)
        return loss, {CLIP_FRACTION: clipped}


class Gspo(Grpo):
    """GSPO: GRPO's advantage with a clipped ratio of sequences instead of tokens.

        s_i = exp(mean over tokens of log(policy / sampling policy)),  L = max(-A s_i, -A clip(s_i, 1 - low, 1 + high))

    Source: arXiv 2507.18071, bounds of its section 5.1. Confidence: reproduced.
    Use: long answers and mixtures of experts, where ratios of single tokens are noisy.
    Cost: one more forward pass for the ratios.
    """

    name: str = "gspo"
    loss: SerializeAsAny[PolicyLoss] = GspoLoss()
    """The policy loss."""
    mini_batches: Int64 = Field(4, ge=1)
    """Optimiser steps in each pass."""
