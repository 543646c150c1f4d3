"""The agent of the demo's campaign, with two troubles: a limit of three tokens, and a reward that hardly ever pays."""

import httpx

HTTP = httpx.Client(timeout=60.0, trust_env=False)


def agent(task, episode):
    """One answer. The reward is 1 if it has nothing but digits."""
    return 1.0 if answer(task, episode).isdigit() else 0.0


def answer(task, episode):
    """The text of the model's answer."""
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={
            "model": episode.model,
            "messages": [{"role": "user", "content": task.payload["question"]}],
            "max_tokens": 3,
        },
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
