"""GiGPO: groups of episodes, and in them groups of calls after the same observation."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray, centred, compared_rewards, rewards_to_go
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import observations


class Gigpo(Grpo):
    """GiGPO: the advantage of the episode, plus that of the call among calls of the group after the same observation.

        A = A_episode + step_weight A_step,  A_episode = r - mean(r)
        A_step = G_k - mean of G over calls with the same observation,  G_k = r_k + gamma G_{k+1}

    Source: arXiv 2505.10978, as in github.com/langfengQ/DrMAS at 19c632b. Confidence: reproduced. An observation is the
    text between the role's answer and its next call; without rewards of calls, the last call has the episode's reward.
    If the template rewrites earlier answers, calls rarely share an observation: set `job.history = "as_sampled"`.
    Use: environments whose states recur, such as web pages, households and games.
    Cost: as GRPO.
    """

    name: str = "gigpo"
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount of later calls."""
    step_weight: float = Field(1.0, ge=0)
    """Weight of the advantage of the call. 0: that of the episode only."""
    normalise: bool = False
    """Divide both advantages by the standard deviation, as GRPO does."""

    equal_rewards_teach: ClassVar[bool] = True

    def group_advantages(self, rewards_G: FloatArray) -> FloatArray:
        return super().group_advantages(rewards_G) if self.normalise else centred(rewards_G)

    def token_advantages(self, batch: TrainingBatch) -> NDArray[np.float32]:
        facts = batch.facts
        assert facts is not None
        sums_C = rewards_to_go(facts, call_rewards(facts), self.gamma)
        is_compared_C = self.compared(facts)[facts.call_episode, facts.call_role]
        seen_C = observations(batch.forest)
        calls: dict[tuple[int, int, bytes], list[int]] = {}
        for call in np.flatnonzero(is_compared_C).tolist():
            if call in seen_C:
                place = int(facts.groups[facts.call_episode[call]]), int(facts.call_role[call]), seen_C[call]
                calls.setdefault(place, []).append(call)
        steps_C = np.zeros(len(sums_C))
        for same in calls.values():
            steps_C[same] = self.group_advantages(sums_C[same])
        return super().token_advantages(batch) + (self.step_weight * steps_C[batch.forest["call"]]).astype(np.float32)


def call_rewards(facts: Facts) -> FloatArray:
    """Returns the reward [C] of each call. If none is named for a role of an episode, its last call has the reward of
    the episode.
    """
    rewards_C = np.nan_to_num(facts.call_rewards)
    sequence_C = facts.call_episode * len(facts.roles) + facts.call_role
    last: dict[int, int] = {}
    for call in np.argsort(facts.call_turn, kind="stable").tolist():
        last[int(sequence_C[call])] = call
    named = set(sequence_C[~np.isnan(facts.call_rewards)].tolist())
    rewards_ER = compared_rewards(facts)
    for sequence, call in last.items():
        if sequence not in named:
            rewards_C[call] = np.nan_to_num(rewards_ER[facts.call_episode[call], facts.call_role[call]])
    return rewards_C
