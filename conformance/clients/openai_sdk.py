"""An agent on OpenAI's SDK: `python openai_sdk.py chat | streaming | votes | structured | responses | ...`."""

import json
import os
import sys
from typing import Any

from openai import OpenAI
from pydantic import BaseModel

MODEL = os.environ["OPENAI_MODEL"]
QUESTIONS = ("What is 17 + 25? Use the tool.", "Now double it, and add 1 to it, both at once.")
FUNCTIONS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
client = OpenAI()


def result(name: str, arguments: str) -> str:
    return str(int(FUNCTIONS[name](**json.loads(arguments))))


# ---- chat completions

CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"{name} two numbers", "parameters": SCHEMA}}
    for name in FUNCTIONS
]
STRICT_TOOLS: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in CHAT_TOOLS]


def complete(messages: list[Any]) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS).choices[0].message


def complete_streaming(messages: list[Any]) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=CHAT_TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


def chat(ask: Any) -> str:
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while (message := ask(messages)).tool_calls:
            messages.append(message)
            for call in message.tool_calls:
                content = result(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        messages.append(message)
    return message.content


def votes() -> str:
    """Two choices of one question, each of which goes on by itself."""
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    both = client.chat.completions.create(model=MODEL, messages=messages, tools=CHAT_TOOLS, n=2)
    answers = []
    for choice in both.choices:
        [call] = choice.message.tool_calls
        told = {"role": "tool", "tool_call_id": call.id, "content": result(call.function.name, call.function.arguments)}
        answers.append(complete([*messages, choice.message, told]).content)
    return " ".join(answers)


class Sum(BaseModel):
    total: int
    currency: str


def structured() -> str:
    """`response_format` with a JSON schema, after a tool was used, and once more in a stream."""
    messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=STRICT_TOOLS).choices[0].message
    [call] = message.tool_calls
    content = result(call.function.name, call.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": content}]
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, tools=STRICT_TOOLS, response_format=Sum)
    first = parsed.choices[0].message
    messages += [first, {"role": "user", "content": QUESTIONS[1]}]
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=STRICT_TOOLS, response_format=Sum
    ) as stream:
        second = stream.get_final_completion().choices[0].message
    return f"{first.parsed.total} {second.parsed.total}"


# ---- completions


def completions() -> str:
    """Reason and act in plain text, as agents did before there were tools."""
    prompt = f"Question: {QUESTIONS[0]}\n"
    while True:
        answer = client.completions.create(model=MODEL, prompt=prompt, stop=["Observation:"]).choices[0].text
        if "Answer: " in answer:
            return answer.partition("Answer: ")[2]
        name, numbers = answer.partition("Action: ")[2].strip(" )\n").split("(")
        observation = FUNCTIONS[name](*map(int, numbers.split(",")))
        prompt += f"{answer}Observation: {observation}\n"


# ---- responses

RESPONSES_TOOLS: Any = [
    {"type": "function", "name": name, "description": f"{name} two numbers", "parameters": SCHEMA, "strict": False}
    for name in FUNCTIONS
]


def respond(items: list[Any]) -> Any:
    return client.responses.create(model=MODEL, input=items, tools=RESPONSES_TOOLS, store=False)


def respond_streaming(items: list[Any]) -> Any:
    with client.responses.stream(model=MODEL, input=items, tools=RESPONSES_TOOLS, store=False) as stream:
        return stream.get_final_response()


def responses(ask: Any) -> str:
    items: list[Any] = []
    for question in QUESTIONS:
        items.append({"role": "user", "content": question})
        while True:
            response = ask(items)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                output = result(call.name, call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    return response.output_text


EXERCISES = {
    "chat": lambda: chat(complete),
    "streaming": lambda: chat(complete_streaming),
    "votes": votes,
    "structured": structured,
    "completions": completions,
    "responses": lambda: responses(respond),
    "responses-streaming": lambda: responses(respond_streaming),
}

if __name__ == "__main__":
    print(EXERCISES[sys.argv[1]]())
