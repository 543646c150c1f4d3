"""`RunRecord`: the measurements of a run, each on disk at once, so that a resumed run measures nothing twice; and
`Signals`: the metrics of a run as arrays.

Names of metrics are those of a server; T is the number of steps. A failed held-out episode is repeated, and both are
counted in the signals `held_out/plays` and `held_out/failed` of the evaluated steps.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentjet.research.journal import write_whole
from agentjet.research.models import Outcome

PLAYS = "held_out/plays"
FAILED = "held_out/failed"
MANY_FAILED = 0.1
"""Above this share of failed episodes the verdict carries a note, because the score may come from a selection."""


class HeldOutScore(NamedTuple):
    """Mean over the held-out tasks, its standard error and the lowest reward of an episode; and the number of episodes,
    those that failed and were repeated included.
    """

    mean: float
    error: float
    least: float
    plays: int
    failed: int


def scoring(rewards_by_task: Sequence[Sequence[float]], plays: int) -> HeldOutScore:
    """The score from the rewards of the episodes that count, among so many."""
    means = [statistics.fmean(rewards) for rewards in rewards_by_task]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    failed = plays - sum(map(len, rewards_by_task))
    return HeldOutScore(statistics.fmean(means), error, min(map(min, rewards_by_task)), plays, failed)


@dataclass
class RunRecord:
    """Held-out scores and metrics by step (the policy version), in the file `path`."""

    path: Path
    scorings: dict[int, HeldOutScore] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> RunRecord:
        """Reads the file. Returns an empty record if there is none."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        scorings = {int(step): HeldOutScore(*scoring) for step, scoring in content["scorings"].items()}
        return cls(path, scorings, {int(step): metrics for step, metrics in content["metrics"].items()})

    def reset(self) -> None:
        """Clears the record if the run restarts at the base model, because its measurements are of other weights."""
        if self.metrics:
            self.scorings, self.metrics = {}, {}
            self._write()

    def add_score(self, step: int, scoring: HeldOutScore) -> None:
        self.scorings[step] = scoring
        self._write()

    def add_metrics(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """Stores the metrics of some steps and replaces known ones."""
        self.metrics |= {step: dict(of_step) for step, of_step in metrics.items()}
        self._write()

    def curve(self, end: int) -> tuple[float, ...]:
        """Held-out scores up to the step `end`, in order."""
        return tuple(scoring.mean for step, scoring in sorted(self.scorings.items()) if step <= end)

    def floor(self, declared: float) -> float:
        """Score of a run whose policy cannot answer any more: the lowest reward it earned, and at most `declared`.

        This rule is fixed before the data, so that rewards below 0 cannot make divergence pay.
        """
        return min([declared, *(scoring.least for scoring in self.scorings.values())])

    def is_broken(self) -> bool:
        """True if the newest step left weights that are not finite, or was skipped because its gradients were not."""
        newest = self.metrics[max(self.metrics)] if self.metrics else {}
        return newest.get("weights/finite") == 0 or newest.get("optim/skipped_steps", 0.0) > 0

    def signals(self, end: int) -> dict[str, tuple[float | None, ...]]:
        """By metric, its value at each step from 1 to `end`; None without a finite number."""
        counts = {step: {PLAYS: score.plays, FAILED: score.failed} for step, score in self.scorings.items()}
        steps = [self.metrics.get(step, {}) | counts.get(step, {}) for step in range(1, end + 1)]
        names = sorted({name for of_step in steps for name in of_step})
        return {
            name: tuple(
                value if (value := of_step.get(name)) is not None and math.isfinite(value) else None
                for of_step in steps
            )
            for name in names
        }

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"scorings": self.scorings, "metrics": self.metrics}))


# ---- signals --------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]
FEWEST = 3
"""Minimum steps that a symptom lasts."""


class Signals(dict[str, Floats]):
    """Arrays (T,) by name: NaN for a step without a value, empty for a signal that was never reported."""

    def __init__(self, reported: Mapping[str, Sequence[float | None]]) -> None:
        super().__init__(
            (name, np.array([np.nan if value is None else value for value in values], np.float64))
            for name, values in reported.items()
        )

    def __missing__(self, name: str) -> Floats:
        return np.empty(0)


def opening(values: Floats) -> Floats:
    """Finite values in the first third of the run."""
    values = values[: len(values) // 3]
    return values[np.isfinite(values)]


def last(values: Floats) -> Floats:
    """The last third."""
    return values[-max(FEWEST, len(values) // 3) :]


def holds_since(holds: NDArray[np.bool_]) -> int | None:
    """First step from which the condition holds to the end. None if that is shorter than a ninth of the run."""
    broken = np.flatnonzero(~holds)
    begin = int(broken[-1]) + 1 if len(broken) else 0
    return begin if len(holds) - begin >= max(FEWEST, len(holds) // 9) else None


class HeldOutCounts(NamedTuple):
    """Number of held-out episodes, and of those that failed."""

    num: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        return self.failed / self.num if self.num else 0.0


def held_out_counts(outcomes: Iterable[Outcome]) -> HeldOutCounts:
    """Counts of the last evaluations, which are the scores."""
    ended = list(outcomes)
    num, failed = (
        sum(int((outcome.signals.get(name) or (0,))[-1] or 0) for outcome in ended) for name in (PLAYS, FAILED)
    )
    return HeldOutCounts(num, failed)
