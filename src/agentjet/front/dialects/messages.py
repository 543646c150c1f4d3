"""Anthropic's Messages API.

Messages are compared by meaning. The input of a tool use is the value of the sampled arguments. Text blocks are joined.
Results of tools become messages, in the order of their blocks. An answer has blocks of thinking, text and tool uses, in
the order in which they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json, to_json

from agentjet.errors import ContextOverflow, InvalidRequest, RequestError
from agentjet.front.calls import CallChunk, CallRequest
from agentjet.front.dialects.dialect import (
    CACHE_MEANING,
    NO_PLACE,
    REASONING_MEANING,
    AnswerHead,
    BlockEvent,
    Blocks,
    Body,
    CallLookup,
    ContentPart,
    Count,
    Dialect,
    Distribution,
    Encoder,
    ErrorShape,
    Images,
    Items,
    JsonObject,
    KeyRule,
    Payload,
    RequestBody,
    RequestKeys,
    StopStrings,
    Text,
    ToolName,
    call_of,
    check_choice,
    function_tool,
    noted,
    refusal,
    refused,
    request_notes,
    text_of,
)
from agentjet.protocol import Int64, Temperature, status_of
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- bodies

MESSAGES_KEYS: RequestKeys = {
    **noted("thinking output_config.effort output_config.task_budget", REASONING_MEANING),
    **noted("context_management", "edits of thinking; other edits are refused: the agent must edit its history itself"),
    **noted("cache_control tools[].cache_control messages[].content[].cache_control", CACHE_MEANING),
    **noted("speed", "there is one speed", "standard"),
    **noted("mcp_servers", "no provider runs their tools; the policy is not offered them", []),
    **noted("metadata inference_geo diagnostics"),
    **noted("betas", "the header `anthropic-beta` is noted as well"),
    **noted("service_tier", "there is one tier"),
    **noted("tools[].eager_input_streaming", "tool uses are streamed whole"),
    **noted("tools[].input_examples", f"{NO_PLACE}them", []),
    **noted("tools[].defer_loading", "every tool is offered at once"),
    **refused("tools[].allowed_callers", "the policy calls tools itself", ["direct"]),
    **refused("messages[].content[].citations", "the policy cites nothing", []),
    **refused("messages[].content[].caller", "the policy calls tools itself", {"type": "direct"}),
    **refused("messages[].content[].toolset_name", "the policy calls tools itself"),
    **refused("messages[].content[].parsed_output", "the policy parses nothing"),
    **refused("container", "the server executes no code"),
    "thread": KeyRule("refused", "the server stores no history", code="thread_unsupported_request"),
}


class ContentBlock(ContentPart):
    """A content block."""

    place = "messages[].content[]."
    keys_of_kind: ClassVar = {
        "text": "text",
        "thinking": "thinking signature?",
        "tool_use": "id name input",
        "tool_result": "tool_use_id content? is_error?",
    }
    unknown_kind = "this server reads text, thinking and tools only."
    thinking: Text | None = None
    id: Text | None = None
    name: Text | None = None
    input: JsonObject | None = None
    tool_use_id: Text | None = None
    content: Text | Items[ContentBlock] | None = None
    """The content of a tool's result."""
    is_error: bool | None = None


ROLE_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
"""The types of block that a message of each role may have."""
PROVIDER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "computer_", "mcp_toolset", "tool_search_tool_")
"""Prefixes of the types of tools that the provider runs, or that work on images. The policy is not offered them."""


class ToolDefinition(Body):
    """A tool that the agent runs. Tools that Anthropic runs have a `type`."""

    place = "tools[]."
    keys_of_kind: ClassVar = {"custom": "name input_schema description? strict?"}
    unknown_kind = "tools of Anthropic are not supported, define a tool with an input_schema."
    type: str | None = None
    name: ToolName | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None

    @property
    def kind(self) -> str:
        return self.type or "custom"

    @property
    def omission(self) -> str:
        return f"tool {self.type} dropped" if self.kind.startswith(PROVIDER_TOOLS) else ""


class TurnBody(Body):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Items[ContentBlock]


class ToolChoice(Body):
    """Defines whether the policy may, must or must not call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonObject, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    place = "output_config."
    format: OutputFormat | None = None


class PromptBody(Body):
    """The keys that make a prompt. Also the body of `POST /v1/messages/count_tokens`."""

    place = ""
    model: str
    """and the role, after `@`"""
    messages: Annotated[Items[TurnBody], Field(min_length=1)]
    """text, `tool_use`, `tool_result`, `thinking`; the last message is the user's"""
    system: Text | Items[ContentBlock] | None = None
    """text or text blocks"""
    tools: Items[ToolDefinition] | None = None
    """with an `input_schema`, also `strict`"""
    tool_choice: ToolChoice | None = None
    """also `disable_parallel_tool_use`"""
    output_config: OutputConfig | None = None
    """`format`: [constraints.md](constraints.md)"""
    context_management: Any = None

    @property
    def calls_tools(self) -> bool:
        return self.tool_choice is None or self.tool_choice.type != "none"

    def omission_of(self, part: Body) -> str:
        """Without tools to call, the tools that Anthropic defines do not matter."""
        if isinstance(part, ToolDefinition) and part.kind != "custom" and not self.calls_tools:
            return f"tool {part.type} dropped"
        return super().omission_of(part)


