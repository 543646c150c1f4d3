"""Optima's reward: two agents solve a task in a short dialogue. Long dialogues cost, and likely text is worth more.

    R = task + l1 tokens / max_tokens + l2 / largest loss of an utterance

Source: github.com/thunlp/Optima at 4017740. Its losses are those of the base model; here they are of the policy, and
`MAX_TOKENS` is fixed instead of the longest dialogue of the task. Its selection of dialogues for SFT and DPO is the
recipes `rft` and `dpo`. Confidence: inspired by.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentjet.client import Episode
from agentjet.types import Reward, Task
from examples.teams.asking import Answer, ask, question, role, score

POLICIES = ()
RECIPE = "grpo"
ROUNDS = 2
MAX_TOKENS, SHORTEST = 300, 40
LENGTH, READABLE = -0.6, 1.0
"""The weights l1 and l2."""


def play(task: Task, episode: Episode) -> Reward:
    said: list[Answer] = []
    for turn in range(2 * ROUNDS):
        dialogue = "\n".join(answer.text for answer in said)
        said.append(ask(episode, role(episode, ("alice", "bob")[turn % 2]), f"{question(task)}\n{dialogue}"))
    tokens = sum(answer.num_tokens for answer in said)
    solved = score(said[-1].text, task)
    return Reward(total(solved, tokens, [answer.loss for answer in said]), metrics={"solved": solved})


def total(task: float, tokens: int, losses: Sequence[float], max_tokens: int = MAX_TOKENS) -> float:
    """Returns R. The length of a dialogue of at most 40 tokens, which is degenerate, costs 1. A loss below 1 counts as
    1, which is ours: else R has no bound.
    """
    length = -1.0 if tokens <= SHORTEST else LENGTH * min(1.0, tokens / max_tokens)
    return task + length + READABLE / max(1.0, *losses)
