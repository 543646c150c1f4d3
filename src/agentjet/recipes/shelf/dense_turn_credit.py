"""Dense turn credit."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray, PolicyGradient, centred, rewards_to_go
from agentjet.section import Int64
from agentjet.timeline.batch import Facts, TrainingBatch


class DenseTurnCredit(PolicyGradient):
    """Dense turn credit: rewards of turns, as shares of the episode, compared with the same turn of the group.

        A_k = G_k - mean of G_k over the group,  G_k = r_k / n + gamma G_{k+1}
        n = number of turns with a positive reward in a won episode, else num_rewards

    Source: github.com/pearls-lab/meow-tea-taro at a9c248c, its placement of rewards; the comparison by turn is ours.
    Confidence: inspired by.
    Use: subgoals in long episodes. Agents finish with `by_turn` or `by_call`; an episode with a positive reward is won.
    A turn that no other episode of the group reaches has advantage 0.
    Cost: as GRPO.
    """

    name: str = "dense_turn_credit"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later turns."""
    num_rewards: Int64 = Field(0, ge=0)
    """Number of rewards in a complete episode, the divisor of lost ones. 0: the episode's number of turns."""

    needs_call_rewards: ClassVar[bool] = True
    compares_rewards: ClassVar[bool] = False

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = batch.facts
        assert facts is not None
        sums_C = rewards_to_go(facts, dense_rewards(facts, self.num_rewards), self.gamma)
        place_C = np.stack([facts.groups[facts.call_episode], facts.call_role, facts.call_turn], axis=1)
        _, same_C = np.unique(place_C, axis=0, return_inverse=True)
        advantages_C = np.zeros_like(sums_C)
        for place in range(int(same_C.max(initial=-1)) + 1):
            calls = np.flatnonzero(same_C.reshape(-1) == place)
            advantages_C[calls] = centred(sums_C[calls])
        return advantages_C[batch.forest["call"]].astype(np.float32)


def dense_rewards(facts: Facts, num_rewards: int) -> FloatArray:
    """Returns the reward [C] of each call as a share of its role's rewards in its episode."""
    rewards_C = np.nan_to_num(facts.call_rewards)
    counts_ER, positive_ER = np.zeros((2, *facts.spoke.shape))
    np.add.at(counts_ER, (facts.call_episode, facts.call_role), 1)
    np.add.at(positive_ER, (facts.call_episode, facts.call_role), rewards_C > 0)
    most_ER = np.full_like(counts_ER, num_rewards) if num_rewards else counts_ER
    divisors_ER = np.where(facts.rewards[:, None] > 0, positive_ER, most_ER)
    return np.asarray(rewards_C / np.maximum(1, divisors_ER)[facts.call_episode, facts.call_role])
