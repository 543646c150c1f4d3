"""ArCHer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.critic import Critic, gae, scattered, steps
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class Archer(Critic):
    """ArCHer: a critic of whole utterances gives each call one advantage; the policy learns its tokens.

        A_k = Q(o_k, a_k) - V(o_k), the same for all tokens of call k
        Q(o_k, a_k) learns the lambda-return of r_k + gamma V(o_(k+1));  V(o_k) learns Q(o_k, a_k)

    o_k is the prompt of call k, and a_k its answer without the last token. In the first batch Q = V = 0: only the
    critic learns.
    Source: arXiv 2402.19446 and github.com/YifeiZhou02/ArCHer at 7c771a7. Confidence: inspired by. It has separate
    double critics, a replay buffer and new utterances at old observations; here the heads are on the policy, the
    batch is its own buffer, and lambda = 0 gives its one-step targets.
    Use: dialogues and tools with many turns. Rewards of turns come at the ends of their calls.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "archer"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per call."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda of the target of Q: 1 trusts the rewards, 0 trusts V of the next prompt."""

    head_names: ClassVar[tuple[str, ...]] = ("value", "action_value")

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "value_goal", "is_start", "action_goal", "is_end")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        found, size = steps(batch), batch.forest.num_targets
        first, last = found.order[found.starts], found.order[found.ends]
        value_K = batch.forest["value"][first].astype(np.float64)
        action_K = batch.forest["action_value"][last].astype(np.float64)
        rewards_K = found.rewards[found.ends]
        goal_K = value_K + gae(rewards_K, value_K, found.sequence[found.ends], self.gamma, self.lam)
        advantage = np.zeros(size)
        advantage[found.order] = np.repeat(action_K - value_K, found.ends + 1 - found.starts)
        ones = np.ones(len(first))
        return {
            "utterance_advantage": advantage,
            "value_goal": scattered(action_K, first, size),
            "is_start": scattered(ones, first, size),
            "action_goal": scattered(goal_K, last, size),
            "is_end": scattered(ones, last, size),
        }

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.asarray(batch.forest["utterance_advantage"])

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        value_error = columns["is_start"] * (columns["new_value"] - columns["value_goal"])
        action_error = columns["is_end"] * (columns["new_action_value"] - columns["action_goal"])
        return value_error**2 + action_error**2
