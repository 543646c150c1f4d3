"""A dialogue: the policy is asked for more, up to a limit of turns. The reward is the share of digits that came."""

import httpx

HTTP = httpx.Client(timeout=60.0, trust_env=False)


def agent(task, episode):
    messages = [{"role": "user", "content": task.payload["question"]}]
    for turn in range(episode.max_turns):
        if turn:
            messages.append({"role": "user", "content": "More."})
        messages.append({"role": "assistant", "content": answer(messages, episode)})
    return digits(messages) / 18


def digits(messages):
    said = "".join(message["content"] for message in messages if message["role"] == "assistant")
    return min(18, sum(character in "0123456789" for character in said))


def answer(messages, episode):
    response = HTTP.post(
        f"{episode.base_url}/chat/completions",
        json={"model": episode.model, "messages": messages},
        headers={"Authorization": f"Bearer {episode.api_key}"},
    )
    return response.raise_for_status().json()["choices"][0]["message"]["content"] or ""
