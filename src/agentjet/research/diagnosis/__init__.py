"""What is the matter with a run: a sign that lasts, a probe that tells its causes apart, and what it means.

    signs       ─ what training reported of itself, and whether it changed by more than its noise
    probing     ─ what a runner can be asked, and trials that are run to find out
    case        ─ one trial with its signs and its probes; what a rule is
    infrastructure, configuration, learning, reward ─ the rules, one cause each
    diagnose    ─ goes over a study's trials and writes into its book what it finds

Thresholds are for every study the same, and were chosen on planted failures (`bench.researching.planted`) with other
seeds than those they are scored on. A run keeps its score whatever is the matter with it; only one whose environment
or server died has none, and is repeated.

`diagnose`: what is the matter with the trials of a study. At most one cause each: the first in the order of `RULES`.

The order is that of causes: what is wrong with a setting or its data explains what it does to the learning. A cause
that follows from one already said is not said.

Runs that are one run: a seed that is not used, a setting that changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentjet.research import rules, run_signals
from agentjet.research.launcher import TrialLauncher
from agentjet.research.models import Diagnosis, Outcome, Trial, canonical
from agentjet.research.probes import Case, Need, Probes, Rule

RULES: tuple[Rule, ...] = (
    rules.IGNORED,
    rules.LEAK,
    rules.STALE,
    rules.NOT_A_NUMBER,
    rules.DRIFTING_JUDGE,
    rules.TOO_HARD,
    rules.TOO_EASY,
    rules.NO_EXPLORATION,
    rules.LENGTH_EXPLOSION,
    rules.REWARD_HACKING,
    rules.STEP_TOO_LARGE,
    rules.WRONG_SIGN,
    rules.ENTROPY_COLLAPSE,
)


def needing(need: Need) -> str:
    """The causes that are never said without this, for people."""
    return ", ".join(rule.cause.replace("_", " ") for rule in RULES if rule.asks == need)


def diagnose(desk: TrialLauncher) -> None:
    """Write into the book what it does not say yet. Infrastructure is read off every run, the rest off full ones."""
    trials = sorted(
        (trial for trial in desk.book.trials.values() if trial.phase != "probe"),
        key=lambda trial: trial.phase != "confirm",  # what verdicts stand on is asked about before the money ends
    )
    for trial in trials:
        for outcome in desk.book.outcomes[trial.id]:
            write(desk, run_signals.lost(outcome))
    ended = [(trial, desk.book.outcomes[trial.id][-1]) for trial in trials if trial.fidelity == 1.0]
    full = [(trial, outcome) for trial, outcome in ended if outcome.signals and outcome.end != "infra_failed"]
    same = {diagnosis.trial: diagnosis for diagnosis in duplicate_runs(full)}
    probes = Probes(desk)
    for trial, outcome in full:
        write(desk, examined(Case(trial, outcome, probes)) or same.get(trial.id))


def write(desk: TrialLauncher, diagnosis: Diagnosis | None) -> None:
    if diagnosis is not None and diagnosis not in desk.book.diagnoses.get(diagnosis.trial, []):
        desk.book.append("diagnosis", diagnosis.to_json())


def examined(case: Case) -> Diagnosis | None:
    """What the first rule that holds says."""
    for rule in RULES:
        sign = rule.sign(case)
        tried = sign and rule.probe(case, sign)
        if sign and tried:
            return Diagnosis(
                case.trial.id,
                rule.cause,
                sign.words,
                tried=tried.words,
                meaning=rule.meaning,
                step=sign.step,
                evidence={**sign.numbers, **tried.numbers},
            )
    return None


TIMED = ("time/", "perf/")
"""Signals that differ between runs that are the same."""
TELLING = 8
"""Different numbers that two runs must share before it is no coincidence."""


def duplicate_runs(runs: Iterable[tuple[Trial, Outcome]]) -> list[Diagnosis]:
    """One for each run that repeats an earlier one, number by number."""
    seen: dict[str, Trial] = {}
    found = []
    for trial, outcome in runs:
        reported = {name: values for name, values in outcome.signals.items() if not name.startswith(TIMED)}
        if len({value for values in reported.values() for value in values}) < TELLING:
            continue
        other = seen.setdefault(canonical([reported, trial.fidelity]), trial)
        if other is not trial:
            found.append(duplicated_seed(trial, other) if trial.seed != other.seed else no_op(trial, other))
    return found


def duplicated_seed(trial: Trial, other: Trial) -> Diagnosis:
    return Diagnosis(
        trial.id,
        "duplicated_seed",
        f"every number of the run is that of trial {other.id}, of seed {other.seed}, and this one has {trial.seed}",
        tried="all signals of both runs were compared, step by step",
        meaning="two seeds are one run, so the spread is too small and the verdict too sure. Look at how seeds are set",
    )


def no_op(trial: Trial, other: Trial) -> Diagnosis:
    differ = sorted(
        name for name in {*trial.setting, *other.setting} if trial.setting.get(name) != other.setting.get(name)
    )
    return Diagnosis(
        trial.id,
        "no_op",
        f"every number of the run is that of trial {other.id} of {other.arm!r}; they differ in {differ or 'nothing'}",
        tried="all signals of both runs were compared, step by step",
        meaning="the two arms are one: what differs is not used. The comparison says nothing about it",
    )
