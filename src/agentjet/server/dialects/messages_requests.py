"""The request bodies of Anthropic's Messages API, and their translation to canonical requests.

Messages are compared by meaning. The input of a tool use is the value of the sampled arguments. Text blocks are joined.
Results of tools become messages, in the order of their blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic_core import from_json, to_json

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallRequest
from agentjet.protocol import Int64, Temperature
from agentjet.server.dialects.dialect import (
    CACHE_HINT,
    REASONING_HINT,
    UNREADABLE_PARTS,
    Body,
    Count,
    FirstError,
    JsonObject,
    KeyRules,
    RequestBody,
    RequestKeys,
    StopStrings,
    Text,
    call_request,
    check_choice,
    function_tool,
    honoured,
    missing_key,
    noted,
    placeholder_of,
    refuse_value,
    refused,
    unknown_key,
)
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- bodies


class TypedPart(FirstError):
    """Part of a request. Its type decides which keys it must and may have: see `PartKeys`."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ContentBlock(TypedPart):
    """A content block; `BLOCK_KEYS` has the keys of each type."""

    type: str
    text: Text | None = None
    thinking: Text | None = None
    signature: str | None = None
    id: Text | None = None
    name: Text | None = None
    input: JsonObject | None = None
    tool_use_id: Text | None = None
    content: Text | list[ContentBlock] | None = None
    """The content of a tool's result."""
    is_error: bool | None = None


class ToolDefinition(TypedPart):
    """A tool that the agent runs; `TOOL_KEYS` has its keys. Tools that Anthropic runs have a `type`."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class PartKeys:
    """The keys of one type of part.

    A `neutral` key may have the listed values, and null, which have no effect. `noted` keys have no effect;
    `cache_control` is noted in every part.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    noted: tuple[str, ...] = ()


BLOCK_KEYS: dict[str, PartKeys] = {
    "text": PartKeys(required=("text",), neutral={"citations": ([],), "parsed_output": ()}),
    "thinking": PartKeys(required=("thinking",), optional=("signature",)),
    "tool_use": PartKeys(
        required=("id", "name", "input"), neutral={"caller": ({"type": "direct"},), "toolset_name": ()}
    ),
    "tool_result": PartKeys(required=("tool_use_id",), optional=("content", "is_error"), neutral={"toolset_name": ()}),
}
"""The keys of the types of block that the policy can read."""

TOOL_KEYS = PartKeys(
    required=("name", "input_schema"),
    optional=("description", "strict"),
    neutral={"allowed_callers": (["direct"],)},
    noted=("eager_input_streaming", "input_examples", "defer_loading"),
)

PROVIDER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "computer_", "mcp_toolset", "tool_search_tool_")
"""Prefixes of the types of tools that the provider runs, or that work on images. The policy is not offered them."""

ROLE_BLOCKS: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""The types of block that a message of each role may have."""


class TurnBody(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[ContentBlock]


class ToolChoice(Body):
    """Defines whether the policy may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """A hint about reasoning. It has no effect."""

    type: Literal["adaptive", "disabled", "enabled", "between_tools"]
    budget_tokens: Any = None
    display: Any = None


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: Any = None
    task_budget: Any = None


class PromptBody(Body):
    """The keys that make a prompt. Also the body of `POST /v1/messages/count_tokens`."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[TurnBody], Field(min_length=1)]
    system: Text | list[ContentBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    # Known, and not honoured: see `KEYS`.
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None


class MessagesBody(PromptBody, RequestBody):
    """A request. Keys of Anthropic's API that cannot be honoured are refused, never ignored."""

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    temperature: Annotated[Temperature, Field(le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=0)] | None = None
    metadata: Any = None
    betas: Any = None
    thread: dict[str, Any] | None = None
    """A request to store the history on the server. The error makes Anthropic's SDK send the history instead."""

    service_tier: Any = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


