"""A lock of eight wheels, which opens only if every wheel shows a digit. The model turns one wheel a call."""

from __future__ import annotations

import httpx

from agentjet.client import Episode
from agentjet.types import Reward, Task

WHEELS = 8
# Making a client takes some time, so all episodes share one. The server is on this machine, so no proxy is used.
HTTP = httpx.Client(timeout=60.0, trust_env=False)


def agent(task: Task, episode: Episode) -> Reward:
    """One call a wheel. The episode has reward 1 if the lock opens; each call has reward 1 if its wheel is right."""
    messages: list[dict[str, str]] = []
    wheels: list[float] = []
    for wheel in range(WHEELS):
        messages.append({"role": "user", "content": f"{task.payload} {wheel}"})
        text = answer(episode, messages)
        messages.append({"role": "assistant", "content": text})
        wheels.append(is_right(text))
    return Reward(float(all(wheels)), by_turn=wheels, metrics={"wheels": sum(wheels)})


def is_right(text: str) -> float:
    """1 for a digit."""
    return float(text.isascii() and text.isdigit())


def answer(episode: Episode, messages: list[dict[str, str]]) -> str:
    """The text of the model's answer."""
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": messages},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""


def locks() -> list[Task]:
    return [Task(f"lock-{number}", task_set="locks", payload=f"lock {number}") for number in range(8)]
