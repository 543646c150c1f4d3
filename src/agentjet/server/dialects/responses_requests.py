"""The translation of Responses requests to canonical requests.

Messages are compared by meaning, as in chat completions. A request may name an earlier answer of the episode instead of
sending it: its conversation is read from the journal.

**Items.** One answer comes back as several items. Its reasoning, text and tool calls, in this order, become one
assistant message again. The id of an item contains the id of its call: `rs_<call>`, `msg_<call>`,
`fc_<call>_<number>`, `ctc_<call>_<number>`. So two answers in a row stay two messages, and references can be resolved.

**Tools.** Functions, custom tools and namespaces become functions that the policy is offered.

* A tool in a namespace is the function `namespace.name`.
* A custom tool takes text. The policy calls it as a function with one argument, `input`. A regular expression
  constrains the text of a forced call. A Lark grammar is shown to the policy, and noted.
* Tools that a provider would run are not offered, and noted.

Invariant: `from_custom_input(to_custom_input(a))` has the meaning of `a`, for all arguments that a policy may sample.
So a call comes back as the same turn.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentjet.errors import InvalidRequest, NotFound
from agentjet.gateway.requests import CallRequest
from agentjet.server.dialects.dialect import (
    ANY_OBJECT,
    CallLookup,
    call_request,
    check_choice,
    function_tool,
    missing_key,
    named_function,
    refuse_top_logprobs,
    refuse_unused_stream_options,
    text_of,
    unknown_key,
)
from agentjet.server.dialects.responses_bodies import (
    INCLUDABLE,
    PROVIDER_TOOLS,
    RULES,
    CustomCallItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    ItemPart,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    ResponsesTool,
    TextFormat,
)
from agentjet.types import Constraint, Conversation, Message, ToolCall


def to_request(body: ResponsesBody, lookup_call: CallLookup) -> CallRequest:
    """Returns the canonical request. Raises `RequestError` for the first thing that cannot be honoured."""
    refuse_top_logprobs(body.top_logprobs)
    refuse_unused_stream_options(body, body.stream_options)
    notes = RULES.check(body)
    notes += [f"include: {name}" for name in body.include or () if name not in INCLUDABLE]
    instructions = (Message("system", body.instructions),) if body.instructions else ()
    given = body.input
    messages = [Message("user", given)] if isinstance(given, str) else to_messages(given, lookup_call, notes)
    tools = [] if body.tool_choice == "none" else offered_tools(body.tools or (), notes)
    conversation = Conversation(
        (*instructions, *_previous_messages(body.previous_response_id, lookup_call), *messages),
        tuple(tool.definition for tool in tools),
        instructed=bool(instructions),
    )
    return call_request(body, conversation, body.max_output_tokens, notes, constraint=_constraint(body, tools))


def _previous_messages(response_id: str | None, lookup_call: CallLookup) -> tuple[Message, ...]:
    """Returns the conversation of an earlier answer, including it, without the instructions of that request."""
    if response_id is None:
        return ()
    found = lookup_call(response_id.removeprefix("resp_"))
    if found is None:
        raise NotFound(
            f"Previous response {response_id!r} is not of this episode and role: send the conversation as input.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    conversation, answer = found
    return (*conversation.messages[1 if conversation.instructed else 0 :], answer)


def _constraint(body: ResponsesBody, tools: Sequence[OfferedTool]) -> Constraint:
    """Returns the constraint of `text.format`, `tool_choice`, `parallel_tool_calls` and strict tools."""
    choice = body.tool_choice
    constraint = Constraint(
        schema=_schema(body.text.format if body.text else None),
        schema_param="text.format",
        calls="required" if choice == "required" or isinstance(choice, dict) else "auto",
        function=_required_function(choice) if isinstance(choice, dict) else "",
        strict=frozenset(tool.full_name for tool in tools if tool.strict),
        parallel=body.parallel_tool_calls is not False,
    )
    return check_choice(constraint, [tool.full_name for tool in tools])


def _schema(given: TextFormat | None) -> Mapping[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    if given.schema_ is None:
        raise InvalidRequest("text.format of type 'json_schema' needs a schema.", param="text.format.schema")
    return given.schema_


def _required_function(choice: Mapping[str, Any]) -> str:
    if choice.get("type") == "custom":
        choice = {**choice, "type": "function"}
    name = named_function(choice, choice, "{'type': 'function' or 'custom', 'name': ...}")
    return full_name(choice.get("namespace"), name)


# --- items

CallItem = FunctionCallItem | CustomCallItem
AssistantItem = MessageItem | CallItem | ReasoningItem | ItemReference

_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")
_CALL_ID = re.compile(r"call_([0-9a-f]{12})_[0-9]+")


def item_id(kind: str, call_id: str) -> str:
    """Returns the id of an item of the answer of a call."""
    return f"{kind}_{call_id}"


def encode_reasoning(reasoning: str) -> str:
    """Returns reasoning as `encrypted_content`, for agents that keep only this key. It is not secret."""
    return base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def to_messages(items: Sequence[Item], lookup_call: CallLookup, notes: list[str]) -> list[Message]:
    """Returns the messages of the items. Adds to `notes` what the policy cannot read.

    Raises `InvalidRequest` or `NotFound` with the place of the item.
    """
    messages: list[Message] = []
    last = _AssistantPart(Message("assistant"), "")
    for i, item in enumerate(items):
        where = f"input.{i}"
        if isinstance(item, FunctionOutputItem):
            messages.append(Message("tool", _text(item.output, f"{where}.output", notes), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "system" if item.role == "developer" else item.role
            messages.append(Message(role, _text(item.content, f"{where}.content", notes)))
        else:
            part = _AssistantPart(_assistant(item, where, lookup_call, notes), _call_prefix(item))
            at = _turn_of(messages, last, part)
            if at is None:
                messages.append(part.message)
            else:
                messages[at] = _joined(messages[at], part.message)
            last = part
    return messages


def _text(content: str | Sequence[ItemPart], where: str, notes: list[str]) -> str:
    return text_of(content, ("input_text", "output_text"), where, notes)


@dataclass(frozen=True, slots=True)
class _AssistantPart:
    """An item of an assistant's turn. `message` holds this item only; see `_call_prefix` for `call_prefix`."""

    message: Message
    call_prefix: str

    @property
    def stage(self) -> int:
        """Position in an answer: reasoning, text, tool calls."""
        if self.message.tool_calls:
            return 2
        return 0 if self.message.reasoning else 1


