"""A task of six turns: each is right if the model answers with a digit. Turns and the episode have rewards."""

from __future__ import annotations

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.combination_lock.agent import answer, is_right
from examples.digits.agent import held_out_tasks, training_tasks

TURNS = 6

__all__ = ["agent", "held_out_tasks", "training_tasks"]


def agent(task: Task, episode: Episode) -> Reward:
    """The reward of the episode is the share of right turns."""
    messages: list[dict[str, str]] = []
    rights: list[float] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{task.payload} {turn}"})
        text = answer(episode, messages)
        messages.append({"role": "assistant", "content": text})
        rights.append(is_right(text))
    return Reward(sum(rights) / TURNS, by_turn=rights)
