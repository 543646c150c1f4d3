"""Meters of a policy: how much its parts wait in a step, and how many replicas it should have.

`StepMeter` gives the metrics `sampler/*` and `learner/*` of a step.

The autoscaler: a replica samples `sampler.max_concurrent` completions at a time. So the number wanted is that of all
completions, running or waiting, divided by it, within `compute.samplers`. Replicas start slowly, and the last
completions of a batch take long. So the number rises to what was wanted during all of the last `RISE_SECONDS`, and
falls to the most that was wanted in the last `FALL_SECONDS`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from agentjet.types import SamplerBounds

TOKEN_SECONDS = 0.2
"""Longest time before a received token that counts as sampling. The rest is a pause."""
RISE_SECONDS, FALL_SECONDS = 10, 300
"""Observations, one a second, after which the number of replicas rises or falls."""


class StepMeter:
    """Measures the step of a policy from one publish to the next: what waited for what."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._received_at = clock()
        self._sampled = 0.0
        """Seconds of the step in which at least one completion got tokens."""
        self._waiting: list[int] = []
        """Completions that waited for a place at a replica, in each second of the step."""
        self._learning_since: float | None = None
        """Time at which the first operation of the step was requested."""
        self._overlapped = 0.0
        """Seconds after that in which at least one completion got tokens."""

    def received(self, num_tokens: int) -> None:
        """Count a piece: the time since the last one, but at most `TOKEN_SECONDS` per token."""
        now = self._clock()
        seconds = min(now - self._received_at, num_tokens * TOKEN_SECONDS)
        self._sampled += seconds
        if self._learning_since is not None:
            self._overlapped += min(seconds, now - self._learning_since)
        self._received_at = now

    def start_learning(self) -> None:
        """Call for every operation; the first one of a step counts."""
        if self._learning_since is None:
            self._learning_since = self._clock()

    def count_waiting(self, number: int) -> None:
        """Call once a second with the number of completions that wait for a place at a replica."""
        self._waiting.append(number)

    def finish(self) -> dict[str, float]:
        """Returns the metrics of the step when its weights are published, and begins the next step."""
        now = self._clock()
        step = max(1e-9, now - self._began)
        metrics = {"sampler/idle": max(0.0, 1 - self._sampled / step)}
        if self._waiting:
            metrics["sampler/waiting"] = sum(self._waiting) / len(self._waiting)
        if self._learning_since is not None:
            learning = max(1e-9, now - self._learning_since)
            metrics["learner/idle"] = max(0.0, 1 - learning / step)
            metrics["sampler/overlap"] = min(1.0, self._overlapped / learning)
        self._began, self._sampled, self._overlapped, self._learning_since, self._waiting = now, 0.0, 0.0, None, []
        return metrics


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
