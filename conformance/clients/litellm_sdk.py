"""An agent on LiteLLM: `python litellm_sdk.py plain | streaming`."""

import json
import os
import sys
from typing import Any

import litellm

MODEL = f"openai/{os.environ['OPENAI_MODEL']}"
QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"{name} two numbers", "parameters": SCHEMA}}
    for name in FUNCTIONS
]


def ask(messages: list[Any], stream: bool) -> Any:
    answer = litellm.completion(model=MODEL, messages=messages, tools=TOOLS, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    return answer.choices[0].message


def converse(stream: bool) -> str:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (message := ask(messages, stream)).tool_calls:
            messages.append(message)
            for call in message.tool_calls:
                content = str(int(FUNCTIONS[call.function.name](**json.loads(call.function.arguments))))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        messages.append(message)
    return message.content


if __name__ == "__main__":
    print(converse(sys.argv[1] == "streaming"))
