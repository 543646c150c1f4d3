"""MALT online: a tree of answers, critiques and refinements. A node's value is the mean score of the leaves below it,
and its reward is that value minus the mean of its siblings.

Source: MALT (arXiv 2412.01928), read in notes about it: its tree and its values. The paper exports the tree and trains
on it offline; `pairs` gives its preference pairs. Confidence: inspired by.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.teams.asking import ask, question, role, score

POLICIES = ()
RECIPE = {"name": "mars", "gamma": 0.0}
"""The advantage of a call is its reward minus the role's mean, which is 0 here."""
BRANCHES = 2
"""Children of each node; 3 in the paper."""
Array = NDArray[np.float64]


def play(task: Task, episode: Episode) -> Reward:
    leaves = np.zeros((BRANCHES,) * 3)
    for g in range(BRANCHES):
        answer = ask(episode, role(episode, "generator"), question(task)).text
        for v in range(BRANCHES):
            critique = ask(episode, role(episode, "verifier"), f"{question(task)} Is this right: {answer}").text
            for r in range(BRANCHES):
                asked = f"{question(task)} Improve this: {answer} Critique: {critique}"
                leaves[g, v, r] = score(ask(episode, role(episode, "refiner"), asked).text, task)
    names = ("generator", "verifier", "refiner")
    turns = {name: above_siblings(values(leaves, level)) for level, name in enumerate(names)}
    return Reward(float(leaves.mean()), by_turn=turns)


def values(leaves: Array, level: int) -> Array:
    """Returns the values of the nodes of a level: 0 generators, 1 verifiers, 2 refiners, the leaves."""
    return np.asarray(leaves.mean(tuple(range(level + 1, leaves.ndim))))


def above_siblings(values: Array) -> list[float]:
    """Returns the value of each node minus the mean of its siblings and itself, in the order of the calls."""
    rewards: list[float] = (values - values.mean(-1, keepdims=True)).ravel().tolist()
    return rewards


def pairs(values: Array) -> Iterator[tuple[int, int]]:
    """Yields a better and a worse child [C] of one parent: values above 0.5, and not."""
    for better in np.flatnonzero(values > 0.5).tolist():
        for worse in np.flatnonzero(values <= 0.5).tolist():
            yield better, worse
