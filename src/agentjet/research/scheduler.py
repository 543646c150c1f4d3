"""The schedule of a study: tune each arm, freeze its setting, confirm, diagnose; and the cost of that in advance.

Each arm is tuned before arms are compared, because an ablation at one fixed learning rate measures the learning rate.
Tuning is successive halving (Karnin et al. 2013) that continues the survivors, then more seeds for the finalists.
Halving drops slow starters. So the first arm is run in full with one seed, and rungs that would have lost a setting
that matters are skipped for all arms. Scores from tuning choose settings and nothing else.

If the knobs have too many combinations, Optuna proposes candidates. Its sampler is rebuilt each time from the scores
and a derived seed, so that a resumed study gets the same proposals. Optuna sees each knob as a position in its values.

All functions depend only on the study and its outcomes. Run again over the same log, they decide the same, launch
nothing twice, and continue where they were interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod
from typing import Protocol

import numpy as np

from agentjet.research.amendments import NOT_ADDED, annex, not_added
from agentjet.research.confirmation import confirm
from agentjet.research.diagnosis import diagnose
from agentjet.research.journal import StudyLog
from agentjet.research.launcher import OutOfBudget, SteeringFile, TrialLauncher, TrialRunner, seed_of
from agentjet.research.models import Arm, Finding, Outcome, Setting, Study, Trial, canonical

WHOLE = 16
"""Maximum combinations that are all tried."""
FIRST = 8
"""Random candidates before the first scores."""
ROUNDS, EACH = 4, 4
"""Rounds of proposals, and proposals per round. On a smooth surface of three knobs, the best of these 24 is half as far
from the optimum as the best of 24 random ones.
"""


def is_searched(arm: Arm) -> bool:
    """True if the arm's knobs have more combinations than are tried."""
    return prod(len(knob.values) for knob in arm.nuisance) > WHOLE


def proposed(study: Study, arm: Arm, known: Sequence[tuple[Setting, float]]) -> list[Setting]:
    """Returns the next candidates, all different and new. The same arguments give the same candidates.

    `known` are the candidates so far with their scores; minus infinity is the score of a lost run.
    """
    import optuna

    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        knob.name: optuna.distributions.IntDistribution(0, len(knob.values) - 1) for knob in arm.nuisance
    }
    sampler = optuna.samplers.TPESampler(seed=proposal_seed(study, arm, len(known)), n_startup_trials=FIRST)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = optuna.create_study(direction="maximize", sampler=sampler)
    for setting, score in known:
        if score > float("-inf"):
            positions = {knob.name: knob.values.index(float(setting[knob.name])) for knob in arm.nuisance}
            search.add_trial(optuna.trial.create_trial(value=score, params=positions, distributions=distributions))
    seen = {canonical(dict(setting)) for setting, _ in known}
    found: list[Setting] = []
    wanted = EACH if known else FIRST
    for _ in range(20 * wanted):  # the sampler may repeat a candidate
        positions = search.ask(distributions).params
        setting = {**arm.changes, **{knob.name: knob.values[positions[knob.name]] for knob in arm.nuisance}}
        if canonical(setting) not in seen:
            seen.add(canonical(setting))
            found.append(setting)
        if len(found) == wanted:
            break
    return found


def proposal_seed(study: Study, arm: Arm, num_known: int) -> int:
    """A 32-bit seed. Arms that tune the same knobs start with the same candidates."""
    knobs = [knob.to_json() for knob in arm.nuisance]
    name = canonical([study.id, "asking", knobs, num_known])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


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
        searched = is_searched(arm)
        candidates = proposed(study, arm, []) if searched else settings(arm)
        if len(candidates) == 1:
            chosen[arm.name] = candidates[0]
            continue
        search = Search(study, arm, launcher)
        try:
            if rungs is None:
                rungs = reliable_rungs(study, search, candidates)
                launcher.log.decide("rungs", list(rungs))
            for _ in range(ROUNDS if searched else 0):
                scores = search.run(candidates, rungs[0], seed=0)
                candidates += proposed(study, arm, list(zip(candidates, scores, strict=True)))
            search.halve(candidates, rungs)
        except OutOfBudget:
            pass
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


class Search:
    """The tuning of one arm: its trials and the best setting so far."""

    def __init__(self, study: Study, arm: Arm, launcher: TrialLauncher) -> None:
        self._study = study
        self._arm = arm
        self._launcher = launcher
        self._scores: dict[str, dict[float, dict[int, float]]] = {}
        self._settings: dict[str, Setting] = {}

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
        trials = [
            Trial(self._study.id, self._arm.name, setting, seed_of(self._study, "explore", seed), "explore", fidelity)
            for setting in candidates
        ]
        scores = []
        for setting, outcome in zip(candidates, self._launcher.run(trials), strict=True):
            if outcome.score is not None:
                name = canonical(dict(setting))
                self._settings[name] = setting
                self._scores.setdefault(name, {}).setdefault(fidelity, {})[seed] = outcome.score
            scores.append(-np.inf if outcome.score is None else outcome.score)
        return scores

    def best(self) -> Setting | None:
        """Returns the setting with the best mean among those with the longest runs and the most seeds."""

        def merit(name: str) -> tuple[float, int, float]:
            fidelity, by_seed = max(self._scores[name].items())
            return fidelity, len(by_seed), float(np.mean(list(by_seed.values())))

        return self._settings[max(self._scores, key=merit)] if self._scores else None


