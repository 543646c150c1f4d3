"""RLOO."""

from __future__ import annotations

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient, centred


class Rloo(PolicyGradient):
    """RLOO: the reward minus the mean of the other episodes of the group.

        A_i = r_i - mean of r_j with j != i = n / (n - 1) (r_i - mean(r))

    Source: arXiv 2402.14740. Confidence: reproduced.
    Use: an unbiased baseline that keeps the scale of the rewards.
    Cost: as GRPO.
    """

    name: str = "rloo"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        size = len(rewards_G)
        return centred(rewards_G) * (size / (size - 1) if size > 1 else 0.0)
