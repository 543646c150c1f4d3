"""The body of `POST /v1/messages`, every key of it, and what comes back.

`KEYS` has the treatment of each.

The input of a tool use, which is an object, and the arguments of a tool call, which are text: one from the other.

Invariant: what `from_tool_input` makes of a `to_tool_input` is, by meaning, the text that went in. Arguments that
JSON cannot
carry to every reader (NaN, half a surrogate pair, hundreds of nested lists) travel as text, in the form that Anthropic
proposes for it: `{"INVALID_JSON": "<as sampled>"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

from agentjet.protocol import Int64, Temperature
from agentjet.server.dialects.dialect import (
    Body,
    Count,
    Finite,
    FirstError,
    JsonObject,
    KeyRules,
    RequestBody,
    RequestKeys,
    StopStrings,
    Text,
    honoured,
    noted,
    refused,
)


class TypedPart(FirstError):
    """Part of a request whose `type` says which keys it must and may have: see `PartKeys`."""

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
    """Of a tool's result."""
    is_error: bool | None = None


class ToolBlock(TypedPart):
    """A tool that the agent runs itself, or one of Anthropic's own, which have a `type`; `TOOL_KEYS` has the keys."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class PartKeys:
    """The keys of one type. Of a `neutral` one only the values given, and null, are accepted: they ask for nothing.

    `noted` keys have no effect; `cache_control` is noted everywhere.
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
"""The types of block that can be heard."""

TOOL_KEYS = PartKeys(
    required=("name", "input_schema"),
    optional=("description", "strict"),
    neutral={"allowed_callers": (["direct"],)},
    noted=("eager_input_streaming", "input_examples", "defer_loading"),
)
"""Of a tool that the agent runs itself."""

PROVIDER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "computer_", "mcp_toolset", "tool_search_tool_")
"""How the types of tools begin that run at the provider, or work on pictures: the policy is not offered them."""

ROLE_BLOCKS: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""The blocks that a message of each role may have."""


class TurnBody(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[ContentBlock]


class ToolChoice(Body):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether the model reasons before it answers."""

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
    """What a prompt is made of: the body of `POST /v1/messages/count_tokens`, and part of a request's."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[TurnBody], Field(min_length=1)]
    system: Text | list[ContentBlock] | None = None
    tools: list[ToolBlock] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    # Known, and not honoured: see `KEYS`.
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None


class MessagesBody(PromptBody, RequestBody):
    """A request. Everything of Anthropic's that is not honoured is refused, never ignored."""

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    temperature: Annotated[Temperature, Field(le=1)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=0)] | None = None
    metadata: Any = None
    betas: Any = None
    thread: dict[str, Any] | None = None
    """Asks the server to hold the history. It is refused in the way upon which the SDK sends the history itself."""

    service_tier: Any = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


HINT = "the policy alone decides whether and how much it reasons"
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
    "thinking": noted(HINT),
    "output_config.effort": noted(HINT),
    "output_config.task_budget": noted(HINT),
    "context_management": noted("edits of thinking; other edits are refused: the agent edits its history itself"),
    "cache_control": noted("prefixes are kept anyway"),
    "metadata": noted(),
    "betas": noted("so is the header `anthropic-beta`"),
    "service_tier": noted("there is one tier"),
    "speed": noted("there is one speed", "standard"),
    "inference_geo": noted(),
    "diagnostics": noted(),
    "mcp_servers": noted("a provider would run their tools; the policy is not offered them", []),
    "container": refused("no code is executed here"),
    "thread": refused("the server holds no history"),
    "tools[].cache_control": noted("prefixes are kept anyway"),
    "tools[].eager_input_streaming": noted("tool uses are streamed whole"),
    "tools[].input_examples": noted("the chat template has no place for them", []),
    "tools[].defer_loading": noted("every tool is offered at once"),
    "tools[].allowed_callers": refused("the policy calls tools itself", ["direct"]),
    "messages[].content[].cache_control": noted("prefixes are kept anyway"),
    "messages[].content[].citations": refused("the policy cites nothing", []),
}
BODY = KeyRules(KEYS)


class TextBlock(BaseModel):
    """What the model said."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """What the model thought before it answered. The signature is a constant: nothing is checked by it."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    """A tool call. Arguments that JSON cannot carry safely (half a surrogate pair, say) come as
    `{"INVALID_JSON": "<as sampled>"}`, the form that Anthropic proposes for it.
    """

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Tokens as the policy saw and sampled them."""

    input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageAnswer(BaseModel):
    """The answer to a request that does not stream; a stream begins with one that is still empty."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int


WRAPPER_KEY = "INVALID_JSON"


def to_tool_input(arguments: str) -> dict[str, Any]:
    """The object that arguments are; they are those of a tool call, so JSON of an object in Python's eyes."""
    try:
        value: dict[str, Any] | None = from_json(arguments, allow_inf_nan=False)
        from_json(to_json(value), allow_inf_nan=False)  # 1e400 is read as infinity, which no JSON can carry.
    except ValueError:
        value = None
    return {WRAPPER_KEY: arguments} if value is None or is_wrapped(value) else value


def is_wrapped(value: dict[str, Any]) -> bool:
    """Whether an input is text that travels as such."""
    return value.keys() == {WRAPPER_KEY} and isinstance(value[WRAPPER_KEY], str)


def from_tool_input(value: dict[str, Any]) -> str:
    """JSON text of an input."""
    return str(value[WRAPPER_KEY]) if is_wrapped(value) else json.dumps(value, ensure_ascii=False)
