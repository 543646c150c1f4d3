"""An agent with one tool, written with OpenAI's SDK: it asks for a product that the model cannot compute in its head.
The model may call a calculator, sees the result and answers.

The reward is 1 if the calculator was called and the answer ends with the right number, otherwise 0. The model learns
from that alone: the form of a call is not rewarded separately.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageParam, ChatCompletionToolParam

from agentjet.client import Episode
from agentjet.types import Reward, Task

CALCULATOR: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
MAX_TOKENS = 48

NUM_TRAINING, NUM_HELD_OUT = 2000, 500
SPLIT_SEED = 1234

# A new client costs 17 ms, a copy of one for another episode nothing. The server is on this machine: no proxy is asked.
OPENAI = openai.OpenAI(
    base_url="http://127.0.0.1",
    api_key="each episode has its own",
    http_client=openai.DefaultHttpxClient(trust_env=False),
)


def question(a: int, b: int) -> ChatCompletionMessageParam:
    """The user's message."""
    return {"role": "user", "content": f"What is {a} * {b}?"}


def example(a: int, b: int) -> list[ChatCompletionMessageParam]:
    """A question, solved with the tool."""
    expression = json.dumps({"expression": f"{a} * {b}"})
    function = {"name": "calculator", "arguments": expression}
    return [
        question(a, b),
        {"role": "assistant", "tool_calls": [{"id": f"call_{a}", "type": "function", "function": function}]},  # type: ignore[list-item, typeddict-item]
        {"role": "tool", "tool_call_id": f"call_{a}", "content": str(a * b)},
        {"role": "assistant", "content": f"{a} * {b} = {a * b}"},
    ]


EXAMPLES = [*example(215, 34), *example(482, 71)]
"""Every conversation opens with these. Without them the model never writes a call, and there is nothing to reward."""


def agent(task: Task, episode: Episode) -> Reward:
    """One question, at most one round of tool calls, one answer: 1 or 0. The metrics show the progress: `called` the
    tool, with the right `expression`."""
    a, b = task.payload
    messages = [*EXAMPLES, question(a, b)]
    said = _ask(episode, messages)
    results = [calculator(call.function.arguments) for call in said.tool_calls or () if call.type == "function"]
    metrics = {"called": float(bool(results)), "expression": float(str(a * b) in results)}
    if not results:
        return Reward(0.0, metrics=metrics)
    messages.append(said.model_dump(exclude_none=True))  # type: ignore[arg-type]
    for call, result in zip(said.tool_calls or (), results, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = _ask(episode, messages)
    return Reward(float(is_right(answer.content or "", a * b)), metrics=metrics)


def _ask(episode: Episode, messages: list[ChatCompletionMessageParam]) -> ChatCompletionMessage:
    llm = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key)
    completion = llm.chat.completions.create(
        model=episode.model, messages=messages, tools=[CALCULATOR], max_completion_tokens=MAX_TOKENS
    )
    return completion.choices[0].message


def calculator(arguments: str) -> str:
    """The tool: the value of `{"expression": "<product of whole numbers>"}`, or what is wrong with it."""
    try:
        given: Any = json.loads(arguments)
        expression = given["expression"]
    except (ValueError, TypeError, KeyError):
        return 'error: give {"expression": "..."}'
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*\*\s*([0-9]{1,9})\s*", str(expression))
    return str(int(found[1]) * int(found[2])) if found else "error: give a product such as 3 * 4"


def is_right(answer: str, product: int) -> bool:
    """True if the last number of an answer is the product."""
    numbers = re.findall(r"[0-9]+", answer.replace(",", ""))
    return numbers[-1:] == [str(product)]


def training_tasks() -> list[Task]:
    """Products of a three-digit and a two-digit number, none of them held out. `payload` is the pair (a, b)."""
    return [_task(a, b) for a, b in _pairs()[NUM_HELD_OUT:]]


def held_out_tasks(count: int = NUM_HELD_OUT) -> list[Task]:
    """The first `count` of the products that no seed of a run is trained on."""
    if not 1 <= count <= NUM_HELD_OUT:
        raise ValueError(f"{count} tasks: between 1 and {NUM_HELD_OUT} are held out")
    return [_task(a, b) for a, b in _pairs()[:count]]


def _pairs() -> list[tuple[int, int]]:
    choice = random.Random(SPLIT_SEED).sample(range(900 * 90), NUM_HELD_OUT + NUM_TRAINING)
    return [(100 + index // 90, 10 + index % 90) for index in choice]


def _task(a: int, b: int) -> Task:
    return Task(f"{a}*{b}", task_set="products", payload=(a, b))
