"""`Case`: a trial with what it reported and what can be tried. `Rule`: a cause, how it shows, how it is told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agentjet.research.diagnosis.probing import Answer, Need, Probes, Question
from agentjet.research.diagnosis.signs import Change, Floats, Signals, Told, change, opening
from agentjet.research.models import Outcome, Trial


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
    sign: Callable[[Case], Told | None]
    probe: Callable[[Case, Told], Told | None]
    meaning: str
    """What it says about the study, and what to do."""
    asks: Need | None = None
    """What the cause is never said without."""