KEYS: RequestKeys = {
    "model": honoured("and the role, after `@`"),
    "messages": honoured("text, `tool_use`, `tool_result`, `thinking`; the last message is the user's"),
    "system": honoured("text or text blocks"),
    "tools": honoured("with an `input_schema`, also `strict`"),
    "tool_choice": honoured("also `disable_parallel_tool_use`"),
    "output_config.format": honoured("[constraints.md](constraints.md)"),
    "max_tokens": honoured(),
    "stop_sequences": honoured("up to 16 of up to 1,000 characters"),
    "temperature": honoured("0, or from 0.01 to 1; 0 is refused in training"),
    "top_p": honoured(),
    "top_k": honoured(),
    "stream": honoured(),
    "thinking": noted(REASONING_HINT),
    "output_config.effort": noted(REASONING_HINT),
    "output_config.task_budget": noted(REASONING_HINT),
    "context_management": noted("edits of thinking; other edits are refused: the agent must edit its history itself"),
    "cache_control": noted(CACHE_HINT),
    "metadata": noted(),
    "betas": noted("the header `anthropic-beta` is noted as well"),
    "service_tier": noted("there is one tier"),
    "speed": noted("there is one speed", "standard"),
    "inference_geo": noted(),
    "diagnostics": noted(),
    "mcp_servers": noted("no provider runs their tools; the policy is not offered them", []),
    "container": refused("the server executes no code"),
    "thread": refused("the server stores no history"),
    "tools[].cache_control": noted(CACHE_HINT),
    "tools[].eager_input_streaming": noted("tool uses are streamed whole"),
    "tools[].input_examples": noted("the chat template has no place for them", []),
    "tools[].defer_loading": noted("every tool is offered at once"),
    "tools[].allowed_callers": refused("the policy calls tools itself", ["direct"]),
    "messages[].content[].cache_control": noted(CACHE_HINT),
    "messages[].content[].citations": refused("the policy cites nothing", []),
}
_RULES = KeyRules(KEYS)


# --- translation


def to_request(body: MessagesBody) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    if body.thread is not None:
        raise InvalidRequest(
            "thread is not supported: the server stores no history, send all of it.",
            code="thread_unsupported_request",
            param="thread",
        )
    conversation, notes = to_conversation(body)
    return call_request(
        body,
        conversation,
        body.max_tokens,
        notes,
        top_k=body.top_k,
        stop=body.stop_sequences or (),
        constraint=_constraint(body),
    )


def to_conversation(body: PromptBody) -> tuple[Conversation, list[str]]:
    """Returns the conversation of a request and the notes about it. Raises `InvalidRequest` like `to_request`."""
    notes = _RULES.check(body)
    _refuse_edits(body.context_management)
    system = _text(body.system or "", "system", notes)
    messages = [Message("system", system)] if system else []
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{i}", notes)
    if body.messages[-1].role == "assistant":
        where = f"messages.{len(body.messages) - 1}"
        raise InvalidRequest(
            f"{where}: the last message is the assistant's, but a prefilled answer cannot be continued: end with a "
            "user message.",
            code="unsupported_parameter",
            param=where,
        )
    tools = tuple(_tool(tool, f"tools.{i}", notes) for i, tool in _offered(body, notes))
    return Conversation(tuple(messages), tools), notes


def _refuse_edits(context_management: Any) -> None:
    """Raises `InvalidRequest` for edits of the history by the provider.

    Edits of thinking are accepted, because the template decides about thinking.
    """
    edits = context_management.get("edits", []) if isinstance(context_management, dict) else context_management or []
    for i, edit in enumerate(edits if isinstance(edits, list) else [edits]):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not str(kind).startswith("clear_thinking_"):
            where = f"context_management.edits.{i}"
            raise InvalidRequest(
                f"{where} is of type {str(kind)[:80]!r}: the server edits no history, edit it before you send it.",
                code="unsupported_parameter",
                param=where,
            )


def _check_keys(part: TypedPart, keys: PartKeys, where: str, notes: list[str]) -> None:
    """Adds the noted keys of a part to `notes`. Raises `InvalidRequest` for a missing, unknown or refused key."""
    given = {name for name in part.model_fields_set if getattr(part, name) is not None} - {"type"}
    noted_keys = {"cache_control", *keys.noted}
    notes += [
        f"tools[].{name}" if keys is TOOL_KEYS else f"messages[].content[].{name}"
        for name in sorted(given & noted_keys)
    ]
    for name in keys.required:
        if name not in given:
            raise missing_key(where, name)
    for name in sorted(given - {*keys.required, *keys.optional, *noted_keys}):
        if name not in keys.neutral:
            raise unknown_key(where, name, [*keys.required, *keys.optional, *keys.neutral, *noted_keys])
        refuse_value(getattr(part, name), keys.neutral[name], f"{where}.{name}")


