"""`Fact`: a value that a report may print, with its reference and its rounding. `StudyView`: a log arranged for
reports.

Facts come only from a study's log. Prose refers to them as `{{F1.estimate}}`, and the linter refuses other numbers, so
each number in a report can be traced to trials.
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
    """The printed form."""
    value: Value | None = None
    """The unrounded number behind `text`."""
    kind: Literal["plain", "verbatim", "verdict", "figure"] = "plain"
    """Verbatim is code: an id or a file. The text of a figure describes it."""
    ref: str = ""


Group = dict[str, Any]
"""Facts by name for the template, with plain values and subgroups beside them."""


@dataclass(frozen=True)
class Facts:
    """Every fact of a report. The template uses `groups`; references use `known`."""

    groups: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Fact] = field(default_factory=dict)

    def group(self, name: str, facts: Mapping[str, Fact], **beside: Any) -> Group:
        """Registers the facts as `name.key`."""
        named = {key: replace(fact, ref=f"{name}.{key}") for key, fact in facts.items()}
        for fact in named.values():
            assert fact.ref not in self.known, f"two facts are called {fact.ref}"
            self.known[fact.ref] = fact
        return {**named, **beside}


# ---- how things are printed -------------------------------------------------------------------------------------


def quote(text: str) -> Fact:
    """A text of the study, on a single line."""
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
    """In full runs."""
    return Fact(trimmed(number, 2), number)


def chance(p: float | None) -> Fact:
    if p is None:
        return Fact(NOTHING)
    return Fact("< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}", p)


def plain(value: Value) -> Fact:
    """A setting's value in the notation of settings."""
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
    """Rounds scores and differences of a study to a twentieth of the smallest effect of interest, or a little finer."""

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
        """With its sign, also if it rounds to 0."""
        found = self.score(value)
        return replace(found, text=f"+{found.text}") if value is not None and value > 0 else found


Stage = Literal["planned", "exploring", "confirming", "finished"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A trial with its outcome. `number` is its place among the study's trials, from 1."""

    number: int
    trial: Trial
    attempts: int
    outcome: Outcome | None
    """Outcome of the last attempt; None if the trial has not ended."""

    @property
    def score(self) -> float | None:
        return self.outcome.score if self.outcome else None

    @property
    def end(self) -> str:
        return self.outcome.end if self.outcome else "unfinished"


class StudyView:
    """The events of a study, arranged for reports. Raises `ConfigError` if the log holds no study."""

    def __init__(self, log: StudyLog) -> None:
        if log.study is None:
            raise ConfigError("this journal holds no study: there is nothing to report; run the study first")
        self.study: Study = log.study
        self.decisions: Mapping[str, object] = log.decisions
        self.diagnoses: Mapping[str, list[Diagnosis]] = log.diagnoses
        self.amendments: Sequence[Amendment] = log.amendments
        self.num_exchanges = len(log.exchanges)
        self.num_entries = log.num_entries
        self.launched = [
            Launched(number, trial, log.attempts[trial.id], last(log.outcomes.get(trial.id, [])))
            for number, trial in enumerate(log.trials.values(), start=1)
        ]

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """By hypothesis; open ones are missing."""
        names = {hypothesis.id: f"finding {hypothesis.id}" for hypothesis in self.study.hypotheses}
        return {key: Finding.from_json(self.decisions[name]) for key, name in names.items() if name in self.decisions}

    @cached_property
    def chosen(self) -> dict[str, Setting]:
        """By arm, the setting that was frozen for confirmation."""
        return cast("dict[str, Setting]", self.decisions.get("frozen", {}))

    @property
    def not_added(self) -> dict[str, str]:
        """Claims granted after the data began that no annex tests, with the reason."""
        return cast("dict[str, str]", self.decisions.get(NOT_ADDED, {}))

    @property
    def stage(self) -> Stage:
        if len(self.findings) == len(self.study.hypotheses):
            return "finished"
        if "frozen" in self.decisions:
            return "confirming"
        return "exploring" if self.launched else "planned"

    @cached_property
    def spending(self) -> Spending:
        """Spending at the launch of the last trial. Running trials are debited in full."""
        return self._debited(self.launched)

    @property
    def spent(self) -> float:
        """Full runs spent on ended trials."""
        return self._debited([one for one in self.launched if one.outcome is not None]).total

    def _debited(self, trials: Sequence[Launched]) -> Spending:
        spending = Spending(self.study)
        for launched in trials:
            spending.reserve([launched.trial])
        for launched in trials:
            for _ in range(launched.attempts - 1):
                spending.repeat(launched.trial)
        return spending

    def confirming(self, arm: str) -> list[Launched]:
        return [one for one in self.launched if one.trial.phase == "confirm" and one.trial.arm == arm]

    def explored(self, arm: Arm) -> list[Explored]:
        """Settings that tuning tried for an arm, in the order of its knobs' values."""
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
    def evaluation_steps(self) -> list[int]:
        """Steps of the values in a full run's curve; empty if unknown."""
        evaluation_steps = self.study.subject.evaluation_steps(1.0) if self.study.subject else []
        whole = [one.outcome for one in self.launched if one.trial.phase == "confirm" and one.outcome]
        return (
            evaluation_steps
            if all(len(o.curve) == len(evaluation_steps) for o in whole if o.end == "completed")
            else []
        )


def last(outcomes: Sequence[Outcome]) -> Outcome | None:
    return outcomes[-1] if outcomes else None


@dataclass(frozen=True, slots=True)
class Explored:
    """A setting that tuning tried, with its trials. Trials of one seed continue each other."""

    setting: Setting
    launched: tuple[Launched, ...]
    chosen: bool

    @property
    def fidelity(self) -> float:
        """Length of its longest run."""
        return max((one.trial.fidelity for one in self.launched if one.score is not None), default=0.0)

    @property
    def scores(self) -> list[float]:
        """Scores of the seeds with that length."""
        return [one.score for one in self.launched if one.score is not None and one.trial.fidelity == self.fidelity]