class MessagesBody(PromptBody, Distribution, RequestBody):
    """A request. Keys of Anthropic's API that cannot be honoured are refused, never ignored."""

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    """up to 16 of up to 1,000 characters"""
    temperature: Annotated[Temperature, Field(le=1)] | None = None
    """0, or from 0.01 to 1; 0 is refused in training"""
    top_k: Annotated[Int64, Field(ge=0)] | None = None


# --- translation


def translate(body: MessagesBody, _: CallLookup) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    conversation = to_conversation(body)
    return CallRequest(
        conversation,
        max_tokens=body.max_tokens,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        constraint=_constraint(body, [tool["function"]["name"] for tool in conversation.tools]),
    )


def prompt_to_count(body: PromptBody, images: Images) -> Conversation:
    """Returns the conversation of a request to count tokens. Raises `InvalidRequest` as a call would."""
    list(request_notes(body, MESSAGES_KEYS, images))
    return to_conversation(body)


def to_conversation(body: PromptBody) -> Conversation:
    """Returns the conversation of a request whose keys were checked. Raises `InvalidRequest` like `translate`."""
    _refuse_edits(body.context_management)
    if isinstance(body.system, list):
        _check_blocks(body.system, "system", ("text",), "system prompt")
    system = text_of(body.system)
    messages = [Message("system", system)] if system else []
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{i}.content")
    if body.messages[-1].role == "assistant":
        why = ": the last message is the assistant's, but a prefilled answer cannot be continued: end with a user "
        raise refusal(f"messages.{len(body.messages) - 1}", f"{why}message.")
    offered = [tool for tool in body.tools or () if body.calls_tools and not tool.omission]
    return Conversation(
        tuple(messages), tuple(function_tool(tool.name, tool.description, tool.input_schema) for tool in offered)
    )


def _refuse_edits(context_management: Any) -> None:
    """Raises `InvalidRequest` for edits of the history by the provider.

    Edits of thinking are accepted, because the template decides about thinking.
    """
    edits = context_management.get("edits", []) if isinstance(context_management, dict) else context_management or []
    for i, edit in enumerate(edits if isinstance(edits, list) else [edits]):
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not str(kind).startswith("clear_thinking_"):
            why = f" is of type {str(kind)[:80]!r}: the server edits no history, edit it before you send it."
            raise refusal(f"context_management.edits.{i}", why)


def _turn(turn: TurnBody, where: str) -> list[Message]:
    """Returns the messages of a turn. Each tool result of a user turn is a message, and so is the text around it."""
    blocks = turn.content
    if isinstance(blocks, str):
        return [Message(turn.role, blocks)]
    _check_blocks(blocks, where, ROLE_BLOCKS[turn.role], f"{turn.role} message")
    if turn.role == "assistant":
        reasoning = "".join(block.thinking or "" for block in blocks)
        uses = [block for block in blocks if block.type == "tool_use"]
        calls = (ToolCall(use.id or "", use.name or "", from_tool_input(use.input or {})) for use in uses)
        return [Message("assistant", text_of(blocks), reasoning, tuple(calls))]
    if not blocks:
        raise refusal(where, " is empty: only an assistant message may have no content.", "invalid_value")
    messages: list[Message] = []
    for is_result, together in groupby(enumerate(blocks), lambda pair: pair[1].type == "tool_result"):
        if is_result:
            messages += [_result(block, f"{where}.{i}.content") for i, block in together]
        else:
            messages.append(Message(turn.role, text_of([block for _, block in together])))
    return messages


def _check_blocks(blocks: Sequence[ContentBlock], where: str, accepted: Sequence[str], parent: str) -> None:
    """Raises `InvalidRequest` for a block that a `parent` may not have."""
    for i, block in enumerate(blocks):
        if block.type not in accepted and not block.omission:
            why = f" is of type {block.type!r}, which does not belong into a {parent}."
            raise refusal(f"{where}.{i}", why, "unsupported_content")


def _result(block: ContentBlock, where: str) -> Message:
    """Returns the message of a tool result. Templates have no place for `is_error`, so the text gets a prefix."""
    if isinstance(block.content, list):
        _check_blocks(block.content, where, ("text",), "tool_result")
    text = text_of(block.content)
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.tool_use_id or "")


def _constraint(body: MessagesBody, offered: Sequence[str]) -> Constraint:
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest(
            "tool_choice: a choice of type 'tool', and no other, must name a tool.", param="tool_choice.name"
        )
    output = body.output_config.format if body.output_config is not None else None
    constraint = Constraint(
        schema=output.schema_ if output is not None else None,
        schema_param="output_config.format",
        calls="required" if choice.type in ("any", "tool") else "auto",
        function=choice.name or "",
        strict=frozenset(tool.name or "" for tool in body.tools or () if tool.strict and tool.name in offered),
        parallel=not choice.disable_parallel_tool_use,
    )
    return check_choice(constraint, offered)


