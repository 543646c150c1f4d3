"""The schedule of a study: tune each arm, freeze its setting, confirm, diagnose; and the cost of that in advance.

Each arm is tuned before arms are compared, because an ablation at one fixed learning rate measures the learning rate.
Tuning is successive halving (Karnin et al. 2013) that continues the survivors, then more seeds for the finalists.
Halving drops slow starters. So the first arm is run in full with one seed, and rungs that would have lost a setting
that matters are skipped for all arms. Scores from tuning choose settings and nothing else.

All functions depend only on the study and its outcomes. Run again over the same log, they decide the same, launch
nothing twice, and continue where they were interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil
from typing import NamedTuple

import numpy as np

from agentjet.research.confirmation import confirm
from agentjet.research.diagnosis import diagnose
from agentjet.research.journal import StudyLog
from agentjet.research.launcher import OutOfBudget, TrialLauncher, TrialRunner, seed_of
from agentjet.research.models import Arm, Finding, Study, Trial
from agentjet.research.records import Setting, canonical

ETA = 3
"""One in this many survives a rung; also the minimum number of survivors."""
FINALISTS = 2
FINAL_SEEDS = 2
"""Seeds of a finalist, including the first."""
TOLERATED_LOSS = 0.5
"""In smallest effects of interest. A rung that would have cost the first arm more than this is skipped."""


def tune(study: Study, launcher: TrialLauncher) -> dict[str, Setting]:
    """Returns the setting to judge, by arm. An arm is missing if the budget was too small to tune it."""
    chosen: dict[str, Setting] = {}
    rungs: tuple[float, ...] | None = None
    for arm in study.arms:
        candidates = settings(arm)
        if len(candidates) == 1:
            chosen[arm.name] = candidates[0]
            continue
        search = Search(study, arm, launcher)
        with suppress(OutOfBudget):
            if rungs is None:
                rungs = reliable_rungs(study, search, candidates)
                launcher.log.decide("rungs", list(rungs))
            search.halve(candidates, rungs)
        best = search.best()
        if best is not None:
            launcher.log.decide(f"setting of {arm.name}", dict(best))
            chosen[arm.name] = best
    return chosen


def settings(arm: Arm) -> list[Setting]:
    """Every combination of the arm's knobs, on top of its changes."""
    names = [knob.name for knob in arm.nuisance]
    return [
        {**arm.changes, **dict(zip(names, values, strict=True))}
        for values in product(*(knob.values for knob in arm.nuisance))
    ]


def reliable_rungs(study: Study, search: Search, candidates: Sequence[Setting]) -> tuple[float, ...]:
    """Returns the rungs that would have lost this arm nothing that matters, judged by one seed. The last rung is always
    kept.
    """
    scores = {rung: search.run(candidates, rung, seed=0) for rung in study.rungs}
    last = scores[study.rungs[-1]]
    return tuple(
        rung
        for rung in study.rungs
        if rung == study.rungs[-1] or rank_loss(scores[rung], last) <= TOLERATED_LOSS * study.sesoi
    )


def rank_loss(early: Sequence[float], late: Sequence[float]) -> float:
    """Returns how much better the best final score is than the best among early survivors. Infinite if early scores are
    all equal or any is missing.
    """
    if not np.isfinite([*early, *late]).all() or np.ptp(early) == 0:
        return float("inf")
    return max(late) - max(late[i] for i in best_first(early)[: survivors(early)])


def survivors(scores: Sequence[float]) -> int:
    return max(ETA, ceil(len(scores) / ETA))


def best_first(scores: Sequence[float]) -> list[int]:
    """Indices, by falling score."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


@dataclass(frozen=True)
class Search:
    """The tuning of one arm."""

    study: Study
    arm: Arm
    launcher: TrialLauncher

    def halve(self, candidates: Sequence[Setting], rungs: Sequence[float]) -> None:
        """Successive halving with one seed, then the finalists with the others. Raises `OutOfBudget`."""
        alive = list(candidates)
        for rung in rungs:
            scores = self.run(alive, rung, seed=0)
            alive = [alive[i] for i in best_first(scores)[: FINALISTS if rung == rungs[-1] else survivors(scores)]]
        for seed in range(1, FINAL_SEEDS):
            self.run(alive, rungs[-1], seed=seed)

    def run(self, candidates: Sequence[Setting], fidelity: float, *, seed: int) -> list[float]:
        """Returns scores in order. A lost run scores minus infinity."""
        number = seed_of(self.study, "explore", seed)
        trials = [Trial(self.study.id, self.arm.name, one, number, "explore", fidelity) for one in candidates]
        return [-np.inf if outcome.score is None else outcome.score for outcome in self.launcher.run(trials)]

    def best(self) -> Setting | None:
        """Returns the setting with the best mean among those with the longest runs and the most seeds."""
        log = self.launcher.log
        scores: dict[str, dict[float, list[float]]] = {}
        for name, trial in log.trials.items():
            score = log.outcomes[name][-1].score if (trial.arm, trial.phase) == (self.arm.name, "explore") else None
            if score is not None:
                scores.setdefault(canonical(dict(trial.setting)), {}).setdefault(trial.fidelity, []).append(score)

        def merit(setting: Setting) -> tuple[float, int, float]:
            fidelity, found = max(scores[canonical(dict(setting))].items())
            return fidelity, len(found), float(np.mean(found))

        return max((one for one in settings(self.arm) if canonical(dict(one)) in scores), key=merit, default=None)


def conduct(study: Study, log: StudyLog, runner: TrialRunner) -> tuple[list[Finding], TrialLauncher]:
    """Returns the findings in the order of the hypotheses, and the launcher with its spending."""
    launcher = TrialLauncher(study, log, runner)
    findings = confirm(study, tune(study, launcher), launcher)
    diagnose(log)
    return findings, launcher


class CostEstimate(NamedTuple):
    """In full runs."""

    least: float
    """If every claim is clear at the first look and early ranks are final."""
    most: float
    """If nothing is decided before the last look and early ranks mislead."""


def estimate_cost(study: Study) -> CostEstimate:
    compared = len({name for hypothesis in study.hypotheses for name in (hypothesis.arm, hypothesis.against)})
    tuned = [arm.num_settings for arm in study.arms if arm.num_settings > 1]
    finals = sum((FINAL_SEEDS - 1) * min(FINALISTS, number) for number in tuned)
    halving = sum(tuned[:1]) + sum(halving_cost(number, study.rungs) for number in tuned[1:])
    return CostEstimate(halving + finals + compared * study.looks[0], sum(tuned) + finals + compared * study.looks[-1])


def halving_cost(candidates: int, rungs: Sequence[float]) -> float:
    cost, alive = 0.0, candidates
    for before, rung in pairwise((0.0, *rungs)):
        cost += alive * (rung - before)
        alive = min(alive, survivors(range(alive)))
    return cost
