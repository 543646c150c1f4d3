"""REINFORCE++ with the baseline of a group."""

from __future__ import annotations

from typing import ClassVar

from agentjet.recipes.policy_gradient import FloatArray, centred
from agentjet.recipes.shelf.reinforce_pp import ReinforcePp


class ReinforcePpBaseline(ReinforcePp):
    """REINFORCE++ baseline: the reward minus the group's mean, whitened over all tokens of the batch.

        A_t = whiten(R - mean of the group), see `reinforce_pp`

    Source: arXiv 2501.03262, as verl computes it. Confidence: reproduced.
    Use: groups whose deviations differ by chance, because one deviation serves the whole batch.
    Cost: as GRPO.
    """

    name: str = "reinforce_pp_baseline"

    smallest_group: ClassVar[int] = 2

    def baselined(self, rewards_G: FloatArray) -> FloatArray:
        return centred(rewards_G)
