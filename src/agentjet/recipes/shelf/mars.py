"""MARS: rewards of turns."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.policy_gradient import PolicyGradient, rewards_to_go
from agentjet.timeline.batch import TrainingBatch


class Mars(PolicyGradient):
    """MARS turn-level: rewards of turns, centred for each role, summed from each turn to the end.

        A_k = sum over turns j >= k of gamma^(j - k) (r_j - mean of the role's turn rewards in the task set)

    Source: github.com/thu-nics/MARS at 5979f75, its core: without the whitenings, and without the
    second mean of each role, of the sums. Confidence: reproduced in this part.
    Use: multi-turn games and tools whose turns have rewards. Agents finish with `by_turn` or `by_call`; a call without
    a reward has 0, and the reward of the episode is not used.
    Cost: as GRPO.
    """

    name: str = "mars"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later turns."""

    needs_call_rewards: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 1
    compares_rewards: ClassVar[bool] = False

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = batch.facts
        assert facts is not None
        rewards_C = np.nan_to_num(facts.call_rewards)
        task_set_C = np.unique([task_set for task_set, _ in facts.tasks], return_inverse=True)[1][facts.call_episode]
        for place in set(zip(task_set_C.tolist(), facts.call_role.tolist(), strict=True)):
            own_C = (task_set_C == place[0]) & (facts.call_role == place[1])
            rewards_C[own_C] -= rewards_C[own_C].mean()
        advantages_C = rewards_to_go(facts, rewards_C, self.gamma)
        return advantages_C[batch.forest["call"]].astype(np.float32)
