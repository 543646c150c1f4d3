"""RAPO with pruning."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.rapo import Rapo
from agentjet.section import Int64


class RapoPruning(Rapo):
    """RAPO with pruning: `rapo` that no longer samples solved tasks.

        skip the task if p >= solved_rate, p = share of its recent episodes with reward > 0.5

    Source: Fathom-DeepResearch, read in notes about it. Confidence: inspired by; `solved_rate` and `retest` are ours,
    and tasks are pruned after each group instead of each epoch. Without RAPO's replay of an earlier success.
    Use: several epochs over one task set.
    Cost: less than GRPO: solved tasks are not sampled.
    """

    name: str = "rapo_pruning"
    solved_rate: float = Field(0.9, gt=0, le=1)
    """Pass rate from which a task is solved."""
    min_episodes: Int64 = Field(8, ge=1)
    """A task with fewer episodes so far is not pruned."""
    retest: Int64 = Field(0, ge=0)
    """Policy versions after which a solved task is sampled again. 0: never."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        passed = [reward > 0.5 for reward in task.recent_rewards]
        if task.num_episodes < self.min_episodes or sum(passed) < self.solved_rate * len(passed):
            return default
        if self.retest and version - task.last_version >= self.retest:
            return default
        return replace(default, skip="it is solved")
