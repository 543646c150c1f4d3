"""Exploring: each arm's nuisance knobs are tuned over the same values, by the same procedure, before arms are compared.

An ablation at one fixed learning rate measures the learning rate. So every arm is given its best setting: successive
halving (Karnin et al. 2013) that continues the survivors, then a few more seeds for the finalists. Halving drops what
starts badly, which is wrong where an early lead is lost later; the first arm is therefore run in full with one seed,
and rungs that would have lost something that matters there are skipped for all arms. Where the knobs have too many
combinations, candidates are proposed. Scores from here choose settings and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil

import numpy as np

from agentjet.research.desk import Desk
from agentjet.research.ledger import OutOfBudget
from agentjet.research.models import Arm, Setting, Study, Trial, canonical
from agentjet.research.planner.asking import ROUNDS, is_searched, proposed
from agentjet.research.seeds import seed_of

ETA = 3
"""One in so many survives a rung, and never fewer than so many."""
FINALISTS = 2
FINAL_SEEDS = 2
"""Seeds of a finalist, the first one included."""
TOLERATED_LOSS = 0.5
"""Of the smallest effect of interest: a rung that would have cost the first arm more at the end is skipped."""


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
    """The rungs that would have lost this arm nothing that matters, by one seed of everything; the last one always."""
    scores = {rung: search.run(candidates, rung, seed=0) for rung in study.rungs}
    last = scores[study.rungs[-1]]
    return tuple(
        rung
        for rung in study.rungs
        if rung == study.rungs[-1] or lost(scores[rung], last) <= TOLERATED_LOSS * study.sesoi
    )


def lost(early: Sequence[float], late: Sequence[float]) -> float:
    """By how much the best at the end is better than the best of those that survive early on; infinite where the early
    scores tell nothing apart, or any is missing.
    """
    if not np.isfinite([*early, *late]).all() or np.ptp(early) == 0:
        return float("inf")
    return max(late) - max(late[i] for i in best_first(early)[: survivors(early)])


def survivors(scores: Sequence[float]) -> int:
    return max(ETA, ceil(len(scores) / ETA))


def best_first(scores: Sequence[float]) -> list[int]:
    """Indices, by falling score."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


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
            alive = [alive[i] for i in best_first(scores)[: FINALISTS if rung == rungs[-1] else survivors(scores)]]
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
