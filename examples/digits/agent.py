"""The agent of the study in `docs/studies/digits`: a model of random weights is rewarded for digits."""

from __future__ import annotations

import httpx

from agentjet.client import Episode
from agentjet.types import Task

# Making a client takes some time, so all episodes share one. The server is on this machine, so no proxy is used.
HTTP = httpx.Client(timeout=60.0, trust_env=False)


def agent(task: Task, episode: Episode) -> float:
    """One answer; the reward is the share of digits in it."""
    text = answer(task, episode)
    return sum(character in "0123456789" for character in text) / max(1, len(text))


def answer(task: Task, episode: Episode) -> str:
    """The text of the model's answer."""
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": [{"role": "user", "content": task.payload}]},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""


def training_tasks() -> list[Task]:
    return [Task(f"say-{number}", payload=f"Say digits. {number}") for number in range(8)]


def held_out_tasks() -> list[Task]:
    """Numbers that are not in the training tasks."""
    return [Task(f"say-{number}", payload=f"Say digits. {number}") for number in range(8, 72)]
