"""Runs that are no results: the environment or the server died. Read from the outcome alone, when it arrives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agentjet.research.diagnosis.signs import FEWEST, Signals, Told, holds_since
from agentjet.research.models import Diagnosis, Outcome

LOST_SHARE = 0.5
"""Of the episodes, from which on an environment is dead: a flaky one loses a few."""
JUMP = 5.0
"""Standard errors of a step's mean reward that it falls by at once."""
UNEVEN = 0.5
"""Of the mean length: a policy whose answers differ by more from step to step has changed."""
DEAD = "dead_environment"
SERVER = "server_lost"


def checked(outcome: Outcome) -> Outcome:
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


def dead_environment(signals: Signals) -> Told | None:
    return vanished(signals) or mute(signals)


def vanished(signals: Signals) -> Told | None:
    """Episodes that were begun and did not come back, to the end."""
    came, gone = signals["batch/episodes"], signals["episodes/expired"] + signals["episodes/aborted"]
    if not len(came) or len(came) != len(gone):
        return None
    share = np.nan_to_num(gone / np.maximum(gone + came, 1))
    step = holds_since(share >= LOST_SHARE)
    if step is None:
        return None
    words = f"from step {step} on {share[step:].mean():.0%} of the episodes did not come back"
    return Told(words, {"episodes lost": float(share[step:].mean())}, step)


def mute(signals: Signals) -> Told | None:
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
    return Told(words, {"reward/mean before": float(rewards[step - 1]), "reward/mean": float(rewards[step])}, step)
