"""PPO with a critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.critic import EXPLAINED, Critic, explained_variance, gae, scattered, steps
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest

if TYPE_CHECKING:
    from torch import Tensor


class Ppo(Critic):
    """PPO: the clipped loss with generalised advantages of single tokens, from a value head on the policy.

        d_t = r_t + gamma V_(t+1) - V_t,  A_t = d_t + gamma lambda A_(t+1), then whitened over the batch's tokens
        L = clip + 0.5 max((V - R)^2, (V_old + clamp(V - V_old, +- value_clip) - R)^2),  R = A + V_old before whitening

    t + 1 is the next token of the same role: observations between two calls are skipped. Rewards of turns come at the
    ends of their calls, that of the episode at the end.
    Source: arXiv 1707.06347 and 1506.02438, as verl computes them; the critic is a linear head on the policy's last
    hidden states instead of a second model. Confidence: reproduced, except for the head.
    Use: long episodes, where one reward for all tokens is too coarse; groups of one episode.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "ppo"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda: 1 trusts the rewards, 0 trusts the values."""
    value_clip: float = Field(0.5, gt=0)
    """A value that moved further than this from that before the batch has no gradient."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "value", "return")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        found, values = steps(batch), batch.forest["value"].astype(np.float64)
        advantages = gae(found.rewards, values[found.order], found.sequence, self.gamma, self.lam)
        return {"return": scattered(advantages, found.order, len(values)) + values}

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        found: NDArray[np.float64] = batch.forest["return"].astype(np.float64) - batch.forest["value"]
        deviation = float(np.std(found, ddof=1)) if len(found) > 1 else 1.0
        return np.asarray((found - found.mean()) / np.sqrt(deviation**2 + 1e-8), np.float32)

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        forest, metrics = super().columns(batch, outputs)
        if forest.num_targets:
            metrics[EXPLAINED] = explained_variance(forest["value"], forest["return"])
        return forest, metrics

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        value, old, goal = columns["new_value"], columns["value"], columns["return"]
        near = old + (value - old).clamp(-self.value_clip, self.value_clip)
        return 0.5 * ((value - goal) ** 2).maximum((near - goal) ** 2)
