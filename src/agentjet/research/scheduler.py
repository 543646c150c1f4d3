"""The schedule of a study: tune each arm, freeze its setting, confirm, diagnose; and the cost of that in advance.

Each arm is tuned before arms are compared, because an ablation at one fixed learning rate measures the learning rate.
Tuning is successive halving (Karnin et al. 2013) that continues the survivors, then more seeds for the finalists.
Halving drops slow starters. So the first arm is run in full with one seed, and rungs that would have lost a setting
that matters are skipped for all arms. Scores from tuning choose settings and nothing else.

Confirmation runs the chosen settings with fresh seeds and tests them at the declared looks. It is Holm's procedure over
looks (Maurer and Bretz 2013): each confirmatory hypothesis is tested at its share of alpha. A supported or refuted
hypothesis passes its share on. Equivalence is a separate family with its own alpha: a hypothesis either has an effect
or has none, so only one of its two errors is possible.

A difference can be found at any look, equivalence only at the last one. A few seeds that agree cannot exclude one in
ten that fails. A single test needs no correction for looks. The last look uses the scores that exist, even if seeds
were lost. Two arms without anything to learn from are not called equivalent (`nothing_to_learn`). Testing a hypothesis
stops for futility if the last look is unlikely to decide it. That saves seeds and causes no wrong verdict.

All functions depend only on the study and its outcomes. Run again over the same log, they decide the same, launch
nothing twice, and continue where they were interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import ceil, fsum
from typing import NamedTuple, Protocol

import numpy as np

from agentjet.config import JobConfig
from agentjet.errors import AgentJetError
from agentjet.research.diagnosis import (
    MANY_FAILED,
    diagnose,
    had_nothing_to_learn,
    held_out_counts,
    with_dead_environment,
)
from agentjet.research.journal import StudyLog
from agentjet.research.models import (
    TIMES,
    VETOED,
    Arm,
    Finding,
    Hypothesis,
    Outcome,
    Phase,
    Setting,
    Study,
    Trial,
    canonical,
    hash_of,
    number_of,
)
from agentjet.research.statistics import LookResult, nominal_level, predictive_power, read, welch

# ---- launching and spending ------------------------------------------------------------------------------------------

ROUNDING = 1e-9


class OutOfBudget(AgentJetError):
    """The next trials cost more than is left for their phase. None of them was launched."""


class Spending:
    """Full runs spent on a study, by phase. Repeats of lost runs are counted separately: they are not evidence."""

    def __init__(self, study: Study, launches: Iterable[tuple[Trial, int]] = ()) -> None:
        """`launches` are trials in the order of their first launch, each with its number of attempts."""
        self.budget, self._subject = study.budget, study.subject
        self.for_exploring = study.budget * (1 - study.reserve)
        self.spent: dict[Phase, float] = {"explore": 0.0, "confirm": 0.0}
        self.repeated = 0.0
        self._reached: dict[str, float] = {}
        for trial, attempts in launches:
            self.spent[trial.phase] += added_cost(self._reached, trial) * self.length(trial)
            self.repeated += (attempts - 1) * trial.fidelity * self.length(trial)

    @property
    def total(self) -> float:
        return sum(self.spent.values()) + self.repeated

    def left(self, phase: Phase) -> float:
        left = self.budget - self.total
        return min(left, self.for_exploring - self.spent["explore"]) if phase == "explore" else left

    def cost(self, trials: Iterable[Trial]) -> float:
        """Returns the cost that these trials would add, in this order."""
        reached = dict(self._reached)
        return sum(added_cost(reached, trial) * self.length(trial) for trial in trials)

    def length(self, trial: Trial) -> float:
        """Episodes of a whole run of the trial's arm, in those of the subject."""
        if (of := self._subject) is None:
            return 1.0
        return work_of({**of.settings, **trial.setting}, of.steps) / work_of(of.settings, of.steps)


def work_of(setting: Setting, steps: int) -> float:
    """Returns a number that is in proportion to the episodes of a run."""
    default = JobConfig.model_fields
    sizes = [number_of(setting, f"job.{name}", default[name].default) for name in ("batch_size", "group_size")]
    return number_of(setting, "steps", steps) * sizes[0] * sizes[1]


AMOUNTS = {"episodes": ("batch/episodes",), "tokens": ("batch/sampled_tokens",), "seconds": TIMES}
"""Signals of which an amount of a run is the sum."""


