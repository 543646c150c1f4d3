"""Adaptive KL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENT, SEQUENCES = "policy/kl_coef", "policy/kl_sequences"


class AdaptiveKl(Grpo):
    """Adaptive KL: GRPO with a KL penalty whose weight follows a target.

        L = clip + beta KL,  beta <- beta (1 + clamp(KL / target - 1, -0.2, 0.2) min(1, n / horizon)) after n sequences

    Source: arXiv 1909.08593, section 2.2, as verl computes it. Confidence: inspired by: the source's controller acts on
    the KL in the reward, this one on the KL in the loss.
    Use: long runs that must stay near the first model, if the weight of the penalty is not known. `beta` is state:
    it is saved with the checkpoints and begins at `kl_coef`.
    Cost: one more forward pass, by the weights of version 0; every token is computed.
    """

    name: str = "adaptive_kl"
    kl_coef: float = Field(0.001, gt=0)
    """Weight of the KL penalty in the first batch."""
    target: float = Field(0.1, gt=0)
    """KL per token that the weight aims at."""
    horizon: float = Field(10_000.0, gt=0)
    """Sequences after which a constant error of 20 % has changed the weight by about 20 %."""

    no_kl_in_reward: ClassVar[str] = "adapts the weight of the penalty in the loss"

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "kl_coef")

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        beta = batch.state.get("kl_coef", self.kl_coef)
        forest = forest.with_columns(kl_coef=np.full(forest.num_targets, beta))
        return forest, {**metrics, COEFFICIENT: beta, SEQUENCES: float(forest.num_sequences)}

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss.token_loss(logp, columns)
        metrics["policy/kl"] = kl = self.kl(logp, columns["reference"])
        return loss + columns["kl_coef"] * kl, metrics

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        beta = metrics[COEFFICIENT]
        if "policy/kl" not in metrics:  # The batch has no token.
            return {"kl_coef": beta}
        error = min(max(metrics["policy/kl"] / self.target - 1, -0.2), 0.2)
        return {"kl_coef": beta * (1 + error * min(metrics[SEQUENCES] / self.horizon, 1.0))}