def _assistant(item: AssistantItem, where: str, lookup_call: CallLookup, notes: list[str]) -> Message:
    if isinstance(item, ItemReference):
        return _referenced(item.id, where, lookup_call)
    if isinstance(item, CallItem):
        arguments = item.arguments if isinstance(item, FunctionCallItem) else from_custom_input(item.input)
        call = ToolCall(item.call_id, full_name(item.namespace, item.name), arguments)
        return Message("assistant", tool_calls=(call,))
    if isinstance(item, ReasoningItem):
        return Message("assistant", reasoning=_reasoning(item, where))
    return Message("assistant", _text(item.content, f"{where}.content", notes))


def _call_prefix(item: AssistantItem) -> str:
    """Returns the first digits of the id of the item's call; empty if the item does not have them."""
    found = _ID.fullmatch(item.id or "")
    if found is None and isinstance(item, CallItem):
        found = _CALL_ID.fullmatch(item.call_id)
    return found[1][:12] if found else ""


def _turn_of(messages: Sequence[Message], last: _AssistantPart, part: _AssistantPart) -> int | None:
    """Returns the index of the assistant message that a part belongs to; None if it begins a new message.

    Some agents put each function's output directly behind its call, although one answer had all calls.
    """
    results = next((i for i, message in enumerate(reversed(messages)) if message.role != "tool"), len(messages))
    at = len(messages) - 1 - results
    if at < 0 or messages[at].role != "assistant":
        return None
    same_call = last.call_prefix == part.call_prefix and part.call_prefix != ""
    unknown = not (last.call_prefix and part.call_prefix)
    if results:
        return at if same_call and part.stage == 2 else None
    in_order = part.stage > last.stage or part.stage == last.stage == 2
    return at if in_order and (same_call or unknown) else None


