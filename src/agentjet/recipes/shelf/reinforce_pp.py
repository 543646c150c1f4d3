"""REINFORCE++."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient, lengths
from agentjet.timeline.batch import TrainingBatch


class ReinforcePp(PolicyGradient):
    """REINFORCE++: the reward, whitened over all tokens of the batch.

        A_t = (R - mean) / sqrt(var + 1e-8), with mean and unbiased variance over the batch's tokens

    Source: arXiv 2501.03262, as verl computes it with gamma 1 and a reward at the end. Confidence: reproduced.
    Use: many tasks with few repeats each; a group may have one episode.
    Cost: as GRPO.
    """

    name: str = "reinforce_pp"

    smallest_group: ClassVar[int] = 1

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        assert batch.facts is not None
        rewards_ER = np.zeros(batch.facts.spoke.shape)
        for episodes, role, rewards_G in self.comparisons(batch.facts):
            rewards_ER[episodes, role] = self.baselined(rewards_G)
        return whitened(rewards_ER, np.where(self.compared(batch.facts), lengths(batch), 0.0))

    def baselined(self, rewards_G: FloatArray) -> FloatArray:
        """Returns the rewards of a group [G] before the whitening."""
        return rewards_G


def whitened(values_ER: FloatArray, lengths_ER: FloatArray) -> FloatArray:
    """Returns the values with mean 0 and variance 1 over tokens. Fewer than two tokens, or equal values, give 0."""
    total = lengths_ER.sum()
    spoke = lengths_ER > 0
    if total < 2 or np.ptp(values_ER[spoke]) == 0:
        return np.zeros_like(values_ER)
    mean = (values_ER * lengths_ER).sum() / total
    variance = ((values_ER - mean) ** 2 * lengths_ER).sum() / (total - 1)
    return np.where(spoke, (values_ER - mean) / np.sqrt(variance + 1e-8), 0.0)
