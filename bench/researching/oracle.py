"""The truth and the verdicts of the whole grid: every arm at every learning rate with many seeds, kept on disk.

The whole grid chooses each arm's best learning rate; many more seeds score that one, without the noise of evaluation.
An effect of at least the smallest of interest has its sign as the right verdict; a smaller one is equivalence. A claim
is decidable if one look at the last number of seeds, at the level of that look, would decide it rightly with a power
of .8, from the oracle's effect and spreads. For the other claims "inconclusive" is right.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import integrate, special, stats

from agentjet.research.models import Study, Verdict
from agentjet.research.records import Setting, canonical
from agentjet.research.scheduler import settings
from agentjet.research.statistics import nominal_level, read
from bench.researching import world as physics
from bench.researching.suite import LOOKS, Case
from bench.researching.world import STEPS, Floats, curves, measured

ENOUGH_POWER = 0.8
TRUTH_SEEDS = 8
"""Times the seeds of a grid's setting: so many score the best one."""
FIRST_SEED = 1 << 40
"""No study draws so large a seed."""


@dataclass(frozen=True)
class Truth:
    effect: float
    error: float
    """Standard error of `effect`."""
    verdict: Verdict
    power: float

    @property
    def decidable(self) -> bool:
        return self.power >= ENOUGH_POWER


@dataclass(frozen=True)
class Grid:
    """By arm: the grid's scores as evaluations report them, (settings, seeds), and true scores of the best setting."""

    seen: dict[str, Floats]
    best: dict[str, Floats]


def grid(case: Case, num_seeds: int, cache: Path) -> Grid:
    """Computed once for a content: the study, the world, and the source of both."""
    study = case.study(seed=0)
    source = [Path(file).read_text(encoding="utf-8") for file in (physics.__file__, __file__)]
    name = canonical([study.to_json(), case.world.seed, case.world.hackable, case.world.evaluations, num_seeds, source])
    path = cache / f"grid-{hashlib.sha256(name.encode()).hexdigest()[:16]}.npz"
    names = [arm.name for arm in study.arms]
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        tables = {}
        for i, arm in enumerate(study.arms):
            tables[f"seen{i}"], tables[f"best{i}"] = table(case, settings(arm), num_seeds)
        part = path.with_suffix(".part.npz")
        np.savez(part, allow_pickle=False, **tables)
        part.replace(path)
    with np.load(path) as kept:
        seen, best = ({name: kept[f"{kind}{i}"] for i, name in enumerate(names)} for kind in ("seen", "best"))
    return Grid(seen, best)


def table(case: Case, cells: list[Setting], num_seeds: int) -> tuple[Floats, Floats]:
    """The grid's scores, (settings, seeds), and the true scores of its truly best setting, with other seeds."""
    seeds = [FIRST_SEED + seed for seed in range(num_seeds)]
    every = [(cell, seed) for cell in cells for seed in seeds]
    scores = curves(case.world, [cell for cell, _ in every], [seed for _, seed in every], [STEPS])[:, 0]
    seen = [measured(case.world, cell, seed, STEPS, float(s)) for (cell, seed), s in zip(every, scores, strict=True)]
    shape = (len(cells), num_seeds)
    best = cells[int(scores.reshape(shape).mean(axis=1).argmax())]
    fresh = [FIRST_SEED + num_seeds + seed for seed in range(TRUTH_SEEDS * num_seeds)]
    return np.array(seen).reshape(shape), curves(case.world, [best] * len(fresh), fresh, [STEPS])[:, 0]


def truths(case: Case, found: Grid) -> list[Truth]:
    """One for each claim, in order."""
    share = 0.05 / len(case.claims)
    judged = []
    for a, b in case.claims:
        x, y = found.best[a], found.best[b]
        effect = float(x.mean() - y.mean())
        verdict: Verdict = "practically_equivalent"
        level = 2 * share
        if abs(effect) >= case.sesoi:
            verdict, level = "supported" if effect > 0 else "refuted", nominal_level(LOOKS, 2 * share)
        spreads = (spread(case, x), spread(case, y))
        chance = power(effect, spreads, LOOKS[-1], sesoi=case.sesoi, level=level)
        error = float(np.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y)))
        judged.append(Truth(effect, error, verdict, chance))
    return judged


def power(effect: float, deviations: tuple[float, float], seeds: int, *, sesoi: float, level: float) -> float:
    """Chance that one look of `seeds` per arm gives the right verdict (see `read`), for normal scores and the true
    `effect`.

    An effect of at least `sesoi` must get the verdict of its sign, a smaller one must be called equivalent.
    """
    variances = [deviation**2 / seeds for deviation in deviations]
    error = math.sqrt(sum(variances))
    if error == 0:
        return 1.0
    degrees = sum(variances) ** 2 / sum(v**2 / (seeds - 1) for v in variances)
    quantile = float(special.stdtrit(degrees, 1 - level / 2))

    def over_errors(chance: Floats, scales: Floats) -> float:
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


def spread(case: Case, scores: Floats) -> float:
    """Standard deviation of a measured score: the runs' own, and the evaluation's."""
    chance = scores / 100
    return float(np.sqrt(scores.var(ddof=1) + 1e4 * np.mean(chance * (1 - chance)) / case.world.evaluations))


def grid_verdicts(case: Case, found: Grid, num_seeds: int, rng: np.random.Generator) -> list[Verdict]:
    """Verdicts of a whole grid of `num_seeds` seeds, drawn from the oracle's: each arm at its best mean, tested once.

    With fewer than four seeds a difference below the smallest of interest counts as none, as people judge it.
    """
    chosen = {}
    for name, scores in found.seen.items():
        drawn = np.stack([row[rng.choice(scores.shape[1], num_seeds, replace=False)] for row in scores])
        chosen[name] = drawn[drawn.mean(axis=1).argmax()]
    share = 0.05 / len(case.claims)
    said: list[Verdict] = []
    for a, b in case.claims:
        if num_seeds < 4:
            effect = float(chosen[a].mean() - chosen[b].mean())
            sign: Verdict = "supported" if effect > 0 else "refuted"
            said.append(sign if abs(effect) >= case.sesoi else "practically_equivalent")
        else:
            x, y = list(chosen[a]), list(chosen[b])
            said.append(read(x, y, sesoi=case.sesoi, difference_level=2 * share, equivalence_level=share).verdict)
    return said


def grid_cost(study: Study, num_seeds: int) -> float:
    return float(num_seeds * sum(len(settings(arm)) for arm in study.arms))
