"""An agent that adds two numbers, written with OpenAI's SDK.

It asks the model for an equation. An equation with a wrong sum gets feedback and a second try; anything else ends the
episode. What it returns is the reward; that is all AgentJet needs to know of it.
"""

from __future__ import annotations

import itertools
import re
import zlib

import openai
from openai.types.chat import ChatCompletionMessageParam

from agentjet.client import Episode
from agentjet.types import Reward, Task

QUESTION = "What is {a} + {b}? Reply with only the equation."
FEEDBACK = "That is wrong. Try again."
SECOND_TRY = 0.3
"""What a right answer is worth at the second try; at the first it is worth 1."""
MAX_TOKENS = 12

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
    if is_right(first, a, b) or not is_equation(first, a, b):
        return Reward(float(is_right(first, a, b)), metrics={"turns": 1.0})
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": FEEDBACK}]
    second = ask(episode, messages)
    return Reward(SECOND_TRY * is_right(second, a, b), metrics={"turns": 2.0})


def is_right(answer: str, a: int, b: int) -> bool:
    """Whether an answer is the right equation and nothing else."""
    return answer.strip() == f"{a} + {b} = {a + b}"


def is_equation(answer: str, a: int, b: int) -> bool:
    """Whether an answer is well formed: an equation for this sum, right or wrong, and nothing else."""
    return re.fullmatch(rf"{a} \+ {b} = [0-9]{{1,3}}", answer.strip()) is not None


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
    """The agent that is evaluated: one try, right or wrong. Keeps the answers to what each task was asked first; every
    repeat of a task has a seed of its own."""

    def __init__(self, *, temperature: float = 1.0, seed: int = 0) -> None:
        self.temperature = temperature
        self.seed = seed
        self.answers: dict[str, str] = {}
        """By task id."""
        self._repeats: dict[str, itertools.count[int]] = {}

    def __call__(self, task: Task, episode: Episode) -> Reward:
        """1 or 0; the metric `well_formed` is 1 where the answer was an equation for the sum."""
        a, b = task.payload
        repeat = next(self._repeats.setdefault(task.id, itertools.count()))
        answer = ask(
            episode,
            [{"role": "user", "content": QUESTION.format(a=a, b=b)}],
            temperature=self.temperature,
            seed=zlib.crc32(f"{self.seed}/{task.id}{f'/{repeat}' if repeat else ''}".encode()),
        )
        self.answers.setdefault(task.id, answer)
        return Reward(float(is_right(answer, a, b)), metrics={"well_formed": float(is_equation(answer, a, b))})