MAX_ADVICE = 3
"""Maximum number of times an adviser is asked after the data began."""


class Adviser(Protocol):
    """Proposes additions to a study that has its findings: see `agentjet.research.planner.proposals`."""

    def advise(self, launcher: TrialLauncher, findings: list[Finding]) -> None: ...


@dataclass(frozen=True)
class StudyRun:
    """A conducted study: the first one, or an annex."""

    study: Study
    log: StudyLog
    findings: list[Finding]
    launcher: TrialLauncher


def conduct(
    study: Study, log: StudyLog, runner: TrialRunner, steering_file: SteeringFile | None = None
) -> tuple[list[Finding], TrialLauncher]:
    """Returns the findings in the order of the hypotheses, and the launcher with its spending."""
    launcher = TrialLauncher(study, log, runner, steering_file)
    findings = confirm(study, tune(study, launcher), launcher)
    diagnose(launcher)
    return findings, launcher


def conduct_with_annexes(
    study: Study,
    log: StudyLog,
    runner: TrialRunner,
    steering_file: SteeringFile | None = None,
    adviser: Adviser | None = None,
) -> list[StudyRun]:
    """Conducts the study, then one annex after another, while something was added and can be paid."""
    study_runs: list[StudyRun] = []
    with ExitStack() as logs:
        following: Study | None = study
        current = log
        while following is not None:
            findings, launcher = conduct(following, current, runner, steering_file)
            study_runs.append(StudyRun(following, current, findings, launcher))
            stopped = any(study_run.launcher.steering.amended.stopped for study_run in study_runs)
            if adviser and not stopped and len(study_runs) <= MAX_ADVICE:
                adviser.advise(launcher, findings)
            probe(launcher)
            left = launcher.spending.left("confirm")
            if dropped := not_added(launcher.steering.amended, left):
                current.decide(NOT_ADDED, dropped)
            following = annex(launcher.steering.amended, frozen(current), left)
            if following:
                steering_file = launcher.steering.file_for_annex()
                current = logs.enter_context(log.annex(len(study_runs)))
    return study_runs


def probe(launcher: TrialLauncher) -> None:
    """Runs the probes that were requested. They decide nothing."""
    for number, (arm, setting) in enumerate(launcher.steering.amended.probes, 1):
        seed = seed_of(launcher.study, "probe", number)
        try:
            launcher.run([Trial(launcher.study.id, arm, setting, seed, "probe")])
        except OutOfBudget as refusal:  # capped or vetoed after the request was granted
            launcher.log.decide(f"probe {number}", str(refusal))


def frozen(log: StudyLog) -> Mapping[str, Setting]:
    """By arm, the setting that was judged."""
    settings = log.decisions.get("frozen", {})
    assert isinstance(settings, dict)
    return settings


PLENTY = 1e6
"""A budget in full runs that no study exhausts."""


@dataclass(frozen=True)
class CostEstimate:
    """In full runs."""

    least: float
    """If every claim is clear at the first look and early ranks are final."""
    most: float
    """If nothing is decided before the last look and early ranks mislead."""


def estimate_cost(study: Study) -> CostEstimate:
    plenty = replace(study, budget=PLENTY)
    return CostEstimate(
        *(
            conduct(plenty, StudyLog(), SyntheticRunner(plenty, plain=plain))[1].spending.total
            for plain in (True, False)
        ),
    )


class SyntheticRunner:
    """Returns made-up scores. Plain: arms are far apart and ranked alike throughout. Otherwise: early ranks are
    reversed, and final scores are so close that only the last look can decide.
    """

    def __init__(self, study: Study, *, plain: bool) -> None:
        self._sesoi = study.sesoi
        self._apart = {arm.name: 1e3 * study.sesoi * number for number, arm in enumerate(study.arms)}
        self._plain = plain
        self._trials: dict[str, Trial] = {}

    def has(self, key: str) -> bool:
        return key in self._trials

    def launch(self, key: str, trial: Trial) -> None:
        self._trials[key] = trial

    def collect(self, key: str) -> Outcome:
        trial = self._trials[key]
        setting = noise(canonical(dict(trial.setting)))
        seed = noise(trial.id)
        if self._plain:
            score = self._apart[trial.arm] + setting + 1e-3 * seed
        elif trial.phase == "explore":
            score = 10 * self._sesoi * (setting if trial.fidelity == 1 else -setting)
        else:
            score = 0.1 * self._sesoi * seed
        return Outcome(trial.id, "completed", score=score)


def noise(name: str) -> float:
    return float(np.random.default_rng([*name.encode()]).normal())
