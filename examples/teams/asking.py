"""A call of a member of the team, and the score of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

from agentjet.client import Episode
from agentjet.types import Task

# Making a client takes some time, so all episodes share one. The server is on this machine, so no proxy is used.
HTTP = httpx.Client(timeout=120.0, trust_env=False)
SUMS = ((3, 4), (2, 6), (5, 1), (7, 2))


@dataclass(frozen=True)
class Answer:
    """The answer of a member."""

    text: str
    num_tokens: int
    loss: float
    """Mean negative log-probability of its tokens."""


def ask(episode: Episode, model: str, text: str) -> Answer:
    """Returns the answer of a policy, or of a role of the only policy: see `role`."""
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": text}], "logprobs": True},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    choice = response.raise_for_status().json()["choices"][0]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return Answer(choice["message"]["content"] or "", len(logprobs), -sum(logprobs) / max(1, len(logprobs)))


def role(episode: Episode, name: str) -> str:
    """Returns the model name of a role of the only policy."""
    return f"{episode.model}@{name}"


def score(text: str, task: Task) -> float:
    """1 if the text contains the right number, else half the share of digits in it."""
    digits = sum(sign.isascii() and sign.isdigit() for sign in text) / max(1, len(text))
    return 1.0 if str(sum(task.payload)) in text else digits / 2


def question(task: Task) -> str:
    return f"What is {task.payload[0]} + {task.payload[1]}?"


def sums() -> list[Task]:
    return [Task(f"{a}+{b}", task_set="teams", payload=[a, b]) for a, b in SUMS]
