"""REINFORCE."""

from __future__ import annotations

from typing import ClassVar

from pydantic import SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient
from agentjet.recipes.shelf.rft import CrossEntropy


class Reinforce(PolicyGradient):
    """REINFORCE: the reward, without a baseline, times the log-probability.

        A_i = r_i,  L = -A log(policy)

    Source: Williams 1992, doi 10.1007/BF00992696. Confidence: reproduced.
    Use: to compare with, and for rewards of both signs; a group may have one episode. Other recipes have less variance.
    Cost: as GRPO; episodes with reward 0 are not computed.
    """

    name: str = "reinforce"
    loss: SerializeAsAny[PolicyLoss] = CrossEntropy(name="reinforce")
    """The policy loss."""

    smallest_group: ClassVar[int] = 1

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return rewards_G
