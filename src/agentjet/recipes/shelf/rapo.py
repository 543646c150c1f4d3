"""RAPO's advantage scaling."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch


class Rapo(Grpo):
    """RAPO scaling: GRPO, scaled up by the share of groups that teach nothing.

        A_i = A_i(GRPO) x min(max_factor, groups / groups with different rewards)

    Source: Fathom-DeepResearch, read in notes about it. Confidence: inspired by; the cap is ours.
    Use: instead of `drop_zero_variance`, where sampling again is expensive.
    Cost: as GRPO.
    """

    name: str = "rapo"
    max_factor: float = Field(10.0, ge=1)
    """Largest factor."""

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        advantages_ER = super().sequence_advantages(batch)
        groups = np.unique(batch.facts.groups)
        good = sum(bool(advantages_ER[batch.facts.groups == group].any()) for group in groups)
        return advantages_ER * min(self.max_factor, len(groups) / max(1, good))
