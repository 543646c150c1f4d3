"""Stratified GRPO."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from agentjet.recipes.policy_gradient import FloatArray
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.section import Int64
from agentjet.timeline.batch import TrainingBatch


class StratifiedGrpo(Grpo):
    """Stratified GRPO: episodes are compared with those of the same number of turns, blended with GRPO.

        A_i = alpha GRPO(episodes of the stratum) + (1 - alpha) GRPO(episodes of the group)
        stratum = min(calls of the role in the episode, max_turns)

    Source: arXiv 2510.06214, read in notes about it. Confidence: inspired by; alpha and strata are ours.
    Use: search and tool agents whose episodes differ in structure.
    Cost: as GRPO.
    """

    name: str = "stratified_grpo"
    alpha: float = Field(0.8, ge=0, le=1)
    """Weight of the comparison within strata. 0: GRPO."""
    max_turns: Int64 = Field(4, ge=1)
    """Episodes with this number of turns or more are one stratum."""

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        turns_ER = np.zeros(facts.spoke.shape, np.int64)
        np.add.at(turns_ER, (facts.call_episode, facts.call_role), 1)
        advantages_ER = np.zeros(facts.spoke.shape)
        for episodes, role, rewards_G in self.comparisons(facts):
            strata_G = np.minimum(turns_ER[episodes, role], self.max_turns)
            within_G = np.zeros_like(rewards_G)
            for stratum in np.unique(strata_G):
                within_G[strata_G == stratum] = self.group_advantages(rewards_G[strata_G == stratum])
            whole_G = self.group_advantages(rewards_G)
            advantages_ER[episodes, role] = self.alpha * within_G + (1 - self.alpha) * whole_G
        return advantages_ER