def amount(runs: Iterable[Mapping[str, Sequence[float | None]]], of: str) -> float:
    """Sum over the signals of runs: training episodes, sampled tokens of training, or seconds; 0 for steps."""
    return fsum(value or 0.0 for run in runs for name in AMOUNTS.get(of, ()) for value in run.get(name, ()))


def added_cost(reached: dict[str, float], trial: Trial) -> float:
    """Returns the cost that a trial adds to the run it continues, and updates `reached`."""
    before = reached.get(trial.run, 0.0)
    reached[trial.run] = max(before, trial.fidelity)
    return max(0.0, trial.fidelity - before)


def seed_of(study: Study, phase: Phase, number: int) -> int:
    """Derives a 31-bit seed from the study, so that a re-run uses the same seeds and phases share none. Arms share the
    seeds of a phase, so that random tasks are the same on both sides.
    """
    return int(hash_of([study.id, phase, number])[:8], 16) >> 1


MAX_ATTEMPTS = 3
"""Maximum launches of a trial that the infrastructure keeps losing."""


class TrialRunner(Protocol):
    """Runs trials. Launches outlive the caller. A trial continues the shorter run of its arm, setting and seed."""

    def has(self, key: str) -> bool:
        """True if a launch under this key was accepted."""

    def launch(self, key: str, trial: Trial) -> None:
        """Starts a trial. Returns once `has(key)` is durably true."""

    def collect(self, key: str) -> Outcome:
        """Blocks until the launch under the key has ended."""


Vetoes = Callable[[Sequence[Trial]], Set[str]]
"""Gives the arms that people vetoed before these trials are launched."""


def no_veto(trials: Sequence[Trial]) -> Set[str]:
    return frozenset()


