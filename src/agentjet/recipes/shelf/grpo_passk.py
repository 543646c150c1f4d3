"""GRPO for pass@k."""

from __future__ import annotations

import numpy as np

from agentjet.recipes.policy_gradient import EPS, FloatArray
from agentjet.recipes.shelf.grpo import Grpo


class GrpoPassk(Grpo):
    """GRPO for pass@k: only the best episode of a group is trained, by its lead over the second best.

        A_best = (r_best - r_second) / (std(r) + 1e-6), all others 0

    Source: arXiv 2503.19595. Confidence: inspired by: checked against no numbers of others.
    Use: to widen the set of tasks that one of k attempts solves. With rewards of 0 and 1 it trains groups with exactly
    one success.
    Cost: less than GRPO: one episode of a group is computed.
    """

    name: str = "grpo_passk"

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        advantages_G = np.zeros(len(rewards_G))
        if len(rewards_G) > 1:
            best = int(np.argmax(rewards_G))
            lead = rewards_G[best] - np.delete(rewards_G, best).max()
            advantages_G[best] = lead / (np.std(rewards_G, ddof=1) + EPS)
        return advantages_G
