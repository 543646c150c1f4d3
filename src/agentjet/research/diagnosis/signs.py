"""Signals of a run as arrays, and whether they changed by more than their noise. Pure functions.

Names are those of a server's metrics. A step that reported none is not-a-number here. T steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FEWEST = 3
"""Steps on either side without which nothing is compared."""
CLEAR = 4.0
"""Standard errors from which on a change is one. There are dozens of signs in a run: two would often be noise."""


@dataclass(frozen=True)
class Told:
    """What was seen, or what a probe answered: in words, in numbers, and from which step on."""

    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None


class Signals(Mapping[str, Floats]):
    """By name, (T,). A signal that was never reported is empty."""

    def __init__(self, reported: Mapping[str, Sequence[float | None]]) -> None:
        self._arrays = {
            name: np.array([np.nan if value is None else value for value in values], np.float64)
            for name, values in reported.items()
        }

    def __getitem__(self, name: str) -> Floats:
        return self._arrays.get(name, np.empty(0))

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@dataclass(frozen=True, slots=True)
class Change:
    """From the mean of the first steps to that of the last ones."""

    early: float
    late: float
    error: float
    """Standard error of the difference."""

    @property
    def rise(self) -> float:
        return self.late - self.early

    @property
    def rose(self) -> bool:
        return self.rise > CLEAR * self.error

    @property
    def fell(self) -> bool:
        return -self.rise > CLEAR * self.error

    def __str__(self) -> str:
        return f"{self.early:.3g} to {self.late:.3g}"


def first(values: Floats) -> Floats:
    """The first ninth."""
    return values[: max(FEWEST, len(values) // 9)]


def opening(values: Floats) -> Floats:
    """What was reported in the first third of the run."""
    values = values[: len(values) // 3]
    return values[np.isfinite(values)]


def last(values: Floats) -> Floats:
    """The last third."""
    return values[-max(FEWEST, len(values) // 3) :]


def change(values: Floats) -> Change | None:
    """None where too few steps reported any."""
    early, late = (part[np.isfinite(part)] for part in (first(values), last(values)))
    if len(values) < 2 * FEWEST or min(len(early), len(late)) < FEWEST:
        return None
    squares = [float(np.var(part, ddof=1)) / len(part) for part in (early, late)]
    return Change(float(early.mean()), float(late.mean()), float(np.sqrt(sum(squares))))


def holds_since(holds: NDArray[np.bool_]) -> int | None:
    """The first step from which on it holds to the end, where that is long enough to be more than an incident."""
    broken = np.flatnonzero(~holds)
    begin = int(broken[-1]) + 1 if len(broken) else 0
    return begin if len(holds) - begin >= max(FEWEST, len(holds) // 9) else None
