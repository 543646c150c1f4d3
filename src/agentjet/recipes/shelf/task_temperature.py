"""Temperature by task."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.types import MAX_TEMPERATURE


class TaskTemperature(Grpo):
    """Temperature by task: GRPO that samples a task hotter, the more its episodes agree.

        T = job.temperature x (1 + spread |2p - 1|), p = share of the task's recent episodes with reward >= pass_reward

    Source: HAPO's adaptive temperature (github.com/starriver030515/HAPO at 7671dde) acts on each token, and this
    recipe on each group. Confidence: inspired by; the rule is ours.
    Use: rewards of 0 and 1, if many groups have equal rewards (metric `groups/zero_variance`).
    Cost: as GRPO.
    """

    name: str = "task_temperature"
    pass_reward: float = 0.5
    """Smallest reward of an episode that passed."""
    spread: float = Field(0.3, gt=0)
    """Largest increase of the temperature, as a part of it."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        rate = task.pass_rate(self.pass_reward)
        if rate is None:
            return default
        temperature = default.temperature * (1 + self.spread * abs(2 * rate - 1))
        return replace(default, temperature=min(MAX_TEMPERATURE, temperature))
