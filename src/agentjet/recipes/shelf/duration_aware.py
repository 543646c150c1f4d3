"""Duration-aware GRPO."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch


class DurationAware(Grpo):
    """Duration-aware GRPO: advantages times the time that the environment of the episode took.

        A_i = A_i(GRPO) x min(max_weight, max(1 / max_weight, d_i / mean(d)))

    Source: RL for machine-learning engineering agents, read in notes about it. Confidence: inspired by; the cap is
    ours.
    Use: with `max_staleness` above 0, where slow actions are sampled less often than fast ones.
    Cost: as GRPO.
    """

    name: str = "duration_aware"
    metric: str = Field("env_seconds", min_length=1)
    """Metric that the agent sends with its reward: seconds in the environment, without waiting for tokens."""
    max_weight: float = Field(10.0, ge=1)
    """Bound of the weight; its inverse is the lower bound."""

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        advantages_ER = super().sequence_advantages(batch)
        seconds_E = batch.facts.metrics.get(self.metric, np.zeros(len(batch.facts.rewards)))
        has_time_E = np.nan_to_num(seconds_E) > 0
        if not has_time_E.any():
            return advantages_ER
        weight_E = np.where(has_time_E, seconds_E / seconds_E[has_time_E].mean(), 1.0)
        return np.asarray(advantages_ER * np.clip(weight_E, 1 / self.max_weight, self.max_weight)[:, None])
