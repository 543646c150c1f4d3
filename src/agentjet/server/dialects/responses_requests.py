"""The tools of a Responses request: functions, custom tools and namespaces, as functions that the policy is
offered_tools.

* A tool in a namespace is the function `namespace.name`.
* A custom tool takes text. The policy calls it as a function with one argument, `input`. A regular expression binds the
  text of a forced call; a Lark grammar is shown to the policy, and noted.
* Tools that a provider would run are not offered_tools, and noted.

Invariant: `from_custom_input(to_custom_input(a))` has the meaning of `a`, for all arguments that a policy may
sample, so that a call comes back as the same turn.

The items of a Responses request as messages: what a model said in one answer comes back in several items.

Reasoning, text and tool calls of one answer, in this order, are one assistant message again. Ids name the call they
come from (`rs_<call>`, `msg_<call>`, `fc_<call>_<number>`, `ctc_<call>_<number>`), so that two answers in a row stay
two, and references to items can be followed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentjet.errors import InvalidRequest, NotFound
from agentjet.server.dialects.dialect import CallLookup, function_tool, text_of
from agentjet.server.dialects.responses_bodies import (
    PROVIDER_TOOLS,
    CustomCallItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    ItemPart,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesTool,
)
from agentjet.types import Message, ToolCall

NOTED = ("output_schema", "defer_loading", "async", "annotations")
"""Keys of a function or custom tool that have no effect: every tool is offered_tools at once, with its input only."""
KNOWN = {
    "function": {"type", "name", "description", "parameters", "strict", "allowed_callers", *NOTED},
    "custom": {"type", "name", "description", "format", "allowed_callers", *NOTED},
    "namespace": {"type", "name", "description", "tools"},
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool offered to the policy. `full_name` is the name by which the policy calls it."""

    full_name: str
    name: str
    namespace: str
    is_custom: bool
    strict: bool
    definition: Mapping[str, Any]


def offered_tools(tools: Iterable[ResponsesTool], notes: list[str]) -> list[OfferedTool]:
    """The tools offered to the policy. Adds to `notes`; raises `InvalidRequest` naming the tool."""
    found: dict[str, OfferedTool] = {}
    for tool, where in _each(tools, notes):
        if tool.full_name in found:
            raise InvalidRequest(f"{where}.name: two tools are called {tool.full_name!r}.", param=f"{where}.name")
        found[tool.full_name] = tool
    return list(found.values())


def full_name(namespace: str | None, name: str) -> str:
    """The name by which the policy calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _each(tools: Iterable[ResponsesTool], notes: list[str]) -> Iterator[tuple[OfferedTool, str]]:
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


def _offered(tool: ResponsesTool, space: ResponsesTool | None, where: str, notes: list[str]) -> OfferedTool:
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
    full = full_name(namespace, name)
    definition = function_tool(full, description, parameters)
    return OfferedTool(full, name, namespace, tool.type == "custom", bool(tool.strict), definition)


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


def to_custom_input(arguments: str) -> str:
    """The input of a custom tool, by the arguments that the policy sampled. Arguments of another form, and those whose
    input is itself a JSON object, are the input as they stand: the tool can say what is wrong with them.
    """
    value = _object(arguments)
    text = value.get("input") if value is not None and value.keys() == {"input"} else None
    return text if isinstance(text, str) and _object(text) is None else arguments


def from_custom_input(text: str) -> str:
    """The arguments that `to_custom_input` made this input of."""
    return json.dumps({"input": text}, ensure_ascii=False) if _object(text) is None else text


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


CallItem = FunctionCallItem | CustomCallItem

_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")
_CALL_ID = re.compile(r"call_([0-9a-f]{12})_[0-9]+")


def item_id(kind: str, call_id: str) -> str:
    """The id of an answer's item, by the call that the answer is."""
    return f"{kind}_{call_id}"


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for agents that keep nothing else of it. It is no secret from them."""
    return base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def to_messages(items: Sequence[Item], past: CallLookup, notes: list[str]) -> list[Message]:
    """The messages that items are. Adds to `notes` what is not read.

    Raises `InvalidRequest` or `NotFound` naming the item.
    """
    messages: list[Message] = []
    last = _Spoken(Message("assistant"), "")
    for i, item in enumerate(items):
        where = f"input.{i}"
        if isinstance(item, FunctionOutputItem):
            messages.append(Message("tool", _text(item.output, f"{where}.output", notes), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append(Message(role, _text(item.content, f"{where}.content", notes)))
        else:
            spoken = _spoken(item, where, past, notes)
            at = _place(messages, last, spoken)
            if at is None:
                messages.append(spoken.message)
            else:
                messages[at] = _joined(messages[at], spoken.message)
            last = spoken
    return messages


def _text(content: str | Sequence[ItemPart], where: str, notes: list[str]) -> str:
    return text_of(content, ("input_text", "output_text"), where, notes)


@dataclass(frozen=True, slots=True)
class _Spoken:
    """An item of an assistant's turn: a message with nothing else in it, and what tells the call it is of, if known."""

    message: Message
    origin: str

    @property
    def stage(self) -> int:
        """Where it stands in an answer."""
        if self.message.tool_calls:
            return 2
        return 0 if self.message.reasoning else 1


