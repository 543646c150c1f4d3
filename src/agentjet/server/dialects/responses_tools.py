"""The tools of the Responses API. Functions, custom tools and namespaces become functions that the policy is offered.

* A tool in a namespace is the function `namespace.name`.
* A custom tool takes text. The policy calls it as a function with one argument, `input`. A regular expression
  constrains the text of a forced call. A Lark grammar is shown to the policy, and noted.
* Tools that a provider would run are not offered, and noted.

Invariant: `from_custom_input(to_custom_input(a))` has the meaning of `a`, for all arguments that a policy may sample.
So a call comes back as the same turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import model_validator

from agentjet.errors import InvalidRequest
from agentjet.server.dialects.dialect import function_tool
from agentjet.server.dialects.keys import Body, Items, Text, ToolName, check_portable_json, refusal

PROVIDER_TOOLS = (
    "web_search", "file_search", "code_interpreter", "computer", "mcp", "image_generation", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip
"""Prefixes of the types of tools that the provider runs, or that work on images. The policy is not offered them."""


class ResponsesTool(Body):
    """A tool definition. The `parameters` of a function are a JSON schema."""

    place = "tools[]."
    keys_of_kind: ClassVar = {
        "function": "name description? parameters? strict?",
        "custom": "name description? format?",
        "namespace": "name description? tools",
    }
    unknown_kind = "the server runs no tools, define a function and run it yourself."
    type: Text
    name: ToolName | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    """The format of a custom tool's input."""
    tools: Items[ResponsesTool] | None = None
    """The tools of a namespace."""

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, given: Any) -> Any:
        return check_portable_json(given) if isinstance(given, dict) else given  # The answer repeats it.

    @property
    def omission(self) -> str:
        return f"tool {self.type} dropped" if self.type.startswith(PROVIDER_TOOLS) else ""


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the policy is offered. The policy calls it by `full_name`."""

    full_name: str
    name: str
    namespace: str
    is_custom: bool
    strict: bool
    definition: Mapping[str, Any]
    grammar: str
    """The Lark grammar of a custom tool's input. It is shown, not enforced."""


def offered_tools(tools: Iterable[ResponsesTool]) -> list[OfferedTool]:
    """Returns the tools that the policy is offered. Raises `InvalidRequest` with the tool's place."""
    found: dict[str, OfferedTool] = {}
    for tool, where in _each(tools):
        if tool.full_name in found:
            raise InvalidRequest(f"{where}.name: two tools are called {tool.full_name!r}.", param=f"{where}.name")
        found[tool.full_name] = tool
    return list(found.values())


def full_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the policy calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _each(tools: Iterable[ResponsesTool]) -> Iterator[tuple[OfferedTool, str]]:
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        if tool.type in ("function", "custom"):
            yield _offered_tool(tool, None, where), where
        for k, inner in enumerate(tool.tools or ()):
            place = f"{where}.tools.{k}"
            if inner.type not in ("function", "custom"):
                raise refusal(place, f" is of type {inner.type!r}, which a namespace cannot have.")
            yield _offered_tool(inner, tool, place), place


def _offered_tool(tool: ResponsesTool, space: ResponsesTool | None, where: str) -> OfferedTool:
    name, namespace = tool.name or "", (space.name or "") if space is not None else ""
    described = [space.description if space is not None else None, tool.description]
    parameters, grammar = tool.parameters, ""
    if tool.type == "custom":
        grammar, text = _custom_format(tool.format, f"{where}.format")
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", **text}},
            "required": ["input"],
            "additionalProperties": False,
        }
        if grammar:
            described.append(f"The input follows this grammar:\n{grammar}")
    full = full_name(namespace, name)
    definition = function_tool(full, "\n\n".join(filter(None, described)) or None, parameters)
    return OfferedTool(full, name, namespace, tool.type == "custom", bool(tool.strict), definition, grammar)


def _custom_format(given: Any, where: str) -> tuple[str, dict[str, str]]:
    """Returns the Lark grammar of a custom tool's input, and the keywords of the text's JSON schema."""
    if given is None or (isinstance(given, dict) and given.get("type", "text") == "text"):
        return "", {}
    if isinstance(given, dict) and given["type"] == "grammar" and isinstance(given.get("definition"), str):
        if given.get("syntax") == "lark":
            return given["definition"], {}
        if given.get("syntax") == "regex":
            return "", {"pattern": f"^(?:{given['definition']})$"}
    grammar = "{'type': 'grammar', 'syntax': 'lark' or 'regex', 'definition': ...}"
    raise refusal(where, f": use {{'type': 'text'}}, or {grammar}.", "invalid_value")


def to_custom_input(arguments: str) -> str:
    """Returns the input of a custom tool from sampled arguments.

    Arguments of another form are returned unchanged, so that the tool can report the error. So are arguments whose
    input is itself a JSON object.
    """
    value = _object(arguments)
    text = value.get("input") if value is not None and value.keys() == {"input"} else None
    return text if isinstance(text, str) and _object(text) is None else arguments


def from_custom_input(text: str) -> str:
    """Returns the arguments for the input of a custom tool."""
    return json.dumps({"input": text}, ensure_ascii=False) if _object(text) is None else text


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
