"""`RunRecord`: what a run measured so far, on disk after every piece, so that a run that is taken up again measures
nothing twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from agentjet.research.files import write_whole
from agentjet.research.plays import FAILED, PLAYS


class Scoring(NamedTuple):
    """The mean over the held-out tasks, its standard error, and the least that an episode earned; how many were played,
    those counted that failed and were played again.
    """

    mean: float
    error: float
    least: float = math.inf
    """Older records have none, and no numbers of plays."""
    plays: int = 0
    failed: int = 0


@dataclass
class RunRecord:
    """Scorings and metrics by step (the policy version), in the file `path`."""

    path: Path
    scorings: dict[int, Scoring] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> RunRecord:
        """What the file holds; an empty record where there is none."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        scorings = {int(step): Scoring(*scoring) for step, scoring in content["scorings"].items()}
        return cls(path, scorings, {int(step): metrics for step, metrics in content["metrics"].items()})

    def begin_anew(self) -> None:
        """The run stands at the base model, where no server has it any more: what was measured is of other weights."""
        if self.metrics:
            self.scorings, self.metrics = {}, {}
            self._write()

    def scored(self, step: int, scoring: Scoring) -> None:
        self.scorings[step] = scoring
        self._write()

    def learned(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """The metrics of some steps, whether known before or not."""
        self.metrics |= {step: dict(of_step) for step, of_step in metrics.items()}
        self._write()

    def curve(self, end: int) -> tuple[float, ...]:
        """The scores up to a step, in order."""
        return tuple(scoring.mean for step, scoring in sorted(self.scorings.items()) if step <= end)

    def floor(self, declared: float) -> float:
        """What the run scores once its policy answers no more: the least it was seen to earn, and at most `declared`.

        A rule of before the data that rewards below 0 cannot make a prize for diverging.
        """
        return min([declared, *(scoring.least for scoring in self.scorings.values())])

    def signals(self, end: int) -> dict[str, tuple[float | None, ...]]:
        """By metric, its value at each step from the first to `end`; None where there is no number."""
        steps = [self.metrics.get(step, {}) | played(self.scorings.get(step)) for step in range(1, end + 1)]
        names = sorted({name for of_step in steps for name in of_step})
        return {name: tuple(number(of_step.get(name)) for of_step in steps) for name in names}

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"scorings": self.scorings, "metrics": self.metrics}))


def played(scoring: Scoring | None) -> dict[str, float]:
    """As metrics of the step that was scored."""
    return {PLAYS: scoring.plays, FAILED: scoring.failed} if scoring and scoring.plays else {}


def number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
