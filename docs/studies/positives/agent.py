"""One call: the answer is right if it is a digit."""

from __future__ import annotations

from agentjet.client import Episode
from agentjet.types import Task
from examples.combination_lock.agent import is_right
from examples.digits.agent import answer, held_out_tasks, training_tasks

__all__ = ["agent", "held_out_tasks", "training_tasks"]


def agent(task: Task, episode: Episode) -> float:
    return is_right(answer(task, episode))
