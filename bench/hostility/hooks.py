"""Recipes with a hook that sleeps, for `bench.lag`."""

from __future__ import annotations

import time
from typing import Any

from agentjet.recipes.baselines import Grpo


class Sleepy(Grpo):
    """GRPO with a parameter."""

    seconds: float = 40.0
    """Seconds that the hook sleeps."""


class SleepyColumns(Sleepy):
    """A hook next to the weights."""

    def columns(self, batch: Any, outputs: Any) -> Any:
        time.sleep(self.seconds)
        return super().columns(batch, outputs)


class SleepyRollout(Sleepy):
    """A hook of the gateway."""

    def rollout(self, task: Any, default: Any, version: int) -> Any:
        time.sleep(self.seconds)
        return default
