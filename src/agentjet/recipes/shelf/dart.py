"""DART's data curation."""

from __future__ import annotations

import math
from dataclasses import replace

from pydantic import Field

from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.recipes.shelf.stepwise_grpo import StepwiseGrpo
from agentjet.section import Int64


class Dart(StepwiseGrpo):
    """DART: step-wise GRPO, fewer episodes of easy tasks, and a turn limit from a task's own successes.

        episodes = N if p <= easy_rate, else max(min_episodes, round(N (1 - p) / (1 - easy_rate)))
        turns    = min(max_turns, ceil(slack x most calls of a recent success)); max_turns before the first success
        N = job.group_size, p = share of the task's recent episodes with reward >= pass_reward
        advantages as in `stepwise_grpo`

    Source: github.com/Computer-use-agents/dart-gui at e0e606d, and notes about it. Confidence: inspired by; both rules
    are ours. `keep = 0.8`, `correction = "tis"` and `correction_high = 1` add its other two parts.
    Use: tasks of very different difficulty and length, such as computer use. Agents end at `episode.max_turns`.
    Cost: less than GRPO: fewer and shorter episodes.
    """

    name: str = "dart"
    keep: float = Field(1.0, gt=0, le=1)
    """Share of the batch's turns that is trained, the most uncertain ones. 1: all, without entropies."""
    pass_reward: float = 0.5
    """Smallest reward of an episode that succeeded."""
    easy_rate: float = Field(0.6, ge=0, lt=1)
    """Success rate above which a task gets fewer episodes."""
    min_episodes: Int64 = Field(2, ge=2)
    """Fewest episodes of a group."""
    max_turns: Int64 = Field(30, ge=1)
    """Turn limit of tasks without a success, and of all tasks."""
    slack: float = Field(1.2, ge=1)
    """Turn limit as a multiple of the longest recent success."""

    def rollout(self, task: TaskStats, default: Rollout, version: int) -> Rollout:
        num, rate = default.episodes, task.pass_rate(self.pass_reward) or 0.0
        if rate > self.easy_rate:
            fewer = round(num * (1 - rate) / (1 - self.easy_rate))
            num = max(min(self.min_episodes, num), min(num, fewer))
        return replace(default, episodes=num, max_turns=self.turn_limit(task))

    def turn_limit(self, task: TaskStats) -> int:
        """Returns the turn limit of the task. Calls of all roles count as the length, so it is never too short."""
        recent = zip(task.recent_rewards, task.recent_turns, strict=True)
        longest = max((turns for reward, turns in recent if reward >= self.pass_reward), default=0)
        return min(self.max_turns, max(longest, math.ceil(self.slack * longest))) if longest else self.max_turns
