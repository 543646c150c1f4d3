"""`Proceedings`: what happened in a study, arranged for telling it. A function of the book; nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from agentjet.errors import ConfigError
from agentjet.research.journal import Book
from agentjet.research.ledger import Ledger
from agentjet.research.models import (
    Amendment,
    Arm,
    Diagnosis,
    Finding,
    Outcome,
    Setting,
    Study,
    Trial,
    canonical,
)
from agentjet.research.planner.course import NOT_ADDED

Stage = Literal["planned", "exploring", "confirming", "finished"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A trial and what became of it. `number` is its place among the study's trials, from 1."""

    number: int
    trial: Trial
    attempts: int
    outcome: Outcome | None
    """Of the last attempt; None while it runs, or when nobody waited for it."""

    @property
    def score(self) -> float | None:
        return self.outcome.score if self.outcome else None

    @property
    def end(self) -> str:
        return self.outcome.end if self.outcome else "unfinished"


class Proceedings:
    """Of one study. Raises `ConfigError` where the book holds none."""

    def __init__(self, book: Book) -> None:
        if book.study is None:
            raise ConfigError("this journal holds no study: there is nothing to report; run the study first")
        self.study: Study = book.study
        self.decisions: Mapping[str, object] = book.decisions
        self.diagnoses: Mapping[str, list[Diagnosis]] = book.diagnoses
        self.amendments: Sequence[Amendment] = book.amendments
        self.num_exchanges = len(book.exchanges)
        self.num_entries = book.num_entries
        self.launched = [
            Launched(number, trial, book.attempts[trial.id], last(book.outcomes.get(trial.id, [])))
            for number, trial in enumerate(book.trials.values(), start=1)
        ]

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """By hypothesis; one that is still open is missing."""
        names = {hypothesis.id: f"finding {hypothesis.id}" for hypothesis in self.study.hypotheses}
        return {key: Finding.from_json(self.decisions[name]) for key, name in names.items() if name in self.decisions}

    @cached_property
    def chosen(self) -> dict[str, Setting]:
        """By arm, the setting that was frozen for confirming."""
        return cast("dict[str, Setting]", self.decisions.get("frozen", {}))

    @property
    def not_added(self) -> dict[str, str]:
        """Claims that were granted after the data began and that no annex tests, with the reason."""
        return cast("dict[str, str]", self.decisions.get(NOT_ADDED, {}))

    @property
    def stage(self) -> Stage:
        if len(self.findings) == len(self.study.hypotheses):
            return "finished"
        if "frozen" in self.decisions:
            return "confirming"
        return "exploring" if self.launched else "planned"

    @cached_property
    def ledger(self) -> Ledger:
        """As it stood when the last trial was launched: what runs is debited in full."""
        return self._debited(self.launched)

    @property
    def spent(self) -> float:
        """Full runs that the trials which ended have cost."""
        return self._debited([one for one in self.launched if one.outcome is not None]).total

    def _debited(self, trials: Sequence[Launched]) -> Ledger:
        ledger = Ledger(self.study)
        for launched in trials:
            ledger.reserve([launched.trial])
        for launched in trials:
            for _ in range(launched.attempts - 1):
                ledger.repeat(launched.trial)
        return ledger

    def confirming(self, arm: str) -> list[Launched]:
        return [one for one in self.launched if one.trial.phase == "confirm" and one.trial.arm == arm]

    def explored(self, arm: Arm) -> list[Explored]:
        """The settings of its grid that tuning tried of an arm, in the order of its knobs' values."""
        knobs = [knob.name for knob in arm.nuisance]
        by_setting: dict[str, list[Launched]] = {}
        for one in self.launched:
            trial = one.trial
            rest = {name: value for name, value in trial.setting.items() if name not in knobs}
            if trial.phase == "explore" and trial.arm == arm.name and rest.items() <= dict(arm.changes).items():
                by_setting.setdefault(canonical(dict(trial.setting)), []).append(one)
        chosen = canonical(dict(self.chosen.get(arm.name, {})))
        found = [Explored(every[0].trial.setting, tuple(every), key == chosen) for key, every in by_setting.items()]
        return sorted(found, key=lambda one: [one.setting.get(name, 0) for name in knobs])

    @cached_property
    def marks(self) -> list[int]:
        """The steps that the values of a full run's curve are of; empty where these are not known."""
        marks = self.study.subject.marks(1.0) if self.study.subject else []
        whole = [one.outcome for one in self.launched if one.trial.phase == "confirm" and one.outcome]
        return marks if all(len(o.curve) == len(marks) for o in whole if o.end == "completed") else []


def last(outcomes: Sequence[Outcome]) -> Outcome | None:
    return outcomes[-1] if outcomes else None


@dataclass(frozen=True, slots=True)
class Explored:
    """A setting that tuning tried, with every trial of it: those of a seed continue each other."""

    setting: Setting
    launched: tuple[Launched, ...]
    chosen: bool

    @property
    def fidelity(self) -> float:
        """How far it came."""
        return max((one.trial.fidelity for one in self.launched if one.score is not None), default=0.0)

    @property
    def scores(self) -> list[float]:
        """Of the seeds that came as far as any."""
        return [one.score for one in self.launched if one.score is not None and one.trial.fidelity == self.fidelity]
