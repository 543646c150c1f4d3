"""Probes: what a runner can be asked about a run that has ended, and trials that are run to find out.

An answer is in the book before anybody acts on it, so a study that is gone on with asks nothing twice. Trials are paid
from what the budget has left when everything else is decided: no verdict ever depends on a probe.

`Case`: a trial with what it reported and what can be tried. `Rule`: a cause, how it shows, how it is told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from agentjet.research.launcher import OutOfBudget, TrialLauncher, launch_key
from agentjet.research.models import Outcome, Trial, Value, canonical
from agentjet.research.run_signals import Change, Floats, Observation, Signals, change, opening

Question = Literal["settings", "tasks", "weights", "held_out", "regrade"]
"""What can be asked, and the names in the answer.

* `settings`: those that the server had in effect during the run, by the names that studies give them.
* `tasks`: how many there are in `train` and in `held_out`, and how many of these are also among those, `shared`.
* `weights`: over how many `steps`, the last third of the run, hashes of the weights were compared, before the step with
  after it, and in how many they differed where they learn, `learner`, and where they sample, `sampler`.
* `held_out`: the metric of the untrained policy, `before`, of the trained one, `after`, and the standard error of their
  difference, `error`; where the evaluation has several tries at a task, also pass@k, `pass_before` and `pass_after`.
* `regrade`: mean rewards of the same samples, those of the first steps and those of the last ones, as training paid
  them, `paid_first` and `paid_last`; of the first ones by the training grader of today, `again_first`; of both by the
  held-out evaluator, `held_first` and `held_last`; the standard error of such a mean, `error`; and over the last ones
  the correlation of length with what was paid beyond the held-out grade, `length_last`, 0 where nothing was.
"""
Need = tuple[Question, str]
"""A question, and the name in its answer that counts; "" where any does."""
NEEDS: dict[Need, str] = {
    ("settings", ""): "which settings the server had in effect",
    ("tasks", "shared"): "whether held-out tasks are trained on",
    ("weights", "sampler"): "whether learner and sampler took the steps up",
    ("regrade", "again_first"): "what the grader of today says of the first samples",
    ("regrade", "held_last"): "what the held-out evaluator says of the samples that were paid",
    ("held_out", "after"): "what it scored before and after",
    ("held_out", "pass_after"): "what several tries at a task found before and after",
}
"""For people."""
Answer = Mapping[str, Value]
SLOWER = 1 / 8
"""Of the learning rate, in the trial that tells a step too large from everything else."""
RATE = "job.optimizer.lr"


@runtime_checkable
class Prober(Protocol):
    """A runner that can be asked. One that cannot is not, and whatever needs its answer is not said."""

    def ask(self, key: str, question: Question) -> Answer | None:
        """About the run launched under the key, which has ended. None where it cannot be told. Values are finite."""
        ...


def missing(decision: str, answer: object) -> list[Need]:
    """What a decision of the book, if it is the answer to a question, does not tell."""
    known = answer if isinstance(answer, dict) else {}
    return [need for need in asked_by(decision) if need[1] not in known and (need[1] or not known)]


def asked_by(decision: str) -> list[Need]:
    return [need for need in NEEDS if decision.startswith(f"{need[0]} of ")]


class Probes:
    """What is asked about the trials of a study."""

    def __init__(self, desk: TrialLauncher) -> None:
        self._desk = desk
        self._slower: dict[str, tuple[Trial, Outcome] | str] = {}

    def ask(self, trial: Trial, question: Question) -> Answer | None:
        book, runner, name = self._desk.book, self._desk.runner, f"{question} of {trial.id}"
        if name not in book.decisions:
            key = launch_key(trial, len(book.outcomes[trial.id]))
            book.decide(name, runner.ask(key, question) if isinstance(runner, Prober) else None)
        answer = book.decisions[name]
        assert answer is None or isinstance(answer, dict)
        return answer

    def slower(self, trial: Trial, rate: float) -> tuple[Trial, Outcome] | str:
        """The same at an eighth of the learning rate, `rate`, or why there is none. One such trial serves all seeds."""
        run = canonical([trial.arm, dict(trial.setting), trial.fidelity])
        if run not in self._slower:
            self._slower[run] = self._rerun(trial, rate)
        return self._slower[run]

    def _rerun(self, trial: Trial, rate: float) -> tuple[Trial, Outcome] | str:
        again = replace(trial, setting={**trial.setting, RATE: rate * SLOWER}, phase="probe")
        try:
            [outcome] = self._desk.run([again])
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
        """The numbers of an answer; None where the runner cannot tell."""
        answer = self.probes.ask(self.trial, question)
        return None if answer is None else {name: float(value) for name, value in answer.items()}

    @property
    def settings(self) -> Answer | None:
        """What the server had in effect."""
        return self.probes.ask(self.trial, "settings")

    @property
    def slower(self) -> Case | str:
        """The same run at an eighth of the learning rate, or why there is none."""
        rates = self.signals["optim/lr"]
        if not np.isfinite(rates).any():
            return "the run did not report its learning rate"
        found = self.probes.slower(self.trial, float(np.nanmax(rates)))
        return found if isinstance(found, str) else Case(*found, self.probes)


@dataclass(frozen=True)
class Rule:
    """Holds where `sign` is seen and `probe` does not explain it otherwise."""

    cause: str
    sign: Callable[[Case], Observation | None]
    probe: Callable[[Case, Observation], Observation | None]
    meaning: str
    """What it says about the study, and what to do."""
    asks: Need | None = None
    """What the cause is never said without."""
