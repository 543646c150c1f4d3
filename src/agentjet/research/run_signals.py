"""Signals of a run as arrays, and whether they changed by more than their noise. Pure functions.

Names are those of a server's metrics. A step that reported none is not-a-number here. T steps.

Runs that are no results: the environment or the server died. Read from the outcome alone, when it arrives.

Held-out plays that failed: each is played again, so that a score is of plays that did not fail. An outcome has their
number among its signals, at the steps that were scored; those of before they were counted have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentjet.research.models import Diagnosis, Outcome

Floats = NDArray[np.float64]
FEWEST = 3
"""Steps on either side without which nothing is compared."""
CLEAR = 4.0
"""Standard errors from which on a change is one. There are dozens of signs in a run: two would often be noise."""


@dataclass(frozen=True)
class Observation:
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


LOST_SHARE = 0.5
"""Of the episodes, from which on an environment is dead: a flaky one loses a few."""
JUMP = 5.0
"""Standard errors of a step's mean reward that it falls by at once."""
UNEVEN = 0.5
"""Of the mean length: a policy whose answers differ by more from step to step has changed."""
DEAD = "dead_environment"
SERVER = "server_lost"


def with_dead_environment(outcome: Outcome) -> Outcome:
    """The outcome as it came, or `infra_failed` where its environment died on the way."""
    dead = dead_environment(Signals(outcome.signals))
    if dead is None or outcome.end == "infra_failed":
        return outcome
    return replace(outcome, end="infra_failed", score=None, curve=(), note=f"{DEAD}: {dead.words}")


def lost(outcome: Outcome) -> Diagnosis | None:
    """Why the infrastructure lost a run."""
    if outcome.end != "infra_failed":
        return None
    dead = dead_environment(Signals(outcome.signals))
    if dead is not None:
        return Diagnosis(
            outcome.trial,
            DEAD,
            dead.words,
            tried="the run was repeated with the same seed",
            meaning="its rewards say nothing about the policy: the run is no result. Look at the agents' logs",
            step=dead.step,
            evidence=dead.numbers,
        )
    steps = max(map(len, outcome.signals.values()), default=0)
    return Diagnosis(
        outcome.trial,
        SERVER,
        f"the run ended after {steps} steps: {outcome.note or 'no reason was given'}",
        tried="the run was repeated with the same seed",
        meaning="nothing about the setting: the run is no result. Look at the server's log",
        step=steps,
    )


def dead_environment(signals: Signals) -> Observation | None:
    return vanished(signals) or mute(signals)


def vanished(signals: Signals) -> Observation | None:
    """Episodes that were begun and did not come back, to the end."""
    came, gone = signals["batch/episodes"], signals["episodes/expired"] + signals["episodes/aborted"]
    if not len(came) or len(came) != len(gone):
        return None
    share = np.nan_to_num(gone / np.maximum(gone + came, 1))
    step = holds_since(share >= LOST_SHARE)
    if step is None:
        return None
    words = f"from step {step} on {share[step:].mean():.0%} of the episodes did not come back"
    return Observation(words, {"episodes lost": float(share[step:].mean())}, step)


def mute(signals: Signals) -> Observation | None:
    """Every episode earns the same from one step to the next, while the policy writes as it did before.

    A policy that was ruined also earns nothing; but it writes differently.
    """
    rewards, spread, length = (signals[name] for name in ("reward/mean", "reward/std", "completion/tokens"))
    episodes = signals["batch/episodes"]
    if not len(rewards) or not len(rewards) == len(spread) == len(length) == len(episodes):
        return None
    step = holds_since((spread == 0) & (rewards == rewards[-1]))
    if step is None or step < FEWEST:
        return None
    fall, error = rewards[step - 1] - rewards[step], spread[step - 1] / np.sqrt(episodes[step - 1])
    around = length[step - FEWEST : step + FEWEST]
    if fall <= JUMP * error or np.ptp(around) > UNEVEN * around.mean():
        return None
    words = (
        f"the mean reward fell from {rewards[step - 1]:.3g} to {rewards[step]:.3g} at step {step}; every episode earns "
        "the same since, by answers as long as before"
    )
    return Observation(
        words, {"reward/mean before": float(rewards[step - 1]), "reward/mean": float(rewards[step])}, step
    )


PLAYS = "held_out/plays"
FAILED = "held_out/failed"
MANY_FAILED = 0.1
"""A larger share of failed plays is said beside the verdict: what is scored may be a choice among plays."""


class HeldOutCounts(NamedTuple):
    """So many, of which so many failed."""

    num: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        return self.failed / self.num if self.num else 0.0


def held_out_counts(outcomes: Iterable[Outcome]) -> HeldOutCounts:
    """Of the scorings at the last steps, which the scores are."""
    ended = list(outcomes)
    num, failed = (
        sum(int((outcome.signals.get(name) or (0,))[-1] or 0) for outcome in ended) for name in (PLAYS, FAILED)
    )
    return HeldOutCounts(num, failed)