def _joined(turn: Message, part: Message) -> Message:
    return replace(
        turn,
        content=turn.content + part.content,
        reasoning=turn.reasoning + part.reasoning,
        tool_calls=turn.tool_calls + part.tool_calls,
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
    except ValueError:  # Not ASCII, not base64, or not UTF-8.
        place = f"{where}.encrypted_content"
        raise InvalidRequest(f"{place} was not made by this server.", code="invalid_value", param=place) from None


def _referenced(id_: str, where: str, lookup_call: CallLookup) -> Message:
    """Returns the item of an earlier answer that a reference names."""
    found = _ID.fullmatch(id_)
    exchange = lookup_call(found[1]) if found else None
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


# --- tools

NOTED = ("output_schema", "defer_loading", "async", "annotations")
"""Keys of a function or custom tool that have no effect."""
KNOWN = {
    "function": {"type", "name", "description", "parameters", "strict", "allowed_callers", *NOTED},
    "custom": {"type", "name", "description", "format", "allowed_callers", *NOTED},
    "namespace": {"type", "name", "description", "tools"},
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the policy is offered. The policy calls it by `full_name`."""

    full_name: str
    name: str
    namespace: str
    is_custom: bool
    strict: bool
    definition: Mapping[str, Any]


def offered_tools(tools: Iterable[ResponsesTool], notes: list[str]) -> list[OfferedTool]:
    """Returns the tools that the policy is offered. Adds to `notes`. Raises `InvalidRequest` with the tool's place."""
    found: dict[str, OfferedTool] = {}
    for tool, where in _each(tools, notes):
        if tool.full_name in found:
            raise InvalidRequest(f"{where}.name: two tools are called {tool.full_name!r}.", param=f"{where}.name")
        found[tool.full_name] = tool
    return list(found.values())


def full_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the policy calls a tool."""
    return f"{namespace}.{name}" if namespace else name


def _each(tools: Iterable[ResponsesTool], notes: list[str]) -> Iterator[tuple[OfferedTool, str]]:
    for i, tool in enumerate(tools):
        where = f"tools.{i}"
        if tool.type.startswith(PROVIDER_TOOLS):
            notes.append(f"tool {tool.type} dropped")
            continue
        _check_keys(tool, where, notes)
        if tool.type != "namespace":
            yield _offered_tool(tool, None, where, notes), where
            continue
        for k, inner in enumerate(_inner_tools(tool, where)):
            place = f"{where}.tools.{k}"
            if inner.type == "namespace":
                raise InvalidRequest(f"{place} is a namespace within another.", param=place)
            _check_keys(inner, place, notes)
            yield _offered_tool(inner, tool, place, notes), place


def _check_keys(tool: ResponsesTool, where: str, notes: list[str]) -> None:
    known = KNOWN.get(tool.type)
    if known is None:
        raise InvalidRequest(
            f"{where} is of type {tool.type!r}: the server runs no tools, define a function and run it yourself.",
            code="unsupported_parameter",
            param=where,
        )
    given = {name for name in tool.model_fields_set if getattr(tool, name) is not None}
    if unknown := sorted(given - known):
        raise unknown_key(where, unknown[0], known)
    if getattr(tool, "allowed_callers", None) not in (None, ["direct"]):
        place = f"{where}.allowed_callers"
        raise InvalidRequest(
            f"{place}: the policy calls tools itself, so use ['direct'].", code="unsupported_parameter", param=place
        )
    if tool.name is None:
        raise missing_key(where, "name")
    notes += [f"tools[].{name}" for name in NOTED if name in given and getattr(tool, name) is not False]


def _inner_tools(tool: ResponsesTool, where: str) -> Sequence[ResponsesTool]:
    inner = getattr(tool, "tools", None)
    try:
        if isinstance(inner, list):
            return [ResponsesTool.model_validate(item) for item in inner]
    except ValueError:
        pass
    raise InvalidRequest(f"{where}.tools must be a list of functions and custom tools.", param=f"{where}.tools")


def _offered_tool(tool: ResponsesTool, space: ResponsesTool | None, where: str, notes: list[str]) -> OfferedTool:
    name, namespace = tool.name or "", (space.name or "") if space is not None else ""
    described = [space.description if space is not None else None, tool.description]
    parameters = tool.parameters
    if tool.type == "custom":
        grammar, text = _custom_format(getattr(tool, "format", None), f"{where}.format")
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string", **text}},
            "required": ["input"],
            "additionalProperties": False,
        }
        if grammar:
            described.append(f"The input follows this grammar:\n{grammar}")
            notes.append(f"tool {name}: Lark grammar shown, not enforced")
    description = "\n\n".join(filter(None, described)) or None
    full = full_name(namespace, name)
    definition = function_tool(full, description, parameters)
    return OfferedTool(full, name, namespace, tool.type == "custom", bool(tool.strict), definition)


def _custom_format(given: Any, where: str) -> tuple[str, dict[str, str]]:
    """Returns the Lark grammar of a custom tool's input, and the keywords of the text's JSON schema."""
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
