"""The workload of `bench.capacity`: episodes with long-tailed numbers of calls, tokens and seconds between calls.

Measurement and simulation play the same episodes: episode `n` of a seed is always the same one.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LongTail:
    """A log-normal distribution, cut at `most`. With `sigma` 0 each value is the mean."""

    mean: float
    sigma: float
    most: float

    def draw(self, rng: random.Random) -> float:
        if not self.sigma:
            return self.mean
        return min(self.most, rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma))


class Turn(NamedTuple):
    """Seconds before a call, new prompt tokens, sampled tokens, and True if the answer is streamed."""

    seconds: float
    context: int
    completion: int
    streams: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """The distributions of an episode. `first_context` are the prompt tokens of the first call."""

    calls: LongTail = LongTail(8, 0.8, 64)
    seconds: LongTail = LongTail(3.0, 1.2, 120.0)
    first_context: int = 1000
    context: LongTail = LongTail(300, 1.0, 4000)
    completion: LongTail = LongTail(300, 1.0, 4000)
    streamed: float = 0.5
    """Fraction of the calls."""
    seed: int = 0

    def episode(self, number: int) -> list[Turn]:
        rng = random.Random(self.seed * 1_000_003 + number)
        turns = []
        for turn in range(max(1, round(self.calls.draw(rng)))):
            context = max(1, round(self.context.draw(rng))) if turn else self.first_context
            completion = max(1, round(self.completion.draw(rng)))
            turns.append(Turn(self.seconds.draw(rng), context, completion, rng.random() < self.streamed))
        return turns


AGENTS = Workload()
"""Agents with tools: 8 calls of 300 tokens, 3 s between two calls."""