def _spoken(
    item: MessageItem | CallItem | ReasoningItem | ItemReference, where: str, past: CallLookup, notes: list[str]
) -> _Spoken:
    origin = _origin(item)
    if isinstance(item, ItemReference):
        return _Spoken(_recalled(item.id, where, past), origin)
    if isinstance(item, FunctionCallItem):
        call = ToolCall(item.call_id, full_name(item.namespace, item.name), item.arguments)
        return _Spoken(Message("assistant", tool_calls=(call,)), origin)
    if isinstance(item, CustomCallItem):
        call = ToolCall(item.call_id, full_name(item.namespace, item.name), from_custom_input(item.input))
        return _Spoken(Message("assistant", tool_calls=(call,)), origin)
    if isinstance(item, ReasoningItem):
        return _Spoken(Message("assistant", reasoning=_reasoning(item, where)), origin)
    return _Spoken(Message("assistant", _text(item.content, f"{where}.content", notes)), origin)


def _origin(item: MessageItem | CallItem | ReasoningItem | ItemReference) -> str:
    """The first digits of the id of the call that an item is of; empty where it cannot be told."""
    found = _ID.fullmatch(item.id or "")
    if found is None and isinstance(item, CallItem):
        found = _CALL_ID.fullmatch(item.call_id)
    return found[1][:12] if found else ""


def _place(messages: Sequence[Message], last: _Spoken, item: _Spoken) -> int | None:
    """The index of the assistant message that an item belongs to; None when it begins one of its own.

    Some agents put each function's output right behind its call, although the calls were one answer's.
    """
    results = next((i for i, message in enumerate(reversed(messages)) if message.role != "tool"), len(messages))
    at = len(messages) - 1 - results
    if at < 0 or messages[at].role != "assistant":
        return None
    same_call = last.origin == item.origin and item.origin != ""
    unknown = not (last.origin and item.origin)
    if results:
        return at if same_call and item.stage == 2 else None
    in_order = item.stage > last.stage or item.stage == last.stage == 2
    return at if in_order and (same_call or unknown) else None


def _joined(turn: Message, item: Message) -> Message:
    """An assistant's turn with one more item, whose kinds of content do not overlap."""
    return replace(
        turn,
        content=turn.content + item.content,
        reasoning=turn.reasoning + item.reasoning,
        tool_calls=turn.tool_calls + item.tool_calls,
    )


def _reasoning(item: ReasoningItem, where: str) -> str:
    if item.content:
        for i, part in enumerate(item.content):
            if part.type != "reasoning_text":
                place = f"{where}.content.{i}"
                raise InvalidRequest(
                    f"{place} is of type {part.type!r}, not 'reasoning_text'.", code="unsupported_content", param=place
                )
        return "".join(part.text or "" for part in item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode(errors="surrogatepass")
    except ValueError:  # Not ASCII, not base64, or not UTF-8: each is one.
        place = f"{where}.encrypted_content"
        raise InvalidRequest(f"{place} was not made by this server.", code="invalid_value", param=place) from None


def _recalled(id_: str, where: str, past: CallLookup) -> Message:
    """The item of an earlier answer that a reference names."""
    found = _ID.fullmatch(id_)
    exchange = past(found[1]) if found else None
    if found is not None and exchange is not None:
        _, answer = exchange
        if id_.startswith("rs_") and answer.reasoning:
            return Message("assistant", reasoning=answer.reasoning)
        if id_.startswith("msg_"):
            return Message("assistant", answer.content)
        calls = answer.tool_calls[int(found[2]) : int(found[2]) + 1] if found[2] else ()
        if id_.startswith(("fc_", "ctc_")) and calls:
            return Message("assistant", tool_calls=calls)
    raise NotFound(
        f"Item {id_!r} is not of this episode and role: send the item itself.",
        code="item_not_found",
        param=f"{where}.id",
    )
