"""Direct advantage policy optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny, model_validator

from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import Need
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, select

if TYPE_CHECKING:
    from torch import Tensor


class DirectAdvantageLoss(PolicyLoss):
    """The squared distance between a turn's log-ratio and its advantage, as a share of each token."""

    name: str = "direct_advantage"
    beta: float = Field(0.1, gt=0)
    """Divisor of the advantage: smaller moves the policy further from the reference."""
    max_log_ratio: float = Field(10.0, gt=0)
    """Largest log-ratio of a turn, in both directions, to which the policy is moved."""

    reads: ClassVar[tuple[str, ...]] = ("sequence_log_ratio", "advantage", "turn_tokens")
    reports: ClassVar[tuple[str, ...]] = ()
    aggregation: ClassVar[str] = "sequence_sum"

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = columns["turn_tokens"]
        wanted = (columns["advantage"] / self.beta).clamp(-self.max_log_ratio, self.max_log_ratio)
        gap = tokens * columns["sequence_log_ratio"] - wanted
        # The second term is 0. Its gradient, summed over the tokens, is that of half the squared gap.
        return gap**2 / (2 * tokens) + gap * (logp - logp.detach()), {}


class DirectAdvantage(PolicyGradient):
    """Direct advantage: regression of each turn's log-ratio to the reference on the turn's advantage.

        L_k = (A_k / beta - log(policy / reference))^2 / 2, with the sum of the turn's tokens

    Source: arXiv 2412.18279, from general knowledge of it; `min_advantage` and the bound are ours. Confidence:
    inspired by.
    Use: turns with a known advantage: the agent finishes with `by_turn`, the change of the estimated probability of
    success by each turn, for instance from several completions of each state. Samples may be of any age. The metric
    `policy/mismatch_kl` compares with the reference.
    Cost: two more forward passes.
    """

    name: str = "direct_advantage"
    loss: SerializeAsAny[PolicyLoss] = DirectAdvantageLoss()
    """The policy loss."""
    min_advantage: float = Field(0.05, ge=0)
    """Turns with a smaller advantage are left out. 0: none."""

    needs_call_rewards: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"reference"}

    @model_validator(mode="after")
    def _loss_is_own(self) -> Self:
        if not isinstance(self.loss, DirectAdvantageLoss):
            raise ValueError(f"loss = {self.loss.name!r}: the recipe {self.name!r} is its loss; leave loss out")
        return self

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        assert batch.facts is not None
        return np.nan_to_num(batch.facts.call_rewards)[batch.forest["call"]].astype(np.float32)

    def counting(self, batch: TrainingBatch, advantage: NDArray[np.float32]) -> NDArray[np.bool_]:
        return np.asarray(np.abs(advantage) >= self.min_advantage)

    def columns(
        self, batch: TrainingBatch, outputs: Mapping[str, NDArray[np.float32]]
    ) -> tuple[Forest, dict[str, float]]:
        """Each turn is a sequence, and the reference has the place of the sampling policy."""
        call = batch.forest["call"]
        tokens = np.bincount(call)[call] if len(call) else call
        forest = batch.forest.with_columns(sequence=call, logprob=outputs["reference"], turn_tokens=tokens)
        _, metrics = super().columns(batch, outputs)
        advantage = self.token_advantages(batch)
        return select(forest.with_columns(advantage=advantage), self.counting(batch, advantage)), metrics
