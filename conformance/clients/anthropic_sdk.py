"""An agent on Anthropic's SDK: `python anthropic_sdk.py plain | streaming | runner`."""

import os
import sys
from typing import Any

from anthropic import Anthropic, beta_tool

MODEL = os.environ["ANTHROPIC_MODEL"]
QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS: Any = [{"name": name, "description": f"{name} two numbers", "input_schema": SCHEMA} for name in FUNCTIONS]
SYSTEM = "You reckon."
client = Anthropic()


def ask(messages: list[Any]) -> Any:
    return client.messages.create(model=MODEL, max_tokens=1000, system=SYSTEM, messages=messages, tools=TOOLS)


def ask_streaming(messages: list[Any]) -> Any:
    with client.messages.stream(model=MODEL, max_tokens=1000, system=SYSTEM, messages=messages, tools=TOOLS) as stream:
        return stream.get_final_message()


def converse(ask: Any) -> str:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            answer = ask(messages)
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                break
            results = []
            for use in uses:
                content = str(int(FUNCTIONS[use.name](**use.input)))
                results.append({"type": "tool_result", "tool_use_id": use.id, "content": content})
            messages.append({"role": "user", "content": results})
    return answer.content[-1].text


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(int(a + b))


@beta_tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(int(a * b))


def runner() -> str:
    """The SDK's own loop."""
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        loop = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=1000, system=SYSTEM, messages=messages, tools=[add, multiply]
        )
        for answer in loop:
            messages.append({"role": "assistant", "content": answer.content})
            told = loop.generate_tool_call_response()
            if told is not None:
                messages.append(told)
    return answer.content[0].text


EXERCISES = {"plain": lambda: converse(ask), "streaming": lambda: converse(ask_streaming), "runner": runner}

if __name__ == "__main__":
    print(EXERCISES[sys.argv[1]]())
