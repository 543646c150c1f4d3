"""A recipe outside the package: GRPO around the group's median, which one lucky episode does not move."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient


class MedianGrpo(PolicyGradient):
    """Median GRPO: the reward minus the group's median, divided by the mean distance from it.

        A_i = scale (r_i - median(r)) / (mean |r - median(r)| + 1e-6)

    Source: an example of docs/recipes.md. Confidence: ours.
    Use: rewards with rare outliers. Cost: as GRPO.
    """

    name: str = "median_grpo"
    scale: float = Field(1.0, gt=0)
    """Factor of every advantage."""

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        centred_G = rewards_G - np.median(rewards_G)
        return np.asarray(self.scale * centred_G / (np.abs(centred_G).mean() + 1e-6))
