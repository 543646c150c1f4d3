"""Exploring: each arm's nuisance knobs are tuned over the same values, by the same procedure, before arms are compared.

An ablation at one fixed learning rate measures the learning rate. So every arm is given its best setting: successive
halving (Karnin et al. 2013) that continues the survivors, then a few more seeds for the finalists. Halving drops what
starts badly, which is wrong where early ranks do not predict late ones; the first arm is therefore run in full with one
seed, and rungs whose ranks mislead there are skipped for all arms. Where the knobs have too many combinations,
candidates are proposed. Scores from here choose settings and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil

import numpy as np
from scipy import stats

from agentjet.research.desk import Desk
from agentjet.research.ledger import OutOfBudget
from agentjet.research.models import Arm, Setting, Study, Trial, canonical
from agentjet.research.planner.asking import ROUNDS, is_searched, proposed
from agentjet.research.seeds import seed_of

KEEP = 3
"""One in so many survives a rung (eta of successive halving), and so many are finalists."""
FINAL_SEEDS = 3
"""Seeds of a finalist, the first one included."""
TRUSTED_CORRELATION = 0.7
"""Spearman's, between the scores at a rung and at the end; below it the rung is skipped."""


def tune(study: Study, desk: Desk) -> dict[str, Setting]:
    """By arm, the setting it is judged at. An arm that the budget did not suffice for is missing."""
    chosen: dict[str, Setting] = {}
    rungs: tuple[float, ...] | None = None
    for arm in study.arms:
        searched = is_searched(arm)
        candidates = proposed(study, arm, []) if searched else settings(arm)
        if len(candidates) == 1:
            chosen[arm.name] = candidates[0]
            continue
        search = Search(study, arm, desk)
        try:
            if rungs is None:
                rungs = trusted_rungs(study, search, candidates)
                desk.book.decide("rungs", list(rungs))
            for _ in range(ROUNDS if searched else 0):
                scores = search.run(candidates, rungs[0], seed=0)
                candidates += proposed(study, arm, list(zip(candidates, scores, strict=True)))
            search.halve(candidates, rungs)
        except OutOfBudget:
            pass
        best = search.best()
        if best is not None:
            desk.book.decide(f"setting of {arm.name}", dict(best))
            chosen[arm.name] = best
    return chosen


def settings(arm: Arm) -> list[Setting]:
    """Every combination of the arm's knobs, on top of its changes."""
    names = [knob.name for knob in arm.nuisance]
    return [
        {**arm.changes, **dict(zip(names, values, strict=True))}
        for values in product(*(knob.values for knob in arm.nuisance))
    ]


def trusted_rungs(study: Study, search: Search, candidates: Sequence[Setting]) -> tuple[float, ...]:
    """The rungs at which this arm's ranks are those of the end, by one seed of everything; the last one always."""
    scores = {rung: search.run(candidates, rung, seed=0) for rung in study.rungs}
    last = scores[study.rungs[-1]]
    return tuple(
        rung for rung in study.rungs if rung == study.rungs[-1] or predicts(scores[rung], last, kept=survivors(last))
    )


def predicts(early: Sequence[float], late: Sequence[float], *, kept: int) -> bool:
    """Whether the best at the end is among the `kept` best early on, and the order is about the same."""
    if not np.isfinite([*early, *late]).all() or min(np.ptp(early), np.ptp(late)) == 0:
        return False
    finally_best = int(np.argmax(late))
    rank = sum(score > early[finally_best] for score in early)
    return rank < kept and float(stats.spearmanr(early, late).statistic) >= TRUSTED_CORRELATION


def survivors(scores: Sequence[float]) -> int:
    return max(KEEP, ceil(len(scores) / KEEP))


class Search:
    """One arm's search: what was run, and what was best so far."""

    def __init__(self, study: Study, arm: Arm, desk: Desk) -> None:
        self._study = study
        self._arm = arm
        self._desk = desk
        self._scores: dict[str, dict[float, dict[int, float]]] = {}
        self._settings: dict[str, Setting] = {}

    def halve(self, candidates: Sequence[Setting], rungs: Sequence[float]) -> None:
        """Successive halving with one seed, then the finalists with the others. Raises `OutOfBudget` on the way."""
        alive = list(candidates)
        for rung in rungs:
            scores = self.run(alive, rung, seed=0)
            order = sorted(range(len(alive)), key=lambda i: -scores[i])
            alive = [alive[i] for i in order[: KEEP if rung == rungs[-1] else survivors(scores)]]
        for seed in range(1, FINAL_SEEDS):
            self.run(alive, rungs[-1], seed=seed)

    def run(self, candidates: Sequence[Setting], fidelity: float, *, seed: int) -> list[float]:
        """Scores in order; a setting that the infrastructure lost for good scores below all others."""
        trials = [
            Trial(self._study.id, self._arm.name, setting, seed_of(self._study, "explore", seed), "explore", fidelity)
            for setting in candidates
        ]
        scores = []
        for setting, outcome in zip(candidates, self._desk.run(trials), strict=True):
            if outcome.score is not None:
                name = canonical(dict(setting))
                self._settings[name] = setting
                self._scores.setdefault(name, {}).setdefault(fidelity, {})[seed] = outcome.score
            scores.append(-np.inf if outcome.score is None else outcome.score)
        return scores

    def best(self) -> Setting | None:
        """Of the settings that came furthest with most seeds, the one with the best mean."""

        def merit(name: str) -> tuple[float, int, float]:
            fidelity, by_seed = max(self._scores[name].items())
            return fidelity, len(by_seed), float(np.mean(list(by_seed.values())))

        return self._settings[max(self._scores, key=merit)] if self._scores else None
