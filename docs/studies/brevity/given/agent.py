"""Asks for digits. The reward is the share of digits in the answer, minus a price per character: be short."""

import httpx

HTTP = httpx.Client(timeout=60.0, trust_env=False)
PRICE = 0.05


def agent(task, episode):
    text = answer(task, episode)
    digits = sum(character in "0123456789" for character in text)
    return digits / max(len(text), 1) - PRICE * len(text)


def answer(task, episode):
    """The text of the model's answer."""
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": [{"role": "user", "content": task.payload["question"]}]},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
