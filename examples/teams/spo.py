"""SPO: several answers to one question, each rewarded by the share of the others that it beats. No reward model.

    R_i = mean over j != i of P(i beats j), ties 0.5

Source: Self-Play Preference Optimisation, "minimaximalist" (arXiv 2401.04056). Confidence: after it; both orders of a
comparison are judged and averaged, which is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.teams.asking import ask, question, score

POLICIES = ()
RECIPE = {"name": "mars", "gamma": 0.0}
ANSWERS = 4
Judge = Callable[[str, str], float]
"""Returns 1 if the first text is better, 0 if the second is, 0.5 for a tie."""


def play(task: Task, episode: Episode) -> Reward:
    answers = [ask(episode, episode.model, question(task)).text for _ in range(ANSWERS)]
    turns = shares(answers, lambda a, b: 0.5 + 0.5 * float(np.sign(score(a, task) - score(b, task))))
    return Reward(sum(score(answer, task) for answer in answers) / ANSWERS, by_turn=turns)


def shares(answers: Sequence[str], judge: Judge) -> list[float]:
    """Returns R of each answer; 0.5 for a single one."""

    def beats(i: int, j: int) -> float:
        return (judge(answers[i], answers[j]) + 1 - judge(answers[j], answers[i])) / 2

    others = [[beats(i, j) for j in range(len(answers)) if j != i] for i in range(len(answers))]
    return [sum(own) / len(own) if own else 0.5 for own in others]
