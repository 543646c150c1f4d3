"""From scores of seeds to a verdict: Welch's test at pre-declared looks, equivalence by two one-sided tests, Holm.

Pure functions on numbers; what is run, and when, is the scheduler's. Verdicts come from Welch's t because a percentile
bootstrap of three to five seeds finds differences in noise 12 to 21 times in a hundred. Looks are priced: testing at
every look at the full alpha would find three times too many. A verdict and its interval never disagree, since the
verdict is read off the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray
from scipy import integrate, optimize, special, stats

from agentjet.research.models import Verdict

EXACT_ARRANGEMENTS = 20_000
"""A permutation test of more arrangements than these is sampled."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of one sample minus the mean of another, with Welch's standard error and degrees of freedom.

    Source: B. L. Welch, Biometrika 34 (1947), with Satterthwaite's degrees of freedom.
    """

    estimate: float
    error: float
    degrees: float

    def p_value(self) -> float:
        """Two-sided, of no difference."""
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return float(2 * special.stdtr(self.degrees, -abs(self.estimate) / self.error))

    def interval(self, level: float) -> tuple[float, float]:
        """Two-sided, missed with probability `level`."""
        half = float(special.stdtrit(self.degrees, 1 - level / 2)) * self.error if self.error else 0.0
        return self.estimate - half, self.estimate + half


def welch(a: Sequence[float], b: Sequence[float]) -> Difference:
    """`a` minus `b`, of two or more scores each."""
    if min(len(a), len(b)) < 2:
        raise ValueError(f"a spread needs two scores each, not {len(a)} and {len(b)}")
    parts = [variance(x) / len(x) for x in (a, b)]
    total = sum(parts)
    estimate = float(np.mean(a) - np.mean(b))
    if total == 0:
        return Difference(estimate, 0.0, float(len(a) + len(b) - 2))
    weights = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    return Difference(estimate, math.sqrt(total), total**2 / weights)


def variance(scores: Sequence[float]) -> float:
    """Unbiased; exactly 0 for scores that are all the same, whose mean may be rounded to another number."""
    return 0.0 if min(scores) == max(scores) else float(np.var(scores, ddof=1))


def permutation_p(a: Sequence[float], b: Sequence[float], *, seed: int = 0, draws: int = 9_999) -> float:
    """Two-sided p-value of the difference of means when labels are exchangeable: exact where few arrangements exist."""
    pooled = np.asarray([*a, *b], dtype=np.float64)
    observed = abs(float(np.mean(a) - np.mean(b)))
    if math.comb(len(pooled), len(a)) <= EXACT_ARRANGEMENTS:
        chosen = np.array(list(combinations(range(len(pooled)), len(a))))
        extra = 0
    else:
        chosen = np.random.default_rng(seed).permuted(np.tile(np.arange(len(pooled)), (draws, 1)), axis=1)[:, : len(a)]
        extra = 1
    sums = pooled[chosen].sum(axis=1)
    differences = np.abs(sums / len(a) - (pooled.sum() - sums) / len(b))
    as_far = int(np.count_nonzero(differences >= observed - 1e-12 * (1 + observed)))
    return (as_far + extra) / (len(chosen) + extra)


# ---- looks ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def nominal_level(looks: tuple[int, ...], alpha: float) -> float:
    """The two-sided level each look is tested at, the same for all, so that all of them together err at `alpha`.

    Pocock's boundary (Biometrika 64, 1977) for looks at any numbers of seeds, found by the recursive integration of
    Armitage, McPherson and Rowe (1969). For 4, 8, 12 seeds and .05 it is Pocock's .0221.
    """
    if len(looks) == 1:
        return alpha
    return float(optimize.brentq(lambda level: any_crossing(looks, level) - alpha, alpha / len(looks), alpha))


def any_crossing(looks: tuple[int, ...], level: float) -> float:
    """The chance that a normal mean without a difference crosses the two-sided `level` at one of the looks."""
    bound = float(stats.norm.ppf(1 - level / 2))
    points, weights = np.polynomial.legendre.leggauss(96)
    grid = bound * math.sqrt(looks[0]) * points  # of the sum of the scores so far
    density = stats.norm.pdf(grid, scale=math.sqrt(looks[0]))
    inside = float(np.sum(weights * bound * math.sqrt(looks[0]) * density))
    for before, now in pairwise(looks):
        reach, old = bound * math.sqrt(now), bound * math.sqrt(before)
        new = reach * points
        step = stats.norm.pdf(new[:, None] - grid[None, :], scale=math.sqrt(now - before))
        density = step @ (weights * old * density)
        inside, grid = float(np.sum(weights * reach * density)), new
    return 1 - inside


# ---- verdicts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookResult:
    """A look at two arms. `low` and `high` are the interval the verdict was read from, at 1 - `level`."""

    verdict: Verdict
    estimate: float
    low: float
    high: float
    level: float
    p_value: float


def read(
    a: Sequence[float], b: Sequence[float], *, sesoi: float, difference_level: float, equivalence_level: float | None
) -> LookResult:
    """What a look says of "a scores higher than b".

    Supported or refuted: the interval lies beyond the smallest effect of interest on that side (the minimum-effect test
    of Murphy and Myors 1999). Practically equivalent: it lies inside ±sesoi (two one-sided tests, Schuirmann 1987), at
    `equivalence_level` a side; None leaves that for a later look. Anything else is inconclusive so far. Scores without
    any spread in both arms are too: identical runs are no evidence. `difference_level` is of both sides together. Where
    `sesoi` is large beside the error only one of them can err, and half of it is the chance to call an effect that does
    not matter; the smaller `sesoi`, the nearer the chance is to all of it.
    """
    found = welch(a, b)
    low, high = found.interval(difference_level)
    verdict: Verdict = "inconclusive"
    level = difference_level
    if found.error == 0:
        pass
    elif low > sesoi or high < -sesoi:
        verdict = "supported" if low > sesoi else "refuted"
    elif equivalence_level is not None:
        inner_low, inner_high = found.interval(2 * equivalence_level)
        if -sesoi < inner_low and inner_high < sesoi:
            verdict, level, low, high = "practically_equivalent", 2 * equivalence_level, inner_low, inner_high
    return LookResult(verdict, found.estimate, low, high, level, found.p_value())


def predictive_power(
    found: Difference,
    seeds: int,
    last: int,
    *,
    sesoi: float,
    difference_level: float,
    equivalence_level: float,
) -> float:
    """The chance that the look at `last` seeds will decide (see `read`), as `seeds` foretell it.

    Predictive power (Spiegelhalter, Freedman and Blackburn 1986): given these scores, the final estimate is Student's t
    around the present one, and the final error this one, shrunk. Scores without spread foretell nothing: 1.
    """
    if found.error == 0:
        return 1.0
    final = stats.t(found.degrees, loc=found.estimate, scale=found.error * math.sqrt(1 - seeds / last))
    error, degrees = found.error * math.sqrt(seeds / last), found.degrees * last / seeds
    called = sesoi + float(special.stdtrit(degrees, 1 - difference_level / 2)) * error
    room = max(0.0, sesoi - float(special.stdtrit(degrees, 1 - equivalence_level)) * error)
    return float(final.sf(called) + final.cdf(-called) + final.cdf(room) - final.cdf(-room))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm 1979), in the order given: reject those at or below alpha."""
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def largest_unseen_rate(seeds: int, alpha: float = 0.05) -> float:
    """The rate of failing seeds that this many healthy ones cannot exclude: 1 - alpha^(1/n), about 3/n."""
    return float(1 - alpha ** (1 / seeds))


