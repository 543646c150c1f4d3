"""Single-stream policy optimisation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from agentjet.recipes.policy_gradient import EPS, Comparison, FloatArray, PolicyGradient
from agentjet.timeline.batch import Facts, TrainingBatch


class SingleStream(PolicyGradient):
    """Single stream: the reward minus the mean of the task's earlier episodes, normalised over the batch.

        B_i = r_i - v_i,  A_i = (B_i - mean(B)) / (std(B) + 1e-6)
        v_i = mean reward of the task's newest 32 episodes before the group; before the first group the batch's mean,
        and for a role with named rewards the batch's mean of these

    Source: arXiv 2509.13232, of which a moving mean replaces the value tracker. Confidence: inspired by.
    Use: one episode of each task at a time (`group_size = 1`), in several epochs over the tasks.
    Cost: as GRPO, and no group waits for its slowest episode.
    """

    name: str = "single_stream"

    smallest_group: ClassVar[int] = 1
    reads_task_means: ClassVar[bool] = True
    no_kl_in_reward: ClassVar[str] = "compares the reward with those of earlier episodes"

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        surprises_ER = surprises(facts, self.comparisons(facts))
        found = surprises_ER[~np.isnan(surprises_ER)]
        if len(found) < 2 or np.ptp(found) == 0:
            return np.zeros_like(surprises_ER)
        advantages_ER: FloatArray = np.nan_to_num((surprises_ER - found.mean()) / (found.std(ddof=1) + EPS))
        return advantages_ER


def surprises(facts: Facts, comparisons: Iterable[Comparison]) -> FloatArray:
    """Returns r - v [E, R] of the episodes and roles that are compared; NaN for others.

    v is the mean of the task, which is of rewards of episodes. A named reward has the mean of the batch for its role.
    """
    means_E = np.full(len(facts.rewards), np.nan) if facts.task_means is None else facts.task_means
    values_E = np.where(np.isnan(means_E), facts.rewards.mean(), means_E)
    is_named_ER = ~np.isnan(facts.role_rewards)
    means_R = np.nan_to_num(facts.role_rewards).sum(0) / np.maximum(1, is_named_ER.sum(0))
    values_ER = np.where(is_named_ER, means_R, values_E[:, None])
    surprises_ER = np.full(facts.spoke.shape, np.nan)
    for episodes, role, rewards_G in comparisons:
        surprises_ER[episodes, role] = rewards_G - values_ER[episodes, role]
    return surprises_ER
