"""Training metrics of a run as arrays, and the counts of its held-out episodes. Pure functions.

Names are those of a server's metrics; T is the number of steps. A step that reported no value is NaN.

A failed held-out episode is repeated, and both are counted in the signals `held_out/plays` and `held_out/failed` of the
evaluated steps. Older outcomes lack these signals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentjet.research.models import Outcome

Floats = NDArray[np.float64]
FEWEST = 3
"""Minimum steps that a symptom lasts."""


class Signals(dict[str, Floats]):
    """Arrays (T,) by name. A signal that was never reported is empty."""

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


PLAYS = "held_out/plays"
FAILED = "held_out/failed"
MANY_FAILED = 0.1
"""Above this share of failed episodes the verdict carries a note, because the score may come from a selection."""


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
