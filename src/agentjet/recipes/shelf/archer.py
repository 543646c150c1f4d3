"""ArCHer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.critic import Critic, gae, scattered, steps
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class Archer(Critic):
    """ArCHer: a critic of whole utterances gives each call one advantage; the policy learns its tokens.

        d_k = r_k + gamma V(o_(k+1)) - V(o_k),  A_k = d_k + gamma lambda A_(k+1), the same for all tokens of call k
        V(o_k) learns A_k + V(o_k);  o_k is the prompt of call k, and V is 0 after the last call

    Source: arXiv 2402.19446 and github.com/YifeiZhou02/ArCHer at 7c771a7. Confidence: inspired by. Its actor has
    Q(o, a) - V(o) of double critics, because it samples new utterances at old prompts. Here the batch has the rewards
    and next prompts of its utterances: lambda = 0 gives the target of its Q.
    Use: dialogues and tools with many turns. Rewards of turns come at the ends of their calls.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "archer"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per call."""
    lam: float = Field(0.95, ge=0, le=1)
    """Lambda: 1 trusts the rewards, 0 trusts the value of the next prompt."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "return", "is_start")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        found, size = steps(batch), batch.forest.num_targets
        first = found.order[found.starts]
        values_K = batch.forest["value"][first].astype(np.float64)
        ends = found.ends
        advantages_K = gae(found.rewards[ends], values_K, found.sequence[ends], self.gamma, self.lam)
        advantage = np.zeros(size)
        advantage[found.order] = np.repeat(advantages_K, ends + 1 - found.starts)
        return {
            "utterance_advantage": advantage,
            "return": scattered(advantages_K + values_K, first, size),
            "is_start": scattered(np.ones(len(first)), first, size),
        }

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.asarray(batch.forest["utterance_advantage"])

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        return columns["is_start"] * (columns["new_value"] - columns["return"]) ** 2
