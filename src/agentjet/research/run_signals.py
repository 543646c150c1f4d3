"""Training metrics of a run as arrays, and the detection of lost environments. Pure functions.

Names are those of a server's metrics; T is the number of steps. A step that reported no value is NaN.

A failed held-out episode is repeated, and both are counted in the signals `held_out/plays` and `held_out/failed` of the
evaluated steps. Older outcomes lack these signals.
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
"""Minimum steps that a symptom lasts."""


@dataclass(frozen=True)
class Symptom:
    """As text, as numbers, and with its first step."""

    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None


class Signals(Mapping[str, Floats]):
    """Arrays (T,) by name. A signal that was never reported is empty."""

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


LOST_SHARE = 0.5
"""Share of lost episodes that marks a dead environment; a flaky one loses a few."""
JUMP = 5.0
"""Standard errors by which a step's mean reward falls at once."""
UNEVEN = 0.5
"""Share of the mean length. If lengths of answers vary by more between steps, the policy has changed."""
DEAD = "dead_environment"
SERVER = "server_lost"


def with_dead_environment(outcome: Outcome) -> Outcome:
    """Returns the outcome, as `infra_failed` if its environment died during the run."""
    dead = dead_environment(Signals(outcome.signals))
    if dead is None or outcome.score is None:
        return outcome
    return replace(outcome, end="infra_failed", score=None, curve=(), note=f"{DEAD}: {dead.words}")


def lost_run_diagnosis(outcome: Outcome) -> Diagnosis | None:
    """Diagnosis of a run that the infrastructure lost."""
    if outcome.end != "infra_failed":
        return None
    dead = dead_environment(Signals(outcome.signals))
    if dead is not None:
        return Diagnosis(
            outcome.trial,
            DEAD,
            dead.words,
            meaning="its rewards do not measure the policy: the run is not a result. Check the agents' logs",
            step=dead.step,
            evidence=dead.numbers,
        )
    steps = max(map(len, outcome.signals.values()), default=0)
    return Diagnosis(
        outcome.trial,
        SERVER,
        f"the run ended after {steps} steps: {outcome.note or 'no reason was given'}",
        meaning="the run is not a result about its setting. Check the server's log",
        step=steps,
    )


def dead_environment(signals: Signals) -> Symptom | None:
    return vanished(signals) or mute(signals)


def vanished(signals: Signals) -> Symptom | None:
    """Symptom: many started episodes never end, up to the end of the run."""
    came, gone = signals["batch/episodes"], signals["episodes/expired"] + signals["episodes/aborted"]
    if not len(came) or len(came) != len(gone):
        return None
    share = np.nan_to_num(gone / np.maximum(gone + came, 1))
    step = holds_since(share >= LOST_SHARE)
    if step is None:
        return None
    words = f"from step {step} on {share[step:].mean():.0%} of the episodes did not come back"
    return Symptom(words, {"episodes lost": float(share[step:].mean())}, step)


def mute(signals: Signals) -> Symptom | None:
    """Symptom: every episode earns the same from one step to the next, while the policy's answers stay as long as
    before.

    A ruined policy also earns nothing, but its answers change.
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
    return Symptom(words, {"reward/mean before": float(rewards[step - 1]), "reward/mean": float(rewards[step])}, step)


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