def power(effect: float, deviations: tuple[float, float], seeds: int, *, sesoi: float, level: float) -> float:
    """The chance that one look of `seeds` per arm reads rightly (see `read`), for normal scores; `effect` is true.

    An effect of at least `sesoi` must be called by its sign, a smaller one equivalent.
    """
    variances = [deviation**2 / seeds for deviation in deviations]
    error = math.sqrt(sum(variances))
    if error == 0:
        return 1.0
    degrees = sum(variances) ** 2 / sum(v**2 / (seeds - 1) for v in variances)
    quantile = float(special.stdtrit(degrees, 1 - level / 2))

    def over_errors(chance: NDArray[np.float64], scales: NDArray[np.float64]) -> float:
        return float(integrate.trapezoid(chance * stats.chi.pdf(scales, degrees), scales))

    scales = np.linspace(1e-6, math.sqrt(degrees) + 8, 2_000)
    estimated = error * scales / math.sqrt(degrees)
    if abs(effect) >= sesoi:
        needed = sesoi + quantile * estimated
        return over_errors(stats.norm.sf(needed, loc=abs(effect), scale=error), scales)
    room = np.maximum(0.0, sesoi - quantile * estimated)
    return over_errors(
        stats.norm.cdf(room, loc=effect, scale=error) - stats.norm.cdf(-room, loc=effect, scale=error), scales
    )


__all__ = [
    "Difference",
    "LookResult",
    "any_crossing",
    "holm",
    "largest_unseen_rate",
    "nominal_level",
    "permutation_p",
    "power",
    "predictive_power",
    "read",
    "welch",
]
