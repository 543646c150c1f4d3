"""The body of `POST /v1/messages`, every key of it, and what comes back.

What cannot be honoured is listed here, to be refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentjet.protocol import Int64, Temperature
from agentjet.server.dialects.bodies import Body, Count, Finite, FirstError, JsonObject, RequestBody, StopStrings, Text
from agentjet.server.dialects.refusals import Neutral


class Open(FirstError):
    """Part of a request whose `type` says which keys it must and may have: see `Keys`."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Block(Open):
    """A content block; `BLOCKS` has the keys of each type."""

    type: str
    text: Text | None = None
    thinking: Text | None = None
    signature: str | None = None
    id: Text | None = None
    name: Text | None = None
    input: JsonObject | None = None
    tool_use_id: Text | None = None
    content: Text | list[Block] | None = None
    """Of a tool's result."""
    is_error: bool | None = None


class Tool(Open):
    """A tool that the agent runs itself, or one of Anthropic's own, which have a `type`; `TOOL` has the keys."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one type. Of a `neutral` one only the values given, and null, are accepted: they ask for nothing.

    `cache_control` is accepted everywhere: it asks nothing of the model.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    neutral: Neutral = field(default_factory=dict)


BLOCKS: dict[str, Keys] = {
    "text": Keys(required=("text",), neutral={"citations": ([],), "parsed_output": ()}),
    "thinking": Keys(required=("thinking",), optional=("signature",)),
    "tool_use": Keys(required=("id", "name", "input"), neutral={"caller": ({"type": "direct"},), "toolset_name": ()}),
    "tool_result": Keys(required=("tool_use_id",), optional=("content", "is_error"), neutral={"toolset_name": ()}),
}
"""The types of block that can be heard."""

TOOL = Keys(
    required=("name", "input_schema"),
    optional=("description", "eager_input_streaming", "strict"),
    neutral={
        "defer_loading": (False,),
        "input_examples": ([],),
        "allowed_callers": (["direct"],),
    },
)
"""Of a tool that the agent runs itself. `eager_input_streaming` says how its input is cut into events, which it is
not."""

ALLOWED: dict[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
"""The blocks that a message of each role may have."""


class TurnBody(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class ToolChoice(Body):
    """Whether the model may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["adaptive", "disabled", "enabled", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountBody(Body):
    """What a prompt is made of: the body of `POST /v1/messages/count_tokens`, and part of a request's."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[TurnBody], Field(min_length=1)]
    system: Text | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """Asks nothing of the model: what was heard before is kept anyway."""

    # Known, and honoured in their neutral form only: see `NEUTRAL`.
    context_management: Any = None
    mcp_servers: Any = None
    speed: str | None = None


class MessagesBody(CountBody, RequestBody):
    """A request. Everything of Anthropic's that is not honoured is refused, never ignored."""

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    temperature: Annotated[Temperature, Field(le=1)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=0)] | None = None
    metadata: dict[str, Any] | None = None
    """For the caller's own use."""
    thread: dict[str, Any] | None = None
    """Asks the server to hold the history. It is refused in the way upon which the SDK sends the history itself."""

    service_tier: str | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None


NEUTRAL: Neutral = {
    "context_management": ({"edits": []},),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
}


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


class Usage(BaseModel):
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
    usage: Usage


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int
