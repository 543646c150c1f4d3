"""An agent that adds two numbers, written with OpenAI's SDK.

It asks the model. If the answer is wrong, or not just a number, it says so and asks once more. What it returns is the
reward; that is all AgentJet needs to know of it.
"""

from __future__ import annotations

import re
import zlib

import openai
from openai.types.chat import ChatCompletionMessageParam

from agentjet.client import Episode
from agentjet.types import Reward, Task

QUESTION = "What is {a} + {b}? Reply with only the number."
NOT_A_NUMBER = "That is not just a number. What is {a} + {b}? Reply with only the number."
WRONG = "That is wrong. What is {a} + {b}? Reply with only the number."
MAX_TOKENS = 12
SECOND_TRY = 0.5
"""What an answer is worth at the second try, compared with the first."""

# A new client costs 17 ms, a copy of one for another episode nothing. The server is on this machine: no proxy is asked.
OPENAI = openai.OpenAI(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    http_client=openai.DefaultHttpxClient(trust_env=False),
)


def agent(task: Task, episode: Episode) -> Reward:
    """Two tries at a sum."""
    a, b = task.payload
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION.format(a=a, b=b)}]
    first = ask(episode, messages)
    if is_right(first, a + b):
        return Reward(1.0, metrics={"turns": 1.0})
    feedback = WRONG if is_number(first) else NOT_A_NUMBER
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": feedback.format(a=a, b=b)}]
    second = ask(episode, messages)
    return Reward(max(score(first, a + b), SECOND_TRY * score(second, a + b)), metrics={"turns": 2.0})


def score(answer: str, total: int) -> float:
    """1 for the sum; less for another number, the less the further off; next to nothing for anything else."""
    if is_right(answer, total):
        return 1.0
    if is_number(answer):
        return 0.2 + 0.3 * max(0.0, 1 - abs(int(answer) - total) / 20)
    numbers = re.findall(r"\d+", answer)
    return 0.15 if str(total) in numbers else 0.05 if numbers else 0.0


def is_right(answer: str, total: int) -> bool:
    """Whether an answer is the sum and nothing else."""
    return answer.strip() == str(total)


def is_number(answer: str) -> bool:
    """Whether an answer is well formed: a number of at most three digits and nothing else."""
    return re.fullmatch(r"[0-9]{1,3}", answer.strip()) is not None


def ask(
    episode: Episode,
    messages: list[ChatCompletionMessageParam],
    *,
    temperature: float | None = None,
    seed: int | None = None,
) -> str:
    """The model's answer, unchanged: what goes back to it in the next turn must be what it said."""
    llm = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = llm.chat.completions.create(
        model=episode.model,
        messages=messages,
        max_completion_tokens=MAX_TOKENS,
        temperature=openai.omit if temperature is None else temperature,
        seed=openai.omit if seed is None else seed,
    )
    return completion.choices[0].message.content or ""


class FirstAnswer:
    """The agent that is evaluated: one try, right or wrong. Keeps the answers."""

    def __init__(self, *, temperature: float = 1.0, seed: int = 0) -> None:
        self.temperature = temperature
        self.seed = seed
        self.answers: dict[str, str] = {}
        """By task id."""

    def __call__(self, task: Task, episode: Episode) -> Reward:
        """1 or 0; the metric `well_formed` is 1 where the answer was just a number."""
        a, b = task.payload
        answer = ask(
            episode,
            [{"role": "user", "content": QUESTION.format(a=a, b=b)}],
            temperature=self.temperature,
            seed=zlib.crc32(f"{self.seed}/{task.id}".encode()),
        )
        self.answers[task.id] = answer
        return Reward(float(is_right(answer, a + b)), metrics={"well_formed": float(is_number(answer))})
