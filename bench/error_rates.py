"""Error rates of the researcher's verdicts, by simulation: `python -m bench.error_rates`.

Normal scores of two arms are judged by the rule of `agentjet.research.scheduler`. No claim is stopped early,
because that could only reduce the number of verdicts. A verdict is wrong if it is "supported" or "refuted" for an
effect that is not above the smallest effect of interest: for no effect, and for one of exactly that size. The size is
measured in the root mean square of both arms' deviations over seeds. One arm's scores spread `UNEQUAL` times as far as
the other's. Several claims share alpha by Holm's procedure: before the first wrong verdict, each claim that must not
be supported is tested at no more than an equal share. So the sum of their rates bounds the rate of all. Prints a
table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy import special

from agentjet.research.statistics import nominal_level
from bench.machine import grid

ALPHA = 0.05
LOOKS = (4, 8, 12)
UNEQUAL = (1.0, 3.0, 5.0, 10.0, 30.0)
INTERESTS = (1e-9, 0.05, 0.1, 0.2, 0.3)
OTHERS = ((4,), (12,), (4, 8), LOOKS, (6, 12, 24), (4, 6, 8, 10, 12))
CLAIMS = (1, 2, 4, 10)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at many studies of equal arms: the differences of means, Welch's errors and degrees of freedom."""

    estimates: NDArray[np.float64]
    errors: NDArray[np.float64]
    degrees: NDArray[np.float64]

    def half_widths(self, level: float) -> NDArray[np.float64]:
        """Half widths of the two-sided intervals at `level`; Student's quantile is interpolated over 1/degrees."""
        grid = np.linspace((1 / self.degrees).min(), (1 / self.degrees).max(), 1_000)
        quantiles = special.stdtrit(1 / grid, 1 - level / 2)
        return np.asarray(np.interp(1 / self.degrees, grid, quantiles) * self.errors)


def looked_at(scores: NDArray[np.float64], unequal: float, looks: Sequence[int]) -> list[Look]:
    """`scores` (2, studies, seeds) are standard normal; the first arm's come to spread wider, both by 1 in the mean."""
    narrow = math.sqrt(2 / (1 + unequal**2))
    wide, other = scores[0] * unequal * narrow, scores[1] * narrow
    found = []
    for seeds in looks:
        a, b = wide[:, :seeds], other[:, :seeds]
        parts = a.var(axis=1, ddof=1) / seeds, b.var(axis=1, ddof=1) / seeds
        total = parts[0] + parts[1]
        degrees = total**2 * (seeds - 1) / (parts[0] ** 2 + parts[1] ** 2)
        found.append(Look(a.mean(axis=1) - b.mean(axis=1), np.sqrt(total), degrees))
    return found


def called(looks: Sequence[Look], *, effect: float, sesoi: float, level: float) -> NDArray[np.bool_]:
    """True for each study in which a look finds a difference (`agentjet.research.statistics.read`)."""
    any_look = np.zeros(len(looks[0].errors), bool)
    for look in looks:
        half = look.half_widths(level)
        estimates = look.estimates + effect
        any_look |= (estimates - half > sesoi) | (estimates + half < -sesoi)
    return any_look


def single(scores: NDArray[np.float64]) -> dict[float, list[tuple[float, float]]]:
    """Error rates of one claim, by the ratio of spreads, then by `INTERESTS`: without an effect, and with one of that
    size."""
    level = nominal_level(LOOKS, 2 * ALPHA)
    return {
        unequal: [
            (
                float(called(looks, effect=0.0, sesoi=size, level=level).mean()),
                float(called(looks, effect=size, sesoi=size, level=level).mean()),
            )
            for size in INTERESTS
        ]
        for unequal in UNEQUAL
        for looks in [looked_at(scores, unequal, LOOKS)]
    }


def worst(scores: NDArray[np.float64], size: float, spreads: Sequence[float]) -> float:
    """The largest chance of any wrong call, in alphas, over `OTHERS`, `CLAIMS` and these inequalities of spread."""
    return max(
        num * float(called(found, effect=size, sesoi=size, level=nominal_level(looks, 2 * ALPHA / num)).mean()) / ALPHA
        for looks in OTHERS
        for unequal in spreads
        for found in [looked_at(scores, unequal, looks)]
        for num in CLAIMS
    )


def draw(studies: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(2, studies, max(looks[-1] for looks in OTHERS)))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    scores = draw(options.studies, options.seed)
    rates = single(scores)
    heads = [f"{size:.2g}: none, of that size" for size in INTERESTS]
    rows = {f"{unequal:g} times apart": dict(zip(heads, row, strict=True)) for unequal, row in rates.items()}
    Console(width=140).print(grid(rows))
    result = {
        "studies": options.studies,
        "single": {f"{unequal:g}": row for unequal, row in rates.items()},
        "worst_in_alphas": {
            "equal_from_a_fifth": worst(scores, 0.2, (1.0,)),
            "unequal_from_a_fifth": worst(scores, 0.2, UNEQUAL),
            "equal": worst(scores, 1e-9, (1.0,)),
            "unequal": worst(scores, 1e-9, UNEQUAL),
        },
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
