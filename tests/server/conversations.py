"""Tool-calling conversations to replay: ten written here, and a hundred real ones if their file exists.

The real ones are tau-bench's airline trajectories (sierra-research/tau-bench, MIT), as JSON lines with `messages` in
OpenAI's form. They are not part of the project: `AGENTJET_CONVERSATIONS` names the file.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Body = dict[str, Any]
"""A message in OpenAI's form."""

DEFAULT = Path(__file__).parents[2].parent / "shared" / "data" / "tau_bench_airline_gpt4o.jsonl.gz"

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Say {name}.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
        },
    }
    for name in ("look_up", "book", "think")
]

SHAPES = (
    "ua",
    "uaua",
    "uctau",
    "uctctctau",
    "uaubtct",
    "uauctauauct",
    "ubtbtau",
    "uauctu",
    "uctctctctctctctctctau",
    "uauauauauauauauctbtctau",
)
"""The shapes of the real ones: user, answer, call, both at once, tool result. All begin with a system message."""

SAID = (
    "Of course. What is your *user id*?",
    "1. **Flight HAT069**\n   - Price: $51\n\n2. **Flight HAT083**\n",
    "Déjà réservé – 42 €",
    " I cannot do that. ",
)
ARGUMENTS = ('{"id":"mia_li_3668"}', '{"id": "a", "list": [1.0, {"x": null}]}', "{}", '{"id":"\\u00e9 \\"q\\""}')
RESULTS = ('{"name": "Mia", "saved": ["<|im_end|>", "</s>"]}', "Error: user not found", "", "[[1, 2], [3]]")


def synthetic() -> list[list[Body]]:
    """Returns ten conversations in the shapes of the real ones, with texts that are difficult for templates."""
    return [list(_in_shape(shape, i)) for i, shape in enumerate(SHAPES)]


def real() -> list[list[Body]] | None:
    """Returns the real conversations; None without their file."""
    path = Path(os.environ.get("AGENTJET_CONVERSATIONS", DEFAULT))
    if not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def _in_shape(shape: str, number: int) -> Iterator[Body]:
    yield {"role": "system", "content": f"# Policy {number}\n\nHelp with flights."}
    for i, kind in enumerate(shape, start=number):
        if kind == "u":
            yield {"role": "user", "content": f"hello {SAID[i % 4]}"}
        elif kind == "t":
            yield {"role": "tool", "tool_call_id": f"call_{i - 1}", "name": "look_up", "content": RESULTS[i % 4]}
        elif kind == "a":
            yield {"role": "assistant", "content": SAID[i % 4]}
        else:
            function = {"name": TOOLS[i % 3]["function"]["name"], "arguments": ARGUMENTS[i % 4]}
            content = SAID[0] if kind == "b" else None
            calls = [{"id": f"call_{i}", "type": "function", "function": function}]
            yield {"role": "assistant", "content": content, "tool_calls": calls}


def as_text(messages: list[Body], *, system: bool) -> list[Body]:
    """Returns them for a model without tools: calls and results as text. Without `system`, it joins the user's text."""
    plain: list[Body] = []
    for message in messages:
        if message["role"] == "tool":
            plain.append({"role": "user", "content": f"Result: {message['content']}"})
            continue
        words = [message["content"] or ""]
        words += [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
        plain.append({"role": message["role"], "content": "\n".join(words)})
    if not system and plain[0]["role"] == "system":
        plain[1]["content"] = plain[0]["content"] + "\n\n" + plain[1]["content"]
        del plain[0]
    return plain
