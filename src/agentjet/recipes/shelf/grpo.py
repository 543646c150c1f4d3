"""GRPO."""

from __future__ import annotations

import numpy as np

from agentjet.recipes.policy_gradient import EPS, FloatArray, PolicyGradient, centred


class Grpo(PolicyGradient):
    """GRPO: the reward minus the group's mean, divided by the group's standard deviation, with PPO's clipped loss.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6), with the sample standard deviation

    Source: arXiv 2402.03300, as verl computes it without its dual clip: `loss.dual_clip = 3` adds that. Confidence:
    reproduced.
    Use: the default. Rewards of any scale; groups of two or more.
    Cost: one forward and one backward pass.
    """

    name: str = "grpo"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        centred_G = centred(rewards_G)
        if len(rewards_G) < 2:
            return centred_G
        return np.asarray(centred_G / (np.std(rewards_G, ddof=1) + EPS))
