"""An agent that adds two numbers, written with OpenAI's SDK, and its tasks.

The agent asks the model for an equation. An equation with a wrong sum gets feedback and a second try; any other answer
ends the episode. The return value is the reward.

500 sums are held out. The split is by unordered pairs, so a + b and b + a are on the same side. It does not depend on
the seed of a run: a model trained with any seed can be scored on the held-out sums.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib

import openai
from openai.types.chat import ChatCompletionMessageParam

from agentjet.client import Episode
from agentjet.types import Reward, Task

QUESTION = "What is {a} + {b}? Reply with only the equation."
FEEDBACK = "That is wrong. Try again."
SECOND_TRY = 0.3
"""Reward of a right answer at the second try; at the first it is 1."""
MAX_TOKENS = 12

OPERANDS = range(40)
NUM_HELD_OUT = 500
SPLIT_SEED = 1234

# A new client costs 17 ms, a copy for another episode costs nothing. The server is local, so no proxy is used.
OPENAI = openai.OpenAI(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    http_client=openai.DefaultHttpxClient(trust_env=False),
)


def agent(task: Task, episode: Episode) -> Reward:
    """Two tries at a sum. The metric `turns` is the number of tries."""
    a, b = task.payload
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION.format(a=a, b=b)}]
    first = ask(episode, messages)
    if is_right(first, a, b) or not is_equation(first, a, b):
        return Reward(float(is_right(first, a, b)), metrics={"turns": 1.0})
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": FEEDBACK}]
    second = ask(episode, messages)
    return Reward(SECOND_TRY * is_right(second, a, b), metrics={"turns": 2.0})


class FirstAnswer:
    """The agent of the evaluation: one try, right or wrong. Each repeat of a task samples with another seed."""

    def __init__(self, *, temperature: float = 1.0, seed: int = 0) -> None:
        self.temperature = temperature
        self.seed = seed
        self.answers: dict[str, str] = {}
        """The first answer to each task, by task id."""
        self._repeats: dict[str, itertools.count[int]] = {}

    def __call__(self, task: Task, episode: Episode) -> Reward:
        """1 or 0. The metric `well_formed` is 1 if the answer is an equation for the sum."""
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


def ask(
    episode: Episode,
    messages: list[ChatCompletionMessageParam],
    *,
    temperature: float | None = None,
    seed: int | None = None,
) -> str:
    """The model's answer, unchanged: the next turn must send back exactly the sampled text."""
    llm = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = llm.chat.completions.create(
        model=episode.model,
        messages=messages,
        max_completion_tokens=MAX_TOKENS,
        temperature=openai.omit if temperature is None else temperature,
        seed=openai.omit if seed is None else seed,
    )
    return completion.choices[0].message.content or ""


def is_right(answer: str, a: int, b: int) -> bool:
    """True if the answer is the right equation and nothing else."""
    return answer.strip() == f"{a} + {b} = {a + b}"


def is_equation(answer: str, a: int, b: int) -> bool:
    """True if the answer is an equation for this sum, right or wrong, and nothing else."""
    return re.fullmatch(rf"{a} \+ {b} = [0-9]{{1,3}}", answer.strip()) is not None


def training_tasks() -> list[Task]:
    """Every sum that is not held out, in both orders. `payload` is the pair (a, b)."""
    pairs = _pairs()[NUM_HELD_OUT:]
    return [_task(a, b) for a, b in sorted({*pairs, *((b, a) for a, b in pairs)})]


def held_out_tasks(count: int = NUM_HELD_OUT) -> list[Task]:
    """The first `count` of the held-out sums, each in one order. Raises `ValueError` if there are fewer."""
    if not 1 <= count <= NUM_HELD_OUT:
        raise ValueError(f"{count} tasks: between 1 and {NUM_HELD_OUT} are held out")
    ways = random.Random(SPLIT_SEED)
    return [_task(*(pair if ways.random() < 0.5 else pair[::-1])) for pair in _pairs()[:count]]


def _pairs() -> list[tuple[int, int]]:
    """All unordered pairs, shuffled."""
    pairs = list(itertools.combinations_with_replacement(OPERANDS, 2))
    random.Random(SPLIT_SEED).shuffle(pairs)
    return pairs


def _task(a: int, b: int) -> Task:
    return Task(f"{a}+{b}", task_set="addition", payload=(a, b))
