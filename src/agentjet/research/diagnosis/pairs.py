"""Runs that are one run: a seed that is not used, a setting that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from agentjet.research.models import Diagnosis, Outcome, Trial, canonical

TIMED = ("time/", "perf/")
"""Signals that differ between runs that are the same."""
TELLING = 8
"""Different numbers that two runs must share before it is no coincidence."""


def twins(runs: Iterable[tuple[Trial, Outcome]]) -> list[Diagnosis]:
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
