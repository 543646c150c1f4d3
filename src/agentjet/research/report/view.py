"""`StudyView`: a log arranged for reports. It can be read while the study runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

from agentjet.errors import ConfigError
from agentjet.research.journal import StudyFolder, StudyLog
from agentjet.research.launcher import Spending
from agentjet.research.models import Finding, Outcome, Study, Trial
from agentjet.research.records import Setting

Stage = Literal["planned", "exploring", "confirming", "finished"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A trial with its outcome."""

    name: str
    """`T` and its place among the study's trials, from 1."""
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
    """The events of a study. Raises `ConfigError` if the log holds no study."""

    def __init__(self, log: StudyLog) -> None:
        if log.study is None:
            raise ConfigError("this journal holds no study: there is nothing to report; run the study first")
        self.log = log
        self.study: Study = log.study
        self.launched = [
            Launched(f"T{number}", trial, log.attempts[trial.id], next(reversed(log.outcomes.get(trial.id, [])), None))
            for number, trial in enumerate(log.trials.values(), start=1)
        ]

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """By hypothesis; open ones are missing."""
        names = {hypothesis.id: f"finding {hypothesis.id}" for hypothesis in self.study.hypotheses}
        known = self.log.decisions
        return {key: Finding.from_json(known[name]) for key, name in names.items() if name in known}

    def looks(self, hypothesis: str) -> list[Finding]:
        """Its finding at each look, up to the look that closed it."""
        names = (f"look {seeds}" for seeds in self.study.looks)
        looks = cast("list[dict[str, Any]]", [self.log.decisions.get(name, {}) for name in names])
        return [Finding.from_json(look[hypothesis]) for look in looks if hypothesis in look]

    @cached_property
    def chosen(self) -> dict[str, Setting]:
        """By arm, the setting that was frozen for confirmation."""
        return cast("dict[str, Setting]", self.log.decisions.get("frozen", {}))

    @property
    def stage(self) -> Stage:
        if len(self.findings) == len(self.study.hypotheses):
            return "finished"
        if "frozen" in self.log.decisions:
            return "confirming"
        return "exploring" if self.launched else "planned"

    @cached_property
    def spending(self) -> Spending:
        """Spending at the launch of the last trial. Running trials are debited in full."""
        return Spending(self.study, [(one.trial, one.attempts) for one in self.launched])

    @property
    def spent(self) -> float:
        """Full runs spent on ended trials."""
        ended = [(one.trial, one.attempts) for one in self.launched if one.outcome is not None]
        return Spending(self.study, ended).total

    def confirming(self, arm: str) -> list[Launched]:
        return [one for one in self.launched if one.trial.phase == "confirm" and one.trial.arm == arm]

    def scores(self, arm: str) -> list[float]:
        """Final scores of the confirming runs."""
        return [one.score for one in self.confirming(arm) if one.score is not None]


def read_study(folder: StudyFolder) -> StudyView:
    """The study of a folder; only planned if it has no journal. Raises `ConfigError`."""
    log = folder.log()
    if log.study is None:
        log.open_study(folder.study())
    return StudyView(log)
