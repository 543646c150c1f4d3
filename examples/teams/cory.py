"""CORY: a pioneer answers, an observer sees that answer and answers again. Both models get the sum of both rewards, and
exchange their roles every few steps.

Source: github.com/Harry67Hu/CORY at 710219f, with the recipe of the run instead of PPO. Confidence: inspired by.
"""

from __future__ import annotations

from agentjet.client import Episode
from agentjet.types import Task
from examples.teams.asking import ask, question, score

POLICIES = ("first", "second")
RECIPE = "dr_mas"
SWAP = 5
"""Training steps after which the models exchange their roles."""


def is_pioneer(model: int, step: int) -> bool:
    return (step // SWAP + model) % 2 == 0


def play(task: Task, episode: Episode) -> dict[str, float]:
    """The roles are those of the step at which the episode began, so that they do not change midway."""
    pioneer, observer = sorted(POLICIES, key=lambda name: not is_pioneer(POLICIES.index(name), episode.policy_version))
    first = ask(episode, pioneer, question(task)).text
    second = ask(episode, observer, f"{question(task)}\nAnother answer is: {first}\n{question(task)}").text
    together = score(first, task) + score(second, task)
    return {pioneer: together, observer: together}
