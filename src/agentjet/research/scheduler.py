"""Which settings of an arm are tried, where its knobs have too many combinations to try them all.

Optuna proposes and forgets: each time its sampler is made anew from the scores that came back and a seed of the event,
so there is no second record beside the journal, and a study that is resumed is proposed the same. It knows the knobs
as positions on their ladders of values, so that a range and a list are the same to it.

Exploring: each arm's nuisance knobs are tuned over the same values, by the same procedure, before arms are compared.

An ablation at one fixed learning rate measures the learning rate. So every arm is given its best setting: successive
halving (Karnin et al. 2013) that continues the survivors, then a few more seeds for the finalists. Halving drops what
starts badly, which is wrong where an early lead is lost later; the first arm is therefore run in full with one seed,
and rungs that would have lost something that matters there are skipped for all arms. Where the knobs have too many
combinations, candidates are proposed. Scores from here choose settings and nothing else.

`conduct`: a study from plan to findings: explore, freeze, confirm, diagnose. `conduct_with_annexes`: that and what
was added.

Functions of the study and of the outcomes: run again over the same book they make the same decisions, launch nothing
twice, and go on where they were interrupted.

What a study would cost, found out by conducting it on made-up scores: the procedure itself says what it takes.
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
from agentjet.research.launcher import OutOfBudget, Runner, SteeringFile, TrialLauncher, seed_of
from agentjet.research.models import Arm, Finding, Outcome, Setting, Study, Trial, canonical

WHOLE = 16
"""Up to so many combinations, all of them are candidates."""
FIRST = 8
"""Candidates that are drawn before anything is known."""
ROUNDS, EACH = 4, 4
"""Times that more are proposed from the scores so far, and how many: on a smooth hill of three knobs the best of these
24 is half as far from the top as the best of 24 drawn at random."""


def is_searched(arm: Arm) -> bool:
    """Whether the arm's knobs have more combinations than are tried."""
    return prod(len(knob.values) for knob in arm.nuisance) > WHOLE


def proposed(study: Study, arm: Arm, known: Sequence[tuple[Setting, float]]) -> list[Setting]:
    """The next candidates, all different and none of them known. The same arguments give the same ones.

    `known` are the candidates so far with their scores, higher is better; minus infinity is that of a lost run.
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
    for _ in range(20 * wanted):  # a sampler may say the same again
        positions = search.ask(distributions).params
        setting = {**arm.changes, **{knob.name: knob.values[positions[knob.name]] for knob in arm.nuisance}}
        if canonical(setting) not in seen:
            seen.add(canonical(setting))
            found.append(setting)
        if len(found) == wanted:
            break
    return found


def proposal_seed(study: Study, arm: Arm, num_known: int) -> int:
    """32 bits. Arms that tune the same knobs begin with the same candidates."""
    knobs = [knob.to_json() for knob in arm.nuisance]
    name = canonical([study.id, "asking", knobs, num_known])
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


ETA = 3
"""One in so many survives a rung, and never fewer than so many."""
FINALISTS = 2
FINAL_SEEDS = 2
"""Seeds of a finalist, the first one included."""
TOLERATED_LOSS = 0.5
"""Of the smallest effect of interest: a rung that would have cost the first arm more at the end is skipped."""


def tune(study: Study, desk: TrialLauncher) -> dict[str, Setting]:
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
                rungs = reliable_rungs(study, search, candidates)
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


def reliable_rungs(study: Study, search: Search, candidates: Sequence[Setting]) -> tuple[float, ...]:
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

    def __init__(self, study: Study, arm: Arm, desk: TrialLauncher) -> None:
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


MAX_ADVICE = 3
"""Times an adviser is heard after the data began."""


class Adviser(Protocol):
    """What may propose something when a study has its findings: see `agentjet.research.planner.proposals`."""

    def advise(self, desk: TrialLauncher, findings: list[Finding]) -> None: ...


@dataclass(frozen=True)
class StudyRun:
    """A study that was conducted: the first, or an annex."""

    study: Study
    book: StudyLog
    findings: list[Finding]
    desk: TrialLauncher


def conduct(
    study: Study, book: StudyLog, runner: Runner, steering: SteeringFile | None = None
) -> tuple[list[Finding], TrialLauncher]:
    """The findings, in the order of the hypotheses, and the desk with its ledger."""
    desk = TrialLauncher(study, book, runner, steering)
    findings = confirm(study, tune(study, desk), desk)
    diagnose(desk)
    return findings, desk


def conduct_with_annexes(
    study: Study, book: StudyLog, runner: Runner, steering: SteeringFile | None = None, adviser: Adviser | None = None
) -> list[StudyRun]:
    """The study, then annex after annex as long as something was added to the one before and can be paid."""
    chapters: list[StudyRun] = []
    with ExitStack() as books:
        following: Study | None = study
        current = book
        while following is not None:
            findings, desk = conduct(following, current, runner, steering)
            chapters.append(StudyRun(following, current, findings, desk))
            stopped = any(chapter.desk.helm.course.stopped for chapter in chapters)
            if adviser and not stopped and len(chapters) <= MAX_ADVICE:
                adviser.advise(desk, findings)
            probe(desk)
            left = desk.ledger.left("confirm")
            if dropped := not_added(desk.helm.course, left):
                current.decide(NOT_ADDED, dropped)
            following = annex(desk.helm.course, frozen(current), left)
            if following:
                steering = desk.helm.steering_after()
                current = books.enter_context(book.annex(len(chapters)))
    return chapters


def probe(desk: TrialLauncher) -> None:
    """The runs that were asked for to understand an arm. They decide nothing."""
    for number, (arm, setting) in enumerate(desk.helm.course.probes, 1):
        seed = seed_of(desk.study, "probe", number)
        try:
            desk.run([Trial(desk.study.id, arm, setting, seed, "probe")])
        except OutOfBudget as refusal:  # capped or vetoed since it was granted
            desk.book.decide(f"probe {number}", str(refusal))


def frozen(book: StudyLog) -> Mapping[str, Setting]:
    """By arm, the setting it was judged at."""
    settings = book.decisions.get("frozen", {})
    assert isinstance(settings, dict)
    return settings


PLENTY = 1e6
"""A budget that no study exhausts, in full runs."""


@dataclass(frozen=True)
class Cost:
    """In full runs."""

    least: float
    """Where every claim is plain at the first look, and early ranks are those of the end."""
    most: float
    """Where nothing is decided before the last look, and early ranks mislead."""


def estimate_cost(study: Study) -> Cost:
    plenty = replace(study, budget=PLENTY)
    return Cost(
        *(conduct(plenty, StudyLog(), SyntheticRunner(plenty, plain=plain))[1].ledger.total for plain in (True, False)),
    )


class SyntheticRunner:
    """A runner without runs: arms far apart and ranked alike throughout, or ranked the other way round early on, and in
    the end so alike that only the last look can say so.
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
