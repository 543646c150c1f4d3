"""`Rollout` and `TaskStats`: how the next group of a task is sampled, and what is known about the task.

The gateway asks the hook `Recipe.rollout` when a group is about to begin. The answer is journalled with the group. It
holds for all its episodes, also after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from agentjet.types import MAX_TEMPERATURE, MIN_TEMPERATURE

RECENT_EPISODES = 32
"""Episodes of a task whose rewards and turns are kept. A policy changes, so older ones say little."""
MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class TaskStats:
    """Statistics of the groups of a task that have ended, also of those that were dropped, and the state of the run."""

    task_set: str
    task_id: str
    num_groups: int = 0
    num_episodes: int = 0
    """Finished episodes of these groups."""
    last_version: int = -1
    """Policy version at which the newest of these groups began; -1 before the first."""
    recent_rewards: tuple[float, ...] = ()
    """Rewards of the newest episodes, at most 32, the newest last."""
    recent_turns: tuple[int, ...] = ()
    """Calls of the same episodes."""
    last_step: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the run's newest learned batch, among them those of the recipe; empty before the first. They are not
    stored with the task."""

    @property
    def mean_reward(self) -> float | None:
        """Mean of `recent_rewards`; None before the first group."""
        return math.fsum(self.recent_rewards) / len(self.recent_rewards) if self.recent_rewards else None

    def pass_rate(self, pass_reward: float) -> float | None:
        """Share of the recent episodes whose reward is `pass_reward` or more; None before the first group."""
        passed = sum(reward >= pass_reward for reward in self.recent_rewards)
        return passed / len(self.recent_rewards) if self.recent_rewards else None

    def with_group(self, rewards: Sequence[float], turns: Sequence[int], version: int) -> TaskStats:
        """Returns the statistics after one more group, which began at `version`."""
        return replace(
            self,
            num_groups=self.num_groups + 1,
            num_episodes=self.num_episodes + len(rewards),
            last_version=max(self.last_version, version),
            recent_rewards=(*self.recent_rewards, *rewards)[-RECENT_EPISODES:],
            recent_turns=(*self.recent_turns, *turns)[-RECENT_EPISODES:],
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """The sampling of a group. A recipe returns `replace(default, ...)`."""

    episodes: int
    """Number of episodes of the group, at most `job.group_size`."""
    temperature: float
    """Temperature of all calls. A value other than that of the job also replaces the one that a call sets."""
    max_turns: int = 0
    """Maximum number of calls of each role of an episode. 0: no maximum."""
    skip: str = ""
    """Reason not to begin the task now; empty to begin it."""

    def checked(self, default: Rollout, smallest_group: int) -> Rollout:
        """Returns the same in plain numbers. Raises `ValueError` naming the wrong field."""
        bounds: dict[str, tuple[Any, type, float, float]] = {
            "episodes": (self.episodes, Integral, smallest_group, default.episodes),
            "temperature": (self.temperature, Real, MIN_TEMPERATURE, MAX_TEMPERATURE),
            "max_turns": (self.max_turns, Integral, 0, 2**31),
        }
        for name, (value, kind, low, high) in bounds.items():
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                what = "a whole number" if kind is Integral else "a number"
                raise ValueError(f"{name} = {value!r}: give {what} from {low:g} to {high:g}")
        skip: object = self.skip
        if not isinstance(skip, str):
            raise ValueError(f"skip = {skip!r}: give a reason as text, or ''")
        return Rollout(int(self.episodes), float(self.temperature), int(self.max_turns), skip[:MAX_REASON])
