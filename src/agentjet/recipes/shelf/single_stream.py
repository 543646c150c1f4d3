"""Single-stream policy optimisation."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from agentjet.recipes.policy_gradient import EPS, FloatArray, PolicyGradient
from agentjet.timeline.batch import TrainingBatch


class SingleStream(PolicyGradient):
    """Single stream: the reward minus the mean of the task's earlier episodes, normalised over the batch.

        B_i = r_i - v_i,  A_i = (B_i - mean(B)) / (std(B) + 1e-6)
        v_i = mean reward of the task's newest 32 episodes before the group; before the first group the batch's mean

    Source: arXiv 2509.13232, of which a moving mean replaces the value tracker. Confidence: inspired by.
    Use: one episode of each task at a time (`group_size = 1`, `min_group_size = 1`), in several epochs over the tasks.
    Cost: as GRPO, and no group waits for its slowest episode.
    """

    name: str = "single_stream"

    smallest_group: ClassVar[int] = 1

    def sequence_advantages(self, batch: TrainingBatch) -> FloatArray:
        facts = batch.facts
        assert facts is not None
        means_E = np.full(len(facts.rewards), np.nan) if facts.task_means is None else facts.task_means
        values_E = np.where(np.isnan(means_E), facts.rewards.mean(), means_E)
        found = [
            (episode, role, reward - values_E[episode])
            for episodes, role, rewards_G in self.comparisons(facts)
            for episode, reward in zip(episodes, rewards_G, strict=True)
        ]
        surprise = np.array([value for *_, value in found])
        advantages_ER = np.zeros(facts.spoke.shape)
        if len(found) > 1 and np.ptp(surprise) > 0:
            normalised = (surprise - surprise.mean()) / (surprise.std(ddof=1) + EPS)
            for (episode, role, _), advantage in zip(found, normalised, strict=True):
                advantages_ER[episode, role] = advantage
        return advantages_ER