class TrialLauncher:
    """Launches the trials of a study once each, within its budget."""

    def __init__(
        self, study: Study, log: StudyLog, runner: TrialRunner, arms: Mapping[str, str] = {}, vetoed: Vetoes = no_veto
    ) -> None:
        """`arms` are the runner's names of arms, where they are not those of the study."""
        log.open_study(study)
        self.study, self.log, self.runner, self._arms, self.vetoed = study, log, runner, arms, vetoed
        self._renamed: dict[str, Trial] = {}

    @property
    def spending(self) -> Spending:
        return Spending(self.study, [(trial, self.log.attempts[name]) for name, trial in self.log.trials.items()])

    def run(self, trials: list[Trial]) -> list[Outcome]:
        """Returns outcomes of trials of one phase, in order. Raises `OutOfBudget` before the first launch."""
        new = [trial for trial in trials if trial.id not in self.log.trials]
        if new:
            spending, phase = self.spending, new[0].phase
            cost, left = spending.cost(new), spending.left(phase)
            if cost > left + ROUNDING:
                raise OutOfBudget(f"{len(trials)} trials to {phase} cost {cost:.2f} runs, and {left:.2f} are left")
        for trial in trials:
            self._launch(trial, attempt=1)
        return [self._finish(trial) for trial in trials]

    def _finish(self, trial: Trial) -> Outcome:
        """Returns the first result, or the last infrastructure failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcome = self._outcome(trial, attempt)
            if outcome.end != "infra_failed":
                break
            is_repeated = self.log.attempts[trial.id] > attempt
            if not is_repeated and trial.fidelity > self.spending.left("confirm") + ROUNDING:
                break
        return outcome

    def _outcome(self, trial: Trial, attempt: int) -> Outcome:
        """Returns the outcome of one launch, from the log or from the runner."""
        known = self.log.outcomes.get(trial.id, [])
        if len(known) < attempt:
            self._launch(trial, attempt)
            outcome, known_as = self.runner.collect(launch_key(trial, attempt)), self._for_runner(trial).id
            assert outcome.trial == known_as, f"the runner returned an outcome of {outcome.trial} for {known_as}"
            self.log.entry("outcome", with_dead_environment(replace(outcome, trial=trial.id)).to_json())
        return self.log.outcomes[trial.id][attempt - 1]

    def _launch(self, trial: Trial, attempt: int) -> None:
        """Launches exactly once, also after a crash in between."""
        key = launch_key(trial, attempt)
        if self.log.attempts.get(trial.id, 0) < attempt:
            self.log.entry("intent", {"key": key, "trial": trial.to_json()})
        if len(self.log.outcomes.get(trial.id, [])) < attempt and not self.runner.has(key):
            self.runner.launch(key, self._for_runner(trial))

    def _for_runner(self, trial: Trial) -> Trial:
        return self._renamed.setdefault(trial.id, replace(trial, arm=self._arms.get(trial.arm, trial.arm)))


def launch_key(trial: Trial, attempt: int) -> str:
    return f"{trial.id}-{attempt}"


# ---- confirmation ----------------------------------------------------------------------------------------------------

MIN_SCORES = 4
"""Minimum scores per arm for a verdict."""
DIRECTIONAL = ("supported", "refuted")
DIGITS = 6
"""Decimals in which runs must differ. Sums in another order differ in the last ones."""
UNSEEN = "; all seeds of an arm scored the same, so the interval has what so many seeds cannot exclude"
FUTILITY = 0.1
"""A hypothesis is stopped if the last look would decide it with a smaller chance than this."""


@dataclass
class Evidence:
    """The confirming trials of a study so far, and the findings that they gave."""

    study: Study
    settings: Mapping[str, Setting]
    """By arm, the setting that is judged. An arm that could not be tuned is missing."""
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    """By arm, in the order of the seeds, lost ones included."""
    findings: dict[str, Finding] = field(default_factory=dict)
    """By hypothesis."""

    def samples(self, hypothesis: Hypothesis) -> dict[str, list[float]]:
        """Scores of all results by arm, diverged runs included; or another metric of them."""
        measured = {arm: [one.measured(hypothesis.metric) for one in self.runs(arm)] for arm in hypothesis.contrast}
        return {arm: [value for value in values if value is not None] for arm, values in measured.items()}

    def runs(self, *arms: str) -> list[Outcome]:
        return [outcome for arm in arms for outcome in self.outcomes.get(arm, [])]

    def open(self, vetoed: Set[str] = frozenset()) -> list[Hypothesis]:
        """The hypotheses without a finding whose arms are tuned and not vetoed."""
        arms = self.settings.keys() - vetoed
        return [h for h in self.study.hypotheses if h.id not in self.findings and h.contrast.keys() <= arms]

    def next_trials(self, hypotheses: list[Hypothesis], seeds: int) -> list[Trial]:
        """The trials up to `seeds` seeds. Every other seed reverses the arms, so that drifts affect all arms alike."""
        asked = {name for hypothesis in hypotheses for name in hypothesis.contrast}
        arms = [arm.name for arm in self.study.arms if arm.name in asked]
        return [
            Trial(self.study.id, arm, self.settings[arm], seed_of(self.study, "confirm", number), "confirm")
            for number in range(seeds)
            for arm in (reversed(arms) if number % 2 else arms)
            if number >= len(self.runs(arm))
        ]

    def decide(self, hypotheses: list[Hypothesis]) -> None:
        """Adds the decisions of this look. Each raises the shares of the others, so the test repeats."""
        while True:
            news = [self.finding(h) for h in hypotheses if h.id not in self.findings]
            decided = {found.hypothesis: found for found in news if found.verdict != "inconclusive"}
            if not decided:
                return
            self.findings |= decided

    def stop_for_futility(self, hypotheses: list[Hypothesis]) -> None:
        """Closes hypotheses that even the whole alpha would hardly decide at the last look."""
        study = self.study
        for hypothesis in hypotheses:
            samples = list(self.samples(hypothesis).values())
            if hypothesis.id in self.findings or min(map(len, samples)) < MIN_SCORES:
                continue
            chance = predictive_power(
                welch(*samples, weights=[*hypothesis.contrast.values()], least_spread=study.spread),
                min(map(len, samples)),
                study.looks[-1],
                sesoi=hypothesis.sesoi or study.sesoi,
                difference_level=nominal_level(study.looks, 2 * study.alpha),
                equivalence_level=study.alpha,
            )
            if chance < FUTILITY:
                reason = f"{study.looks[-1]} seeds would decide it with a chance of {chance:.0%} only"
                self.findings[hypothesis.id] = self.finding(hypothesis, f"{reason}, so they were not run")

    def shares(self) -> tuple[float, float]:
        """Alpha of an open confirmatory hypothesis, in the family of differences and in that of equivalences."""
        family = [h.id for h in self.study.hypotheses if h.confirmatory]
        verdicts = [self.findings[name].verdict for name in family if name in self.findings]
        called = sum(verdict in DIRECTIONAL for verdict in verdicts), verdicts.count("practically_equivalent")
        difference, equivalence = (self.study.alpha / max(1, len(family) - number) for number in called)
        return difference, equivalence

    def finding(self, hypothesis: Hypothesis, reason: str = "") -> Finding:
        """Reads the scores of one hypothesis, at the share that the earlier findings leave. An exploratory one is
        tested at the full alpha and marked as exploratory.
        """
        study, arms, samples = self.study, [*hypothesis.contrast], self.samples(hypothesis)
        chosen = {arm: dict(self.settings[arm]) for arm in arms if arm in self.settings}
        every = self.runs(*arms)
        trials = tuple(outcome.trial for outcome in every)
        few, arm = min((len(sample), arm) for arm, sample in samples.items())
        if few < MIN_SCORES:
            reason = reason or f"{few} seeds of {arm!r} came back; at least {MIN_SCORES} per arm are required"
            reason += self.lost_seeds(hypothesis)
            return Finding(hypothesis.id, "inconclusive", reason, settings=chosen, trials=trials)
        difference, equivalence = self.shares() if hypothesis.confirmatory else (study.alpha, study.alpha)
        look = max(len(self.runs(arm)) for arm in arms)
        is_last, untested = look >= study.looks[-1], all(nothing_to_learn(self.runs(arm), study.sesoi) for arm in arms)
        all_scores = [score for outcome in every for score in (*outcome.curve, outcome.score) if score is not None]
        reading = read(
            *samples.values(),
            weights=[*hypothesis.contrast.values()],
            sesoi=hypothesis.sesoi or study.sesoi,
            difference_level=nominal_level(study.looks, 2 * difference),  # two-sided, and one side can err
            equivalence_level=equivalence if is_last and not untested else None,
            different=min(different_runs(self.runs(arm)) for arm in arms) if hypothesis.metric == "score" else 1,
            span=(min(all_scores), max(all_scores)),
            spread=study.spread,
        )
        if reading.verdict == "inconclusive":
            reason = reason or f"undecided at {'the last look' if is_last else 'this look'}"
            reason += remarks(reading, untested=untested)
        else:
            reason = f"look at {look} seeds" + ("" if hypothesis.confirmatory else ", exploratory")
            reason += UNSEEN if reading.p_value is None else ""
        reason += self.lost_seeds(hypothesis) + self.repeated_episodes(hypothesis)
        return Finding(hypothesis.id, reason=reason, **reading._asdict(), seeds=few, settings=chosen, trials=trials)

    def lost_seeds(self, hypothesis: Hypothesis) -> str:
        """Lists seeds that the infrastructure lost for good."""
        lost = {arm: sum(one.score is None for one in self.runs(arm)) for arm in hypothesis.contrast}
        counts = [f"{count} of {arm!r}" for arm, count in lost.items() if count]
        return f"; lost seeds: {', '.join(counts)}" if counts else ""

    def repeated_episodes(self, hypothesis: Hypothesis) -> str:
        """Lists arms with many failed held-out episodes, whose scores may come from a selection."""
        shares = {arm: held_out_counts(self.runs(arm)).share for arm in hypothesis.contrast}
        counts = [f"{share:.0%} of {arm!r}" for arm, share in shares.items() if share > MANY_FAILED]
        return f"; failed and repeated held-out episodes: {', '.join(counts)}" if counts else ""


def confirm(study: Study, settings: Mapping[str, Setting], launcher: TrialLauncher) -> list[Finding]:
    """Returns one finding per hypothesis, in their order. Each is recorded before the study ends."""
    log, evidence = launcher.log, Evidence(study, settings)
    log.decide("frozen", {name: dict(setting) for name, setting in sorted(settings.items())})
    why, vetoed = "", set[str]()

    def record() -> None:
        for name in (h.id for h in study.hypotheses if h.id in evidence.findings):
            log.decide(f"finding {name}", evidence.findings[name].to_json(), kind="finding")

    for seeds in study.looks:
        trials = evidence.next_trials(evidence.open(), seeds)
        vetoed |= launcher.vetoed(trials)
        if not (still_open := evidence.open(vetoed)):
            break
        asked = {arm for hypothesis in still_open for arm in hypothesis.contrast}
        trials = [trial for trial in trials if trial.arm in asked]
        try:
            outcomes = launcher.run(trials)
        except OutOfBudget as refusal:
            why = str(refusal)
            break
        for trial, outcome in zip(trials, outcomes, strict=True):
            evidence.outcomes.setdefault(trial.arm, []).append(outcome)
        evidence.decide(still_open)
        if seeds < study.looks[-1]:
            evidence.stop_for_futility(still_open)
        at_look = {h.id: evidence.findings.get(h.id) or evidence.finding(h) for h in still_open}
        log.decide(f"look {seeds}", {name: found.to_json() for name, found in at_look.items()})
        record()
    for hypothesis in study.hypotheses:
        if hypothesis.id not in evidence.findings:
            tuned = hypothesis.contrast.keys() <= settings.keys()
            reason = why if tuned else "the budget was too small to tune all its arms"
            reason = VETOED if hypothesis.contrast.keys() & vetoed else reason
            evidence.findings[hypothesis.id] = evidence.finding(hypothesis, reason)
    record()
    return [evidence.findings[hypothesis.id] for hypothesis in study.hypotheses]


def nothing_to_learn(outcomes: list[Outcome], sesoi: float) -> bool:
    """True if most of an arm's runs had no gradient from the start and moved no score by `sesoi`.

    The scores of two such arms agree for no other reason. A run that reported no metrics does not count.
    """
    ended = [outcome for outcome in outcomes if outcome.score is not None]
    still = [
        outcome
        for outcome in ended
        if had_nothing_to_learn(outcome) and all(abs(value - outcome.curve[0]) < sesoi for value in outcome.curve)
    ]
    return 2 * len(still) > len(ended)


def different_runs(outcomes: list[Outcome]) -> int:
    """Number of runs, at least 1, with other curves or training rewards. Ignored seeds repeat one run."""
    ways = {
        tuple(round(value or 0.0, DIGITS) for value in (*outcome.curve, *outcome.signals.get("reward/mean", ())))
        for outcome in outcomes
        if outcome.score is not None
    }
    return max(1, len(ways))


def remarks(reading: LookResult, *, untested: bool) -> str:
    """Explains a look that decided nothing."""
    text = ""
    if reading.p_value is None:
        text += UNSEEN
    elif reading.low == reading.high:
        text += "; all seeds of an arm scored the same, so the effect of chance is unknown"
    elif reading.low > 0 or reading.high < 0:
        text += "; there is a difference, but it may be too small to matter"
    if untested:
        text += "; neither arm had anything to learn from, so equal scores are not evidence"
    return text


# ---- tuning, and the whole schedule ----------------------------------------------------------------------------------

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
    """Returns the rungs that would have lost this arm nothing that matters, by one seed; always the last one."""
    scores = {rung: search.run(candidates, rung, seed=0) for rung in study.rungs}
    last = scores[study.rungs[-1]]
    return tuple(
        rung
        for rung in study.rungs
        if rung == study.rungs[-1] or rank_loss(scores[rung], last) <= TOLERATED_LOSS * study.sesoi
    )


def rank_loss(early: Sequence[float], late: Sequence[float]) -> float:
    """By how much the best final score is above that of early survivors. Infinite if early scores tell nothing."""
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


def conduct(
    study: Study, log: StudyLog, runner: TrialRunner, arms: Mapping[str, str] = {}, vetoed: Vetoes = no_veto
) -> tuple[list[Finding], TrialLauncher]:
    """Returns the findings in the order of the hypotheses, and the launcher with its spending. `arms` are the runner's
    names of arms, such as commits, where they are not those of the study.
    """
    launcher = TrialLauncher(study, log, runner, arms, vetoed)
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
    spending = Spending(study)
    names = {name for hypothesis in study.hypotheses for name in hypothesis.contrast}
    runs = [Trial(study.id, arm.name, arm.changes, 0, "confirm") for arm in study.arms if arm.name in names]
    compared = sum(map(spending.length, runs))
    tuned = [arm.num_settings for arm in study.arms if arm.num_settings > 1]
    finals = sum((FINAL_SEEDS - 1) * min(FINALISTS, number) for number in tuned)
    halving = sum(tuned[:1]) + sum(halving_cost(number, study.rungs) for number in tuned[1:])
    return CostEstimate(halving + finals + compared * study.looks[0], sum(tuned) + finals + compared * study.looks[-1])


def halving_cost(alive: int, rungs: Sequence[float]) -> float:
    cost = 0.0
    for before, rung in pairwise((0.0, *rungs)):
        cost += alive * (rung - before)
        alive = min(alive, survivors(range(alive)))
    return cost
