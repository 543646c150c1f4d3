"""DigiRL: step-level advantage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializeAsAny

from agentjet.recipes.critic import Critic, gae, scattered, steps
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.shelf.rft import CrossEntropy
from agentjet.timeline.batch import TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor


class Digirl(Critic):
    """DigiRL: imitation of the calls after which success became more likely.

        A_k = P(o_(k+1)) - P(o_k) - margin + r_k + sum over j >= k of gamma^(j-k) r_j
        L = -1[A_k > 0] log(policy) + cross-entropy of P(o_k) for "some later reward is above 0"

    o_k is the prompt of call k; after the last call P is 0. r_k is the reward of the call; the last one has that of the
    episode, too.
    Source: arXiv 2406.11896 and github.com/DigiRL-agent/digirl at c74ec34, its step-level part: one critic instead of
    the smaller of two, a head on the policy, and no replay buffer. Confidence: reproduced in this part.
    Use: device control and web tasks with rewards of 0 or 1 and many turns.
    Cost: one more forward pass for the values; every token is computed.
    """

    name: str = "digirl"
    loss: SerializeAsAny[PolicyLoss] = CrossEntropy()
    """The policy loss."""
    gamma: float = Field(0.5, ge=0, le=1)
    """Discount of later rewards per call."""
    margin: float = Field(0.05, ge=0)
    """Cost of each call."""

    @property
    def reads(self) -> tuple[str, ...]:
        return (*super().reads, "succeeds", "is_start")

    def estimates(self, batch: TrainingBatch) -> dict[str, NDArray[np.float64]]:
        found, size = steps(batch), batch.forest.num_targets
        first = found.order[found.starts]
        sequence_K, rewards_K = found.sequence[found.ends], found.rewards[found.ends]
        probability_K = 1 / (1 + np.exp(-batch.forest["value"][first].astype(np.float64)))
        # Without values and with lambda 1, the advantage is the discounted sum of the rewards.
        later_K = gae(rewards_K, np.zeros(len(first)), sequence_K, self.gamma, 1.0)
        goes_on_K = np.append(sequence_K[1:] == sequence_K[:-1], False)
        next_K = np.where(goes_on_K, np.append(probability_K[1:], 0.0), 0.0)
        better_K = next_K - probability_K - self.margin + rewards_K + later_K > 0
        chosen = np.zeros(size)
        chosen[found.order] = np.repeat(better_K, found.ends + 1 - found.starts)
        return {
            "chosen": chosen,
            "succeeds": scattered((later_K > 0).astype(np.float64), first, size),
            "is_start": scattered(np.ones(len(first)), first, size),
        }

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        return np.asarray(batch.forest["chosen"])

    def value_loss(self, columns: Mapping[str, Tensor]) -> Tensor:
        logit = columns["new_value"]
        entropy = logit.clamp(min=0) - columns["succeeds"] * logit + (-logit.abs()).exp().log1p()
        return columns["is_start"] * entropy
