"""`Fact`: a thing that a report may say, with the name it is referred to by and the rounding it is printed with.

Facts come from a study's book and from nowhere else. Prose refers to them as `{{F1.estimate}}`; a numeral that is
no such reference is refused (`linter`), so whatever number stands in a report can be traced to trials.

`StudyView`: what happened in a study, arranged for telling it. A function of the book; nothing is judged here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

from agentjet.errors import ConfigError
from agentjet.research.amendments import NOT_ADDED
from agentjet.research.journal import StudyLog
from agentjet.research.launcher import Spending
from agentjet.research.models import (
    Amendment,
    Arm,
    Diagnosis,
    Finding,
    Outcome,
    Setting,
    Study,
    Trial,
    Value,
    canonical,
)

NOTHING = "–"
MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, slots=True)
class Fact:
    text: str
    """As it is printed."""
    value: Value | None = None
    """Unrounded, where `text` is a number."""
    kind: Literal["said", "verbatim", "verdict", "figure"] = "said"
    """Verbatim is code: an id, a file. The text of a figure says what it shows."""
    ref: str = ""


Group = dict[str, Any]
"""Facts by name, for the template; beside them plain values that it may ask for, and groups that belong to them."""


@dataclass(frozen=True)
class Facts:
    """Every fact of a report. `groups` is what the template sees, `known` what a reference may name."""

    groups: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Fact] = field(default_factory=dict)

    def group(self, name: str, facts: Mapping[str, Fact], **beside: Any) -> Group:
        """Name the facts `name.key`, once and for all."""
        named = {key: replace(fact, ref=f"{name}.{key}") for key, fact in facts.items()}
        for fact in named.values():
            assert fact.ref not in self.known, f"two facts are called {fact.ref}"
            self.known[fact.ref] = fact
        return {**named, **beside}


# ---- how things are printed -------------------------------------------------------------------------------------


def quote(text: str) -> Fact:
    """What the study or its outcomes say in words, on a single line."""
    return Fact(" ".join(text.split()) or NOTHING)


def verbatim(text: str) -> Fact:
    return Fact(text or NOTHING, kind="verbatim")


def count(number: int) -> Fact:
    return Fact(f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"), number)


def counts(numbers: tuple[int, ...]) -> Fact:
    return Fact(", ".join(map(str, numbers)))


def share(part: float, *, decimals: int = 1) -> Fact:
    return Fact(f"{trimmed(100 * part, decimals)} %", part)


def runs(number: float) -> Fact:
    """Full runs."""
    return Fact(trimmed(number, 2), number)


def chance(p: float | None) -> Fact:
    if p is None:
        return Fact(NOTHING)
    return Fact("< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}", p)


def plain(value: Value) -> Fact:
    """A setting's value, as somebody would type it."""
    return Fact(written(value), value)


def setting_text(setting: Setting) -> Fact:
    return quote(", ".join(f"{name} = {written(value)}" for name, value in sorted(setting.items())) or "the base")


def written(value: Value) -> str:
    if type(value) is not float:
        return str(value)
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.10g}")


def trimmed(number: float, decimals: int) -> str:
    text = f"{number:.{decimals}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", MINUS)


@dataclass(frozen=True, slots=True)
class Rounding:
    """Scores and differences of a study: to a twentieth of the smallest effect of interest, or a little finer."""

    sesoi: float

    @property
    def decimals(self) -> int:
        return max(0, math.ceil(math.log10(20 / self.sesoi)))

    def score(self, value: float | None) -> Fact:
        if value is None:
            return Fact(NOTHING)
        text = f"{value:.{self.decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"
        return Fact(text.replace("-", MINUS), value)

    def difference(self, value: float | None) -> Fact:
        """With its sign, also where rounding leaves 0."""
        found = self.score(value)
        return replace(found, text=f"+{found.text}") if value is not None and value > 0 else found


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


class StudyView:
    """Of one study. Raises `ConfigError` where the book holds none."""

    def __init__(self, book: StudyLog) -> None:
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
    def ledger(self) -> Spending:
        """As it stood when the last trial was launched: what runs is debited in full."""
        return self._debited(self.launched)

    @property
    def spent(self) -> float:
        """Full runs that the trials which ended have cost."""
        return self._debited([one for one in self.launched if one.outcome is not None]).total

    def _debited(self, trials: Sequence[Launched]) -> Spending:
        ledger = Spending(self.study)
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
