"""An agent that should add two numbers, with a useless prompt. Its copy is corrected during training."""

import openai

PROMPT = ["Write a poem about {a} + {b}."]
"""Turns of the user and the model, by turns; the model answers the last."""
# The server is on this machine: no proxy is asked.
OPENAI = openai.OpenAI(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    http_client=openai.DefaultHttpxClient(trust_env=False),
)


def agent(task, episode):
    """1 for the right equation and nothing else, else 0."""
    a, b = task.payload
    completion = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key).chat.completions.create(
        model=episode.model,
        messages=[
            {"role": ("user", "assistant")[turn % 2], "content": text.format(a=a, b=b)}
            for turn, text in enumerate(PROMPT)
        ],
        max_completion_tokens=12,
    )
    answer = completion.choices[0].message.content or ""
    return float(answer.strip() == f"{a} + {b} = {a + b}")
