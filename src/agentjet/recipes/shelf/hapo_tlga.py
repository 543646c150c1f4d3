"""HAPO, part 1: token-level group average."""

from __future__ import annotations

import numpy as np

from agentjet.recipes.policy_gradient import EPS, FloatArray, centred, lengths
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import TrainingBatch

LARGEST = 5.0
"""A group with an advantage of this size gets those of GRPO."""


class HapoTlga(Grpo):
    """HAPO's token-level group average: GRPO in which every token of the group counts the same.

        A_i = (r_i - mu) / (std + 1e-6), mu and population std over the tokens of the group
        A group with |A| >= 5 gets the advantages of GRPO.

    Source: github.com/starriver030515/HAPO at 7671dde. Confidence: reproduced, with masked positions only.
    Use: with the aggregation over tokens, so that the sum of advantages over tokens is 0.
    Cost: as GRPO.
    """

    name: str = "hapo_tlga"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        lengths_ER = lengths(batch)
        advantages_ER = np.zeros_like(lengths_ER)
        for episodes, role, rewards_G in self.comparisons(batch.facts):
            lengths_G = lengths_ER[episodes, role]
            if not centred(rewards_G).any() or not lengths_G.any():
                continue
            centred_G = rewards_G - np.average(rewards_G, weights=lengths_G)
            found_G = centred_G / (np.sqrt(np.average(centred_G**2, weights=lengths_G)) + EPS)
            is_far = np.abs(found_G[lengths_G > 0]).max() >= LARGEST
            advantages_ER[episodes, role] = self.group_advantages(rewards_G) if is_far else found_G
        return advantages_ER