def _turn(turn: TurnBody, where: str, notes: list[str]) -> list[Message]:
    """Returns the messages of a turn. Each tool result of a user turn is a message, and so is the text around it."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    blocks = _checked(turn.content, f"{where}.content", ROLE_BLOCKS[turn.role], f"{turn.role} message", notes)
    if turn.role == "assistant":
        return [_assistant(blocks)]
    if not blocks:
        raise InvalidRequest(
            f"{where}.content is empty: only an assistant message may have no content.", param=f"{where}.content"
        )
    messages: list[Message] = []
    after_text = False
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            messages.append(_result(block, f"{where}.content.{i}", notes))
        elif after_text:
            messages[-1] = Message(turn.role, messages[-1].content + (block.text or ""))
        else:
            messages.append(Message(turn.role, block.text or ""))
        after_text = block.type == "text"
    return messages


def _checked(
    blocks: Sequence[ContentBlock], where: str, accepted: Sequence[str], parent: str, notes: list[str]
) -> list[ContentBlock]:
    """Returns the blocks, with placeholders for those that the policy cannot read.

    Raises `InvalidRequest` for a block that a `parent` may not have.
    """
    readable = [
        ContentBlock(type="text", text=placeholder_of(block.type, notes)) if block.type in UNREADABLE_PARTS else block
        for block in blocks
    ]
    for i, block in enumerate(readable):
        place = f"{where}.{i}"
        if block.type not in accepted:
            known = block.type in BLOCK_KEYS
            why = f"does not belong into a {parent}" if known else "cannot be read: the policy reads text only"
            raise InvalidRequest(
                f"{place} is of type {block.type!r}, which {why}.", code="unsupported_content", param=place
            )
        _check_keys(block, BLOCK_KEYS[block.type], place, notes)
    return readable


def _assistant(blocks: Sequence[ContentBlock]) -> Message:
    return Message(
        "assistant",
        content="".join(block.text or "" for block in blocks),
        reasoning="".join(block.thinking or "" for block in blocks),
        tool_calls=tuple(
            ToolCall(block.id or "", block.name or "", from_tool_input(block.input or {}))
            for block in blocks
            if block.type == "tool_use"
        ),
    )


def _result(block: ContentBlock, where: str, notes: list[str]) -> Message:
    """Returns the message of a tool result. Templates have no place for `is_error`, so the text gets a prefix."""
    text = _text(block.content or "", f"{where}.content", notes)
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.tool_use_id or "")


def _text(content: str | list[ContentBlock], where: str, notes: list[str]) -> str:
    if isinstance(content, str):
        return content
    blocks = _checked(content, where, ("text",), where.rpartition(".")[2], notes)
    return "".join(block.text or "" for block in blocks)


def _tool(tool: ToolDefinition, where: str, notes: list[str]) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {tool.type!r}: tools of Anthropic are not supported, define a tool with an "
            "input_schema.",
            code="unsupported_parameter",
            param=where,
        )
    _check_keys(tool, TOOL_KEYS, where, notes)
    return function_tool(tool.name, tool.description, tool.input_schema)


def _offered(body: PromptBody, notes: list[str]) -> list[tuple[int, ToolDefinition]]:
    """Returns the tools that the policy is offered, with their places in the request. Adds to `notes`."""
    if body.tool_choice is not None and body.tool_choice.type == "none":
        return []
    offered = []
    for i, tool in enumerate(body.tools or ()):
        if (tool.type or "").startswith(PROVIDER_TOOLS):
            notes.append(f"tool {tool.type} dropped")
        else:
            offered.append((i, tool))
    return offered


def _constraint(body: MessagesBody) -> Constraint:
    """Returns the constraint of `output_config.format`, `tool_choice` and strict tools."""
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice: a choice of type 'tool', and no other, must name a tool.", param="tool_choice.name"
        )
    output = body.output_config.format if body.output_config is not None else None
    tools = [tool for _, tool in _offered(body, [])]
    constraint = Constraint(
        schema=output.schema_ if output is not None else None,
        schema_param="output_config.format",
        calls="required" if choice.type in ("any", "tool") else "auto",
        function=choice.name or "",
        strict=frozenset(tool.name or "" for tool in tools if tool.strict),
        parallel=not choice.disable_parallel_tool_use,
    )
    return check_choice(constraint, [tool.name or "" for tool in tools])


# --- the input of a tool use (an object) and the arguments of a tool call (text)
#
# Invariant: `from_tool_input(to_tool_input(text))` has the meaning of `text`. Some arguments cannot be read by every
# JSON parser (NaN, half a surrogate pair, hundreds of nested lists). They are wrapped as text, in the form that
# Anthropic proposes: `{"INVALID_JSON": "<as sampled>"}`.

WRAPPER_KEY = "INVALID_JSON"


def to_tool_input(arguments: str) -> dict[str, Any]:
    """Returns the object of the arguments of a tool call, which Python's parser reads as a JSON object."""
    try:
        value: dict[str, Any] | None = from_json(arguments, allow_inf_nan=False)
        from_json(to_json(value), allow_inf_nan=False)  # 1e400 is read as infinity, which no JSON can carry.
    except ValueError:
        value = None
    return {WRAPPER_KEY: arguments} if value is None or is_wrapped(value) else value


def is_wrapped(value: dict[str, Any]) -> bool:
    """True if the input is wrapped text."""
    return value.keys() == {WRAPPER_KEY} and isinstance(value[WRAPPER_KEY], str)


def from_tool_input(value: dict[str, Any]) -> str:
    """Returns the JSON text of an input."""
    return str(value[WRAPPER_KEY]) if is_wrapped(value) else json.dumps(value, ensure_ascii=False)
