"""Parses a completion into reasoning, content and tool calls. Malformed text stays content.

A tool format has the name of its first users: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
(Qwen, SmolLM2 with our template), `mistral` is `[TOOL_CALLS][{...}, ...]`, `llama3` is a bare
`{"name": ..., "parameters": {...}}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from agentjet.types import Message, ToolCall

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_JSON = json.JSONDecoder()

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
    content, found = _PARSERS[tool_format](text) if tool_format else (text, [])
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


def _parse_hermes(text: str) -> tuple[str, list[Found]]:
    found: list[Found] = []

    def take(block: re.Match[str]) -> str:
        calls = _calls(block[1].strip(), "arguments")
        found.extend(calls)
        return "" if calls else block[0]

    content = _HERMES.sub(take, text)
    return (content.strip(), found) if found else (text, [])


def _parse_mistral(text: str) -> tuple[str, list[Found]]:
    content, _, block = text.partition("[TOOL_CALLS]")
    calls = _calls(block.strip(), "arguments")
    return (content.strip(), calls) if calls else (text, [])


def _parse_llama3(text: str) -> tuple[str, list[Found]]:
    calls = _calls(text.strip().removeprefix("<|python_tag|>"), "parameters")
    return ("", calls) if calls else (text, [])


def _calls(block: str, key: str) -> list[Found]:
    """Returns the calls of a JSON object or of a list of objects; none if one of them is malformed."""
    try:
        value = json.loads(block)
        calls = [_call(item, key, "") for item in value] if isinstance(value, list) else [_call(value, key, block)]
    except (ValueError, RecursionError):
        return []
    return [call for call in calls if call] if all(calls) else []


def _call(value: Any, key: str, source: str) -> Found | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get(key, {})
    if isinstance(arguments, dict):
        arguments = _as_written(source, key, arguments)
    elif not isinstance(arguments, str) or not _is_object(arguments):  # some models write them as a JSON string
        return None
    return (value["name"], arguments) if _is_text(value["name"] + arguments) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _is_text(text: str) -> bool:
    """False if `text` has an unpaired surrogate, which JSON escapes can contain and a response cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


_PARSERS: dict[str, Callable[[str], tuple[str, list[Found]]]] = {
    "hermes": _parse_hermes,
    "mistral": _parse_mistral,
    "llama3": _parse_llama3,
}

TOOL_FORMATS = tuple(_PARSERS)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Literals that the parsers search for. Some vocabularies have them as special tokens, which are normally hidden."""
