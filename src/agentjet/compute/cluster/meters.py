"""Meters: what the parts of a policy waited for in a step, for the metrics `sampler/*` and `learner/*`."""

from __future__ import annotations

import time
from collections.abc import Callable

TOKEN_SECONDS = 0.2
"""Longest time before a received token that counts as sampling. The rest is a pause."""


class SamplingMeter:
    """Measures the time in which tokens of a policy were sampled, from the pieces as they arrive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        """Time so far in which at least one completion got tokens."""
        self._clock = clock
        self._until = clock()

    def received(self, num_tokens: int) -> None:
        """Count a piece: the time since the last one, but at most `TOKEN_SECONDS` per token."""
        now = self._clock()
        self.seconds += min(now - self._until, num_tokens * TOKEN_SECONDS)
        self._until = now


class StepMeter:
    """Measures the step of a policy from one publish to the next: what waited for what."""

    def __init__(self, sampling: SamplingMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._sampling = sampling
        self._clock = clock
        self._began = clock()
        self._sampled_before = 0.0
        self._waiting: list[int] = []
        """Completions that waited for a place at a replica, in each second of the step."""
        self._learning: tuple[float, float] | None = None
        """Time, and seconds of sampling, when the first operation of the step was requested."""

    def start_learning(self) -> None:
        """Call for every operation; the first one of a step counts."""
        if self._learning is None:
            self._learning = self._clock(), self._sampling.seconds

    def count_waiting(self, number: int) -> None:
        """Call once a second with the number of completions that wait for a place at a replica."""
        self._waiting.append(number)

    def finish(self) -> dict[str, float]:
        """Returns the metrics of the step when its weights are published, and begins the next step."""
        now, sampled = self._clock(), self._sampling.seconds
        step = max(1e-9, now - self._began)
        metrics = {"sampler/idle": max(0.0, 1 - (sampled - self._sampled_before) / step)}
        if self._waiting:
            metrics["sampler/waiting"] = sum(self._waiting) / len(self._waiting)
        if self._learning is not None:
            since, sampled_before = self._learning
            learning = max(1e-9, now - since)
            metrics["learner/idle"] = max(0.0, 1 - learning / step)
            metrics["sampler/overlap"] = min(1.0, (sampled - sampled_before) / learning)
        self._began, self._sampled_before, self._learning, self._waiting = now, sampled, None, []
        return metrics
