"""DRO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, SerializeAsAny

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class DroLoss(PolicyLoss):
    """REINFORCE with a quadratic pull towards the policy that sampled."""

    name: str = "dro"
    beta: float = Field(0.05, ge=0)
    """Weight of the squared log-ratio."""

    reports: ClassVar[tuple[str, ...]] = ()

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        gap = logp - columns["logprob"]
        return -columns["advantage"] * logp + self.beta / 2 * gap**2, {}


class Dro(PolicyGradient):
    """DRO: the reward minus the group's mean, and a squared log-ratio instead of a clip.

        A_i = r_i - mean(r),  L = -A log(policy) + beta / 2 (log(policy) - log(sampling policy))^2

    Source: arXiv 2405.19107, per token with the group's mean as the value. Confidence: inspired by.
    Use: stale samples, and many steps on one batch.
    Cost: as GRPO; every token is computed, also those without advantage.
    """

    name: str = "dro"
    loss: SerializeAsAny[PolicyLoss] = DroLoss()
    """The policy loss."""