# --- answers

SIGNATURE = "agentjet"
"""The signature of every thinking block. Some SDKs drop blocks with an empty one from the history."""


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int


class MessageEncoder(Encoder[MessagesBody]):
    """Encodes a message: one content block after the other, tool uses whole."""

    def __init__(self, body: MessagesBody, head: AnswerHead) -> None:
        super().__init__(body, head)
        self._blocks = Blocks()
        self._content: list[Payload] = []
        self._message: Payload = {}

    def encode(self, chunk: CallChunk) -> Iterator[Payload]:
        if not self._message:
            self._message = {"id": f"msg_{self.head.id}", "type": "message", "role": "assistant"}
            self._message |= {"model": self.head.model, "content": [], "stop_reason": None, "stop_sequence": None}
            self._message["usage"] = {"input_tokens": chunk.num_prompt_tokens, "output_tokens": 0}
            yield {"type": "message_start", "message": self._message}
        for event in self._blocks.push(chunk):
            yield from self._block(event)
        if chunk.call is not None:
            end = _end(chunk, self.body)
            usage = {"input_tokens": chunk.num_prompt_tokens, "output_tokens": len(chunk.call.completion)}
            self._message = {**self._message, "content": self._content, **end, "usage": usage}
            yield {"type": "message_delta", "delta": end, "usage": usage}
            yield {"type": "message_stop"}

    def _block(self, event: BlockEvent) -> Iterator[Payload]:
        if event.kind == "open":
            yield self._event("start", event, _text_block(event, ""))
        elif event.kind == "add":
            name = "thinking" if event.block == "reasoning" else "text"
            yield self._event("delta", event, {"type": f"{name}_delta", name: event.text})
        elif event.kind == "close":
            self._content.append(_text_block(event, SIGNATURE))
            if event.block == "reasoning":
                yield self._event("delta", event, {"type": "signature_delta", "signature": SIGNATURE})
        elif event.call is not None:
            call, given = event.call, to_tool_input(event.call.arguments)
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": given}
            self._content.append(block)
            yield self._event("start", event, {**block, "input": {}})
            written = json.dumps(given, ensure_ascii=False)
            yield self._event("delta", event, {"type": "input_json_delta", "partial_json": written})
        if event.kind in ("close", "call"):
            yield {"type": "content_block_stop", "index": event.index}

    @staticmethod
    def _event(kind: Literal["start", "delta"], event: BlockEvent, content: Payload) -> Payload:
        key = "content_block" if kind == "start" else "delta"
        return {"type": f"content_block_{kind}", "index": event.index, key: content}

    def answer(self) -> Payload:
        return self._message


def _text_block(event: BlockEvent, signature: str) -> Payload:
    if event.block == "reasoning":
        return {"type": "thinking", "thinking": event.text, "signature": signature}
    return {"type": "text", "text": event.text}


def _end(last: CallChunk, body: MessagesBody) -> Payload:
    """Returns the reason why an answer ended.

    If it was cut before `max_tokens`, the context was full.
    """
    call = call_of(last)
    cut = "max_tokens" if len(call.completion) >= body.max_tokens else "model_context_window_exceeded"
    stopped = "stop_sequence" if last.stop else "end_turn"
    reason = {"length": cut, "tool_calls": "tool_use"}.get(call.finish_reason, stopped)
    return {"stop_reason": reason, "stop_sequence": last.stop if reason == "stop_sequence" else None}


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
    return value.keys() == {WRAPPER_KEY} and isinstance(value[WRAPPER_KEY], str)


def from_tool_input(value: dict[str, Any]) -> str:
    return str(value[WRAPPER_KEY]) if is_wrapped(value) else json.dumps(value, ensure_ascii=False)


# --- errors

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types by status. Other statuses are `invalid_request_error`, or `api_error` from 500."""


class AnthropicError(BaseModel):
    """An error on a route of Anthropic's API. The message names the key, because no field does."""

    type: Literal["error"]
    error: dict[str, Any]
    """`type`, `message` and `details`: Anthropic's SDKs decide by `details.error_code`."""
    request_id: str | None


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    if isinstance(error, ContextOverflow):  # Claude Code reads both numbers to compact its history.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum - 1} maximum"
    elif error.code == ContextOverflow.code:
        message = f"prompt is too long: {error.message}"
    message = message.replace(".function.parameters", ".input_schema")  # The grammar uses OpenAI's name.
    details = {"error_code": error.code}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}, "request_id": None}


ANTHROPIC_ERRORS = ErrorShape(AnthropicError, anthropic_error)
MESSAGES = Dialect("/v1/messages", MessagesBody, MESSAGES_KEYS, ANTHROPIC_ERRORS, translate, MessageEncoder)
