"""The answer to "is it learning?": the trend of the training reward, with an interval.

The slope is that of a least-squares line through `reward/mean` of the newest steps. Its interval comes from a
moving-block bootstrap of the residuals (Künsch, Annals of Statistics 17, 1989; circular blocks: Politis and Romano,
1992), because the rewards of neighbouring steps are correlated. Blocks of few steps give intervals that are too narrow:
they are scaled by Student's t, the degrees of freedom, and `WIDENED`, which was chosen by simulation.

The interval is that of one look. If one looks at every step of a long run, chance shows a rise more often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agentjet.protocol import Answer, EvaluationView, LearningView

REWARD = "reward/mean"
WINDOW = 20
"""Newest steps that the trend is computed from."""
FEWEST = 8
"""Steps below which it is too early."""
BLOCK = 3
DRAWS = 1000
WIDENED = 1.5
"""With it, flat rewards whose neighbours correlate by 0.3 are called rising in at most 5 % of the looks."""
T_975 = (2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101)
"""Student's 97.5 % quantile for 6 to 18 degrees of freedom."""
NORMAL_975 = 1.96
FEW = 5
"""Steps whose mean is shown as the beginning and as the end."""


def learning(steps: Sequence[Mapping[str, float]], evaluations: Sequence[EvaluationView] = ()) -> LearningView:
    """Returns the answer for the newest steps of a run, the newest last.

    A rising training reward is not called learning if the held-out score fell clearly.
    """
    rewards = [step[REWARD] for step in steps if REWARD in step]
    newest = tuple(rewards[-WINDOW:])
    num = len(newest)
    if num < FEWEST:
        wanted = f"{num} of the {FEWEST} steps with rewards that a trend needs"
        return LearningView(answer="too_early", num_steps=num, text=f"Too early: {wanted}")
    slope, low, high = trend(newest)
    shown = f"{slope:+.2g} a step (95 % {low:+.2g} to {high:+.2g}) over the newest {num}"
    first, last = np.mean(rewards[:FEW]), np.mean(rewards[-FEW:])
    path = f"reward {first:.2g} to {last:.2g} (means of {FEW}) in {len(rewards)} steps"
    fallen = held_out_fall(evaluations)
    answer: Answer = "no"
    text = f"No sign of it: {shown}; {path}"
    if low > 0 and fallen:
        text = f"No: the training reward rises by {shown}, but {fallen}"
    elif low > 0:
        answer, text = "yes", f"Yes: {shown}; {path}"
    elif high < 0:
        answer, text = "falls", f"It falls: {shown}; {path}"
    return LearningView(answer=answer, num_steps=num, slope=slope, low=low, high=high, text=text)


@lru_cache(maxsize=64)
def trend(rewards: tuple[float, ...]) -> tuple[float, float, float]:
    """Slope per step of 8 to 20 rewards, with the ends of its 95 % interval. The interval is deterministic."""
    num = len(rewards)
    times = np.arange(num) - (num - 1) / 2
    weights = times / (times @ times)
    values = np.array(rewards, np.float64)
    slope = float(weights @ values)
    residuals = values - values.mean() - slope * times
    errors = residuals[_blocks(num)] @ weights
    scale = WIDENED * np.sqrt(num / (num - 2)) * T_975[num - FEWEST] / NORMAL_975
    below, above = np.quantile(errors, [0.025, 0.975])
    return slope, float(slope - scale * above), float(slope - scale * below)


@lru_cache(maxsize=WINDOW)
def _blocks(num: int) -> NDArray[np.intp]:
    """Returns indices (DRAWS, num) of resampled residuals, in circular blocks."""
    starts = np.random.default_rng(0).integers(0, num, (DRAWS, -(-num // BLOCK), 1))
    return np.asarray(((starts + np.arange(BLOCK)) % num).reshape(DRAWS, -1)[:, :num], np.intp)


def held_out_fall(evaluations: Sequence[EvaluationView]) -> str:
    """A phrase if the newest held-out score is clearly below the best one, else ''.

    Clearly: by two standard errors of the difference. A score between 0 and 1 has at most the error of a coin,
    0.5 / sqrt(tasks). Other scores are not judged, because their errors are not recorded.
    """
    if not evaluations or any(not 0 <= one.score <= 1 for one in evaluations):
        return ""
    best, newest = max(evaluations, key=lambda one: one.score), evaluations[-1]
    error = (0.25 / best.num_tasks + 0.25 / newest.num_tasks) ** 0.5
    if best.score - newest.score <= 2 * error:
        return ""
    return (
        f"the held-out score fell from {best.score:.3g} at version {best.policy_version} to {newest.score:.3g} at "
        f"version {newest.policy_version}"
    )
