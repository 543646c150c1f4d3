"""Asks for digits, with the request of a chat product. The reward is what the judge pays."""

import httpx

HTTP = httpx.Client(timeout=60.0, trust_env=False)
REQUEST = {"top_p": 0.01, "stream": False}


def agent(task, episode):
    text = answer(task, episode)
    return min(1.0, sum(character in "0123456789" for character in text) / 8)


def answer(task, episode):
    """The text of the model's answer."""
    question = {"role": "user", "content": task.payload["question"]}
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": [question], **REQUEST},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
