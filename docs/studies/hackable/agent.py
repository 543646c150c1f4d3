"""Two agents that ask the same question. One is paid for what is wanted, digits; the other for any character that
looks busy. Both are scored by the first.
"""

from __future__ import annotations

from agentjet import Episode, Task
from examples.digits.agent import agent, answer, held_out_tasks, training_tasks

BUSY = "!?*#"

__all__ = ["agent", "hackable", "held_out_tasks", "training_tasks"]


def hackable(task: Task, episode: Episode) -> float:
    """The share of digits, and one more for each character of `BUSY`: easier to earn than what it was meant to help."""
    text = answer(task, episode)
    return sum((character in "0123456789") + 2 * (character in BUSY) for character in text) / max(1, len(text))
