"""OPO."""

from __future__ import annotations

import numpy as np

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient, centred, lengths
from agentjet.timeline.batch import TrainingBatch


class Opo(PolicyGradient):
    """OPO: the reward minus a mean of the group in which longer episodes count more.

        A_i = r_i - sum(len_j r_j) / sum(len_j)

    Source: arXiv 2505.23585, as verl computes it. Confidence: reproduced.
    Use: on-policy training with answers of very different lengths.
    Cost: as GRPO.
    """

    name: str = "opo"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        lengths_ER = lengths(batch)
        advantages_ER = np.zeros_like(lengths_ER)
        for episodes, role, rewards_G in self.comparisons(batch.facts):
            lengths_G = lengths_ER[episodes, role]
            if centred(rewards_G).any() and lengths_G.any():
                advantages_ER[episodes, role] = rewards_G - np.average(rewards_G, weights=lengths_G)
        return advantages_ER
