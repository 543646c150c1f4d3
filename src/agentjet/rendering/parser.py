"""Parses a completion into reasoning, content and tool calls. Malformed text stays content.

A tool format has the name of its first users: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
(Qwen, SmolLM2 with our template), `mistral` is `[TOOL_CALLS][{...}, ...]`, `llama3` is a bare
`{"name": ..., "parameters": {...}}`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from agentjet.types import Message, ToolCall

_JSON = json.JSONDecoder()
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Literals that the parser searches for. Some vocabularies have them as special tokens, which are normally hidden."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The syntax of tool calls."""

    opening: str
    """Text before a call, or before the list of calls. Empty if a call is the whole completion."""
    closing: str
    arguments: str
    """Key of the arguments in the JSON of a call."""
    listed: bool
    """True if all calls form one JSON list."""


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments", listed=False),
    "mistral": ToolFormat("[TOOL_CALLS]", "", "arguments", listed=True),
    "llama3": ToolFormat("", "", "parameters", listed=False),
}

Found = tuple[str, str]
"""Name and arguments (JSON text) of a tool call."""


def parse_completion(text: str, *, reasons: bool, in_reasoning: bool, tool_format: str, id_prefix: str) -> Message:
    """Returns the assistant message of a completion.

    With `reasons`, a leading `<think>` block is parsed; with `in_reasoning`, the prompt has already opened it. With an
    empty `tool_format`, tool calls are not parsed. The ids of tool calls are `<id_prefix>_0`, `<id_prefix>_1`, ...
    """
    reasoning = ""
    if reasons:
        reasoning, text = _split_reasoning(text, in_reasoning)
    content, found = _split_calls(text, TOOL_FORMATS[tool_format]) if tool_format else (text, [])
    calls = tuple(ToolCall(f"{id_prefix}_{i}", name, arguments) for i, (name, arguments) in enumerate(found))
    return Message("assistant", content, reasoning, calls)


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str, str]:
    """Returns the reasoning and the text after it. Truncated reasoning has no text after it."""
    opened = text.lstrip()
    if opened.startswith("<think>"):
        opened = opened.removeprefix("<think>")
    elif not in_reasoning:
        return "", text
    reasoning, _, rest = opened.partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n")


def _split_calls(text: str, tool_format: ToolFormat) -> tuple[str, list[Found]]:
    if not tool_format.opening:
        found = _calls(text.strip().removeprefix("<|python_tag|>"), tool_format.arguments)
        return ("", found) if found else (text, [])
    found = []

    def take(block: re.Match[str]) -> str:
        calls = _calls(block[1].strip(), tool_format.arguments)
        found.extend(calls)
        return "" if calls else block[0]

    end = rf"(?:{re.escape(tool_format.closing)}|\Z)" if tool_format.closing else r"\Z"
    content = re.sub(rf"{re.escape(tool_format.opening)}(.*?){end}", take, text, flags=re.DOTALL)
    return (content.strip(), found) if found else (text, [])


def _calls(block: str, key: str) -> list[Found]:
    """Returns the calls of a JSON object or of a list of objects; none if one of them is malformed."""
    try:
        value = json.loads(block)
        return [_call(item, key, "") for item in value] if isinstance(value, list) else [_call(value, key, block)]
    except (ValueError, RecursionError):
        return []


def _call(value: Any, key: str, source: str) -> Found:
    """Raises `ValueError` for a malformed call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call is an object with a name")
    arguments = value.get(key, {})
    if isinstance(arguments, dict):
        arguments = _as_written(source, key, arguments)
    elif not isinstance(arguments, str) or not isinstance(json.loads(arguments), dict):  # some write a JSON string
        raise ValueError("arguments are an object")
    (value["name"] + arguments).encode()  # Raises for an unpaired surrogate, which JSON escapes can write.
    return value["name"], arguments


def _as_written(source: str, key: str, arguments: dict[str, Any]) -> str:
    """Returns the text of the arguments in `source`. If it cannot be found, returns them as new JSON."""
    for at in re.finditer(rf'"{key}"\s*:\s*', source):
        try:
            value, end = _JSON.raw_decode(source, at.end())
        except ValueError:
            continue
        if value == arguments:
            return source[at.end() : end]
    return json.dumps(arguments, ensure_ascii=False)
