"""`Desk`: where trials are launched, each at most once, and their outcomes come back.

A launch has two entries in the book: the intent, before anybody is asked, and the acknowledgement, after. Between
the two nobody knows; so a desk that finds an unacknowledged intent asks the runner whether it has the key, and
launches only what it has not. A run that the infrastructure lost is launched again with the same seed, under a new key;
so is one whose environment died on the way.

Before each batch of trials, that is after the one before it, the study takes what was asked of it meanwhile: whoever
composes the next batch knows.
"""

from __future__ import annotations

from typing import Protocol

from agentjet.research.diagnosis.infrastructure import checked
from agentjet.research.journal import Book
from agentjet.research.ledger import Ledger, OutOfBudget
from agentjet.research.models import Outcome, Study, Trial
from agentjet.research.steering import Helm, Steering

MAX_ATTEMPTS = 3
"""Launches of a trial that the infrastructure keeps losing."""


class Runner(Protocol):
    """What trains. It keeps what was launched under its key across restarts of the caller, and continues the shorter
    run of the same arm, setting and seed where it has one."""

    def has(self, key: str) -> bool:
        """Whether a launch under this key was accepted."""
        ...

    def launch(self, key: str, trial: Trial) -> None:
        """Begin. Returns when it is sure that `has(key)` will be true."""
        ...

    def collect(self, key: str) -> Outcome:
        """Wait for the end of what was launched under the key."""
        ...


class Vetoed(OutOfBudget):
    """A person wants no further trial of an arm: nothing is left for it."""


class Desk:
    """Launches what a study asks for, within its budget, once."""

    def __init__(self, study: Study, book: Book, runner: Runner, steering: Steering | None = None) -> None:
        book.open_study(study)
        self.study = study
        self.book = book
        self.ledger = Ledger(study)
        self.helm = Helm(study, book, self.ledger, steering)
        self.runner = runner
        self.helm.pass_point()

    @property
    def vetoed(self) -> frozenset[str]:
        """Arms of which no trial is launched any more."""
        return self.helm.course.vetoed

    def run(self, trials: list[Trial]) -> list[Outcome]:
        """Outcomes in the order given. Raises `OutOfBudget` before any is launched when not all can be paid."""
        for trial in trials:
            if trial.arm in self.vetoed:
                raise Vetoed(f"arm {trial.arm!r} was vetoed")
        self.ledger.reserve(trials)
        for trial in trials:
            self._launch(trial, attempt=1)
        outcomes = [self._finish(trial) for trial in trials]
        self.helm.pass_point()
        return outcomes

    def _finish(self, trial: Trial) -> Outcome:
        """The first outcome that is one, or the last infrastructure failure."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            outcome = self._outcome(trial, attempt)
            if outcome.end != "infra_failed" or attempt == MAX_ATTEMPTS:
                break
            try:
                self.ledger.repeat(trial)
            except OutOfBudget:
                break
        return outcome

    def _outcome(self, trial: Trial, attempt: int) -> Outcome:
        """What came of one launch: from the book, or waited for."""
        known = self.book.outcomes.get(trial.id, [])
        if len(known) < attempt:
            self._launch(trial, attempt)
            outcome = checked(self.runner.collect(launch_key(trial, attempt)))
            assert outcome.trial == trial.id, f"the runner answers {trial.id} with an outcome of {outcome.trial}"
            self.book.append("outcome", outcome.to_json())
        return self.book.outcomes[trial.id][attempt - 1]

    def _launch(self, trial: Trial, attempt: int) -> None:
        """Launched exactly once, whatever was interrupted."""
        key = launch_key(trial, attempt)
        if self.book.attempts.get(trial.id, 0) < attempt:
            self.book.append("intent", {"key": key, "trial": trial.to_json()})
        if key in self.book.unacknowledged:
            if not self.runner.has(key):
                self.runner.launch(key, trial)
            self.book.append("ack", {"key": key})


def launch_key(trial: Trial, attempt: int) -> str:
    return f"{trial.id}-{attempt}"
