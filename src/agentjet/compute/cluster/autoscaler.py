"""The autoscaler: how many replicas a policy should have, by the completions in progress. No processes, no clock.

A replica samples `sampler.max_concurrent` completions at a time. So the number wanted is that of all completions,
running or waiting, divided by it, within `compute.samplers`. Replicas start slowly, and the last completions of a batch
take long. So the number rises to what was wanted during all of the last `RISE_SECONDS`, and falls to the most that was
wanted in the last `FALL_SECONDS`.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from agentjet.types import SamplerBounds

RISE_SECONDS, FALL_SECONDS = 10, 300
"""Observations, one a second, after which the number rises or falls."""


class Autoscaler:
    """Chooses the number of replicas of a policy within its bounds."""

    def __init__(self, bounds: SamplerBounds, max_concurrent: int) -> None:
        """`max_concurrent`: completions that a replica samples at a time."""
        self.bounds = bounds
        self._max_concurrent = max_concurrent
        self._wanted: deque[int] = deque(maxlen=FALL_SECONDS)
        """The numbers wanted in the last seconds, newest first."""

    def observe(self, num_replicas: int, num_completions: int) -> int:
        """Returns the number of replicas to have. Call it once a second with those that there are."""
        self._wanted.appendleft(self.bounds.clamp(-(-num_completions // self._max_concurrent)))
        rise, fall = min(islice(self._wanted, RISE_SECONDS)), max(self._wanted)
        if rise > num_replicas and len(self._wanted) >= RISE_SECONDS:
            return rise
        return fall if fall < num_replicas and len(self._wanted) == FALL_SECONDS else num_replicas
