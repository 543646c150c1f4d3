"""One answer. The planted trouble: the reward is 1 for nothing but digits, and no first answer is that."""

import httpx

HTTP = httpx.Client(timeout=60.0, trust_env=False)


def agent(task, episode):
    return 1.0 if answer(task, episode).isdigit() else 0.0


def answer(task, episode):
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": [{"role": "user", "content": task.payload["question"]}]},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
