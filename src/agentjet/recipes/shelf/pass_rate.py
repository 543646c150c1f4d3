"""Pass-rate filter."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from pydantic import Field, model_validator

from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.grpo import Grpo
from agentjet.section import Int64


class PassRate(Grpo):
    """Pass-rate filter: GRPO without tasks that were always or never solved lately.

        skip the task if p <= low or p >= high, until `retest` versions after its last group
        p = share of the task's recent episodes with reward >= pass_reward

    Source: KARL keeps prompts with an intermediate pass rate, read in notes about it. Confidence: inspired by; the test
    after a while is ours.
    Use: large task sets with many tasks that are too easy or too hard. It saves their episodes, while dynamic sampling
    (`drop_zero_variance`) drops them afterwards.
    Cost: as GRPO.
    """

    name: str = "pass_rate"
    pass_reward: float = 0.5
    """Smallest reward of an episode that passed."""
    low: float = Field(0.0, ge=-1, le=1)
    """Pass rate up to which a task is skipped. -1: hard tasks are not skipped."""
    high: float = Field(1.0, ge=0, le=2)
    """Pass rate from which a task is skipped. 2: easy tasks are not skipped."""
    min_episodes: Int64 = Field(8, ge=1)
    """A task with fewer episodes so far is not skipped."""
    retest: Int64 = Field(20, ge=1)
    """Policy versions after which a skipped task is sampled again."""

    @model_validator(mode="after")
    def _some_rate_is_kept(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}: every task would be skipped")
        return self

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        rate = task.pass_rate(self.pass_reward)
        if rate is None or task.num_episodes < self.min_episodes or version - task.last_version >= self.retest:
            return default
        if self.low < rate < self.high:
            return default
        return replace(default, skip=f"{rate:.0%} of its recent episodes passed")
