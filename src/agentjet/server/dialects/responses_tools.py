"""The tools of a Responses request: functions, custom tools and namespaces, as functions that the policy is offered.

* A tool in a namespace is the function `namespace.name`.
* A custom tool takes text. The policy calls it as a function with one argument, `input`. A regular expression binds the
  text of a forced call; a Lark grammar is shown to the policy, and noted.
* Tools that a provider would run are not offered, and noted.

Invariant: `to_arguments(to_input(a))` has the meaning of `a`, for all arguments that a policy may sample, so that a
call comes back as the same turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.errors import InvalidRequest
from agentjet.server.dialects.constraints import function_tool
from agentjet.server.dialects.responses_bodies import PROVIDER_TOOLS, ResponsesTool

NOTED = ("output_schema", "defer_loading", "async", "annotations")
"""Keys of a function or custom tool that have no effect: every tool is offered at once, with its input only."""
KNOWN = {
    "function": {"type", "name", "description", "parameters", "strict", "allowed_callers", *NOTED},
    "custom": {"type", "name", "description", "format", "allowed_callers", *NOTED},
    "namespace": {"type", "name", "description", "tools"},
}


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the policy is offered. `called` is the name by which the policy calls it."""

    called: str
    name: str
    namespace: str
    is_custom: bool
    strict: bool
    definition: Mapping[str, Any]


def offered(tools: Iterable[ResponsesTool], notes: list[str]) -> list[Offered]:
    """The tools that the policy is offered. Adds to `notes`; raises `InvalidRequest` naming the tool."""
    found: dict[str, Offered] = {}
    for tool, where in _each(tools, notes):
        if tool.called in found:
            raise InvalidRequest(f"{where}.name: two tools are called {tool.called!r}.", param=f"{where}.name")
        found[tool.called] = tool
    return list(found.values())


def called(namespace: str | None, name: str) -> str:
    """The name by which the policy calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _each(tools: Iterable[ResponsesTool], notes: list[str]) -> Iterator[tuple[Offered, str]]:
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        if tool.type.startswith(PROVIDER_TOOLS):
            notes.append(f"tool {tool.type} dropped")
            continue
        _check_keys(tool, where, notes)
        if tool.type == "namespace":
            for k, inner in enumerate(_inner(tool, where)):
                place = f"{where}.tools.{k}"
                if inner.type == "namespace":
                    raise InvalidRequest(f"{place} is a namespace within another.", param=place)
                _check_keys(inner, place, notes)
                yield _offered(inner, tool, place, notes), place
        else:
            yield _offered(tool, None, where, notes), where


def _check_keys(tool: ResponsesTool, where: str, notes: list[str]) -> None:
    known = KNOWN.get(tool.type)
    if known is None:
        raise InvalidRequest(
            f"{where} is of type {tool.type!r}: no such tool is run here, define a function and run it yourself.",
            code="unsupported_parameter",
            param=where,
        )
    given = {name for name in tool.model_fields_set if getattr(tool, name) is not None}
    if unknown := sorted(given - known):
        place = f"{where}.{unknown[0]}"
        raise InvalidRequest(f"{place!r} is not a key this server knows.", code="unknown_parameter", param=place)
    if getattr(tool, "allowed_callers", None) not in (None, ["direct"]):
        place = f"{where}.allowed_callers"
        raise InvalidRequest(
            f"{place}: the policy calls tools itself, so use ['direct'].", code="unsupported_parameter", param=place
        )
    if tool.name is None:
        raise InvalidRequest(f"{where}.name is missing.", code="invalid_value", param=f"{where}.name")
    notes += [f"tools[].{name}" for name in NOTED if name in given and getattr(tool, name) is not False]


def _inner(tool: ResponsesTool, where: str) -> Sequence[ResponsesTool]:
    inner = getattr(tool, "tools", None)
    try:
        if isinstance(inner, list):
            return [ResponsesTool.model_validate(item) for item in inner]
    except ValueError:
        pass
    raise InvalidRequest(f"{where}.tools must be a list of functions and custom tools.", param=f"{where}.tools")


def _offered(tool: ResponsesTool, space: ResponsesTool | None, where: str, notes: list[str]) -> Offered:
    name, namespace = tool.name or "", (space.name or "") if space is not None else ""
    described = [space.description if space is not None else None, tool.description]
    description = "\n\n".join(text for text in described if text) or None
    parameters = tool.parameters
    if tool.type == "custom":
        grammar, text = _format(getattr(tool, "format", None), f"{where}.format")
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", **text}},
            "required": ["input"],
            "additionalProperties": False,
        }
        if grammar:
            description = "\n\n".join(filter(None, [description, f"The input follows this grammar:\n{grammar}"]))
            notes.append(f"tool {name}: Lark grammar shown, not enforced")
    full = called(namespace, name)
    definition = function_tool(full, description, parameters)
    return Offered(full, name, namespace, tool.type == "custom", bool(tool.strict), definition)


def _format(given: Any, where: str) -> tuple[str, dict[str, str]]:
    """The Lark grammar of a custom tool's input, and what its JSON schema says of the text."""
    kind = given.get("type", "text") if isinstance(given, dict) else "text" if given is None else "?"
    if kind == "text":
        return "", {}
    definition, syntax = (given.get("definition"), given.get("syntax")) if isinstance(given, dict) else (None, None)
    if kind == "grammar" and isinstance(definition, str) and syntax == "lark":
        return definition, {}
    if kind == "grammar" and isinstance(definition, str) and syntax == "regex":
        return "", {"pattern": f"^(?:{definition})$"}
    raise InvalidRequest(
        f"{where}: use {{'type': 'text'}}, or {{'type': 'grammar', 'syntax': 'lark' or 'regex', 'definition': ...}}.",
        code="invalid_value",
        param=where,
    )


def to_input(arguments: str) -> str:
    """The input of a custom tool, by the arguments that the policy sampled. Arguments of another form, and those whose
    input is itself a JSON object, are the input as they stand: the tool can say what is wrong with them.
    """
    value = _object(arguments)
    text = value.get("input") if value is not None and value.keys() == {"input"} else None
    return text if isinstance(text, str) and _object(text) is None else arguments


def to_arguments(text: str) -> str:
    """The arguments that `to_input` made this input of."""
    return json.dumps({"input": text}, ensure_ascii=False) if _object(text) is None else text


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
