"""Probes: questions to a runner about an ended run, and trials that are run to rule out causes.

An answer is in the journal before it is used, so a resumed study asks nothing twice. Probe trials are paid from the
budget that is left at the end: no verdict depends on a probe.

A `Case` is a trial with its signals and probes. A `Rule` is a cause with its symptom and probe. `duplicate_runs` finds
runs that are equal in every number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from agentjet.research.launcher import OutOfBudget, TrialLauncher, launch_key
from agentjet.research.models import Diagnosis, Outcome, Trial, Value, canonical
from agentjet.research.run_signals import Change, Floats, Observation, Signals, change, opening

Question = Literal["settings", "tasks", "weights", "held_out", "regrade"]
"""Questions to a runner, and the names in the answers.

* `settings`: the settings in effect on the server during the run, by their names in studies.
* `tasks`: number of tasks in `train` and in `held_out`, and of those in both, `shared`.
* `weights`: weights were hashed before and after each of the last `steps` steps (a third of the run). `learner` and
  `sampler` count the steps in which the hashes changed there.
* `held_out`: the metric of the untrained policy, `before`, of the trained one, `after`, and the standard error of their
  difference, `error`. With several tries per task also pass@k: `pass_before` and `pass_after`.
* `regrade`: mean rewards of stored samples from the first and the last steps. Paid in training: `paid_first`,
  `paid_last`. First samples graded again by the present training grader: `again_first`. By the held-out evaluator:
  `held_first`, `held_last`. Standard error of such a mean: `error`. Over the last samples, the correlation of length
  with the reward beyond the held-out grade: `length_last`, 0 without any.
"""
Need = tuple[Question, str]
"""A question, and the name that its answer must contain; "" means any name."""
NEEDS: dict[Need, str] = {
    ("settings", ""): "the settings in effect on the server",
    ("tasks", "shared"): "if held-out tasks are trained on",
    ("weights", "sampler"): "if the steps changed the weights of learner and sampler",
    ("regrade", "again_first"): "the present grader's rewards of the first samples",
    ("regrade", "held_last"): "the held-out evaluator's rewards of the training samples",
    ("held_out", "after"): "the scores before and after training",
    ("held_out", "pass_after"): "pass@k before and after training",
}
"""Descriptions for messages."""
Answer = Mapping[str, Value]
SLOWER = 1 / 8
"""Factor of the learning rate in the trial that tests whether the steps were too large."""
RATE = "job.optimizer.lr"


@runtime_checkable
class Prober(Protocol):
    """A runner that answers questions. Causes that need an answer are not reported for other runners."""

    def ask(self, key: str, question: Question) -> Answer | None:
        """Answers a question about the ended run under the key. None if the answer is unknown. Values are finite."""
        ...


def missing(decision: str, answer: object) -> list[Need]:
    """Returns the needs that an answer leaves open. `decision` is the name under which the answer is recorded."""
    known = answer if isinstance(answer, dict) else {}
    return [need for need in asked_by(decision) if need[1] not in known and (need[1] or not known)]


def asked_by(decision: str) -> list[Need]:
    return [need for need in NEEDS if decision.startswith(f"{need[0]} of ")]


class Probes:
    """Asks questions about the trials of a study, each once."""

    def __init__(self, launcher: TrialLauncher) -> None:
        self._launcher = launcher
        self._slower: dict[str, tuple[Trial, Outcome] | str] = {}

    def ask(self, trial: Trial, question: Question) -> Answer | None:
        log, runner, name = self._launcher.log, self._launcher.runner, f"{question} of {trial.id}"
        if name not in log.decisions:
            key = launch_key(trial, len(log.outcomes[trial.id]))
            log.decide(name, runner.ask(key, question) if isinstance(runner, Prober) else None)
        answer = log.decisions[name]
        assert answer is None or isinstance(answer, dict)
        return answer

    def slower(self, trial: Trial, rate: float) -> tuple[Trial, Outcome] | str:
        """Reruns the trial at an eighth of the learning rate `rate`, or returns the reason why not. One rerun serves
        all seeds.
        """
        run = canonical([trial.arm, dict(trial.setting), trial.fidelity])
        if run not in self._slower:
            self._slower[run] = self._rerun(trial, rate)
        return self._slower[run]

    def _rerun(self, trial: Trial, rate: float) -> tuple[Trial, Outcome] | str:
        again = replace(trial, setting={**trial.setting, RATE: rate * SLOWER}, phase="probe")
        try:
            [outcome] = self._launcher.run([again])
        except OutOfBudget as refusal:
            return str(refusal)
        if outcome.end == "infra_failed":
            return f"the infrastructure lost it: {outcome.note}"
        return again, outcome


@dataclass(frozen=True)
class Case:
    trial: Trial
    outcome: Outcome
    probes: Probes

    @cached_property
    def signals(self) -> Signals:
        return Signals(self.outcome.signals)

    def change(self, name: str) -> Change | None:
        return change(self.signals[name])

    def opening(self, name: str) -> Floats:
        return opening(self.signals[name])

    def ask(self, question: Question) -> dict[str, float] | None:
        """Returns the numbers of an answer; None if it is unknown."""
        answer = self.probes.ask(self.trial, question)
        return None if answer is None else {name: float(value) for name, value in answer.items()}

    @property
    def settings(self) -> Answer | None:
        """Settings in effect on the server."""
        return self.probes.ask(self.trial, "settings")

    @property
    def slower(self) -> Case | str:
        """The same run at an eighth of the learning rate, or the reason why there is none."""
        rates = self.signals["optim/lr"]
        if not np.isfinite(rates).any():
            return "the run did not report its learning rate"
        found = self.probes.slower(self.trial, float(np.nanmax(rates)))
        return found if isinstance(found, str) else Case(*found, self.probes)


@dataclass(frozen=True)
class Rule:
    """Holds if `symptom` is seen and `probe` rules out other causes."""

    cause: str
    symptom: Callable[[Case], Observation | None]
    probe: Callable[[Case, Observation], Observation | None]
    meaning: str
    """Consequence for the study, and the remedy."""
    asks: Need | None = None
    """The answer without which the cause is never reported."""


TIMED = ("time/", "perf/")
"""Signals that differ between equal runs."""
TELLING = 8
"""Distinct numbers that two runs must share to count as equal."""


def duplicate_runs(runs: Iterable[tuple[Trial, Outcome]]) -> list[Diagnosis]:
    """Returns a diagnosis for each run whose numbers all equal those of an earlier one."""
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
        meaning="two seeds gave the same run, so the verdict is too certain. Check how seeds are set",
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
        meaning="the two arms are equal: the setting in which they differ is not used, and was not tested",
    )
