"""`Proceedings`: what happened in a study, arranged for telling it. A function of the book; nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

from agentjet.errors import ConfigError
from agentjet.research.explore import settings
from agentjet.research.journal import Book
from agentjet.research.ledger import Ledger
from agentjet.research.models import Arm, Diagnosis, Finding, Outcome, Setting, Study, Trial, canonical

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
        self.num_entries = book.num_entries
        self.launched = [
            Launched(number, trial, book.attempts[trial.id], last(book.outcomes.get(trial.id, [])))
            for number, trial in enumerate(book.trials.values(), start=1)
        ]

    @cached_property
    def by_id(self) -> dict[str, Launched]:
        return {launched.trial.id: launched for launched in self.launched}

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
    def stage(self) -> Stage:
        if len(self.findings) == len(self.study.hypotheses):
            return "finished"
        if "frozen" in self.decisions:
            return "confirming"
        return "exploring" if self.launched else "planned"

    @cached_property
    def ledger(self) -> Ledger:
        """As it stood when the last trial was launched."""
        ledger = Ledger(self.study)
        for launched in self.launched:
            ledger.reserve([launched.trial])
        for launched in self.launched:
            for _ in range(launched.attempts - 1):
                ledger.repeat(launched.trial)
        return ledger

    def confirming(self, arm: str) -> list[Launched]:
        return [one for one in self.launched if one.trial.phase == "confirm" and one.trial.arm == arm]

    def explored(self, arm: Arm) -> list[Explored]:
        """What tuning tried of an arm, in the order of its grid: by setting, how far each seed came."""
        mine = [one for one in self.launched if one.trial.phase == "explore" and one.trial.arm == arm.name]
        found = []
        for setting in settings(arm):
            name = canonical(dict(setting))
            furthest: dict[int, Launched] = {}
            for one in mine:
                if canonical(dict(one.trial.setting)) == name and one.score is not None:
                    before = furthest.get(one.trial.seed)
                    if before is None or one.trial.fidelity > before.trial.fidelity:
                        furthest[one.trial.seed] = one
            found.append(Explored(setting, tuple(furthest.values()), setting == self.chosen.get(arm.name)))
        return found


def last(outcomes: Sequence[Outcome]) -> Outcome | None:
    return outcomes[-1] if outcomes else None


@dataclass(frozen=True, slots=True)
class Explored:
    """A setting that tuning tried, with each of its seeds as far as it came."""

    setting: Setting
    launched: tuple[Launched, ...]
    chosen: bool

    @property
    def fidelity(self) -> float:
        """How far it was let."""
        return max((one.trial.fidelity for one in self.launched), default=0.0)

    @property
    def scores(self) -> list[float]:
        """Of the seeds that came as far as any."""
        return [one.score for one in self.launched if one.score is not None and one.trial.fidelity == self.fidelity]
