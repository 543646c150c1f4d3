"""Estimates of an evaluation, each with a 95 % interval.

An evaluation's tasks are the sample, and the repeats of a task tell about that task only: what is resampled is tasks,
with all their repeats (cluster bootstrap). Where every task's value is 0 or 1 resampling would see no more than the
share, and nothing at all at 0 or 1: there the interval is Wilson's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000
SEED = 0
"""Of the resampling: the same values, the same interval."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `num_tasks` tasks and its 95 % interval, from `low` to `high`; NaN where there is none to be had."""

    value: float
    low: float
    high: float
    num_tasks: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3f}"
        return f"{self.value:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a task. The interval is Wilson's when all are 0 or 1, else the percentile bootstrap's
    (Efron 1979) over tasks; a single task that is neither has none.
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean, count = math.fsum(values) / len(values), len(values)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson_interval(sum(values), count), count)
    if count == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    draw = random.Random(SEED)
    means = sorted(math.fsum(draw.choices(values, k=count)) / count for _ in range(RESAMPLES))
    cut = round(0.025 * RESAMPLES)
    return Estimate(mean, means[cut], means[-1 - cut], count)


def pass_at_k(num_right: int, num_tries: int, k: int) -> float:
    """The chance that one of `k` tries is right, of which `num_right` of `num_tries` were: 1 - C(n-c, k) / C(n, k).

    Unbiased, other than 1 - (1 - c/n)^k (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1).
    Raises `ValueError` when fewer than `k` were tried.
    """
    if not 1 <= k <= num_tries:
        raise ValueError(f"pass@{k} needs at least {k} tries of a task, and k at least 1; there are {num_tries}")
    return 1.0 - math.comb(num_tries - num_right, k) / math.comb(num_tries, k)


def wilson_interval(successes: float, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927), 95 % by default; (0, 1) when nothing was tried.

    Unlike the normal approximation it stays inside [0, 1] and does not shrink to nothing at 0 or 1.
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)
