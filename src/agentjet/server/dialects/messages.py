"""Anthropic's Messages API.

Messages are compared by meaning. The input of a tool use is the value of the sampled arguments. Text blocks are joined.
Results of tools become messages, in the order of their blocks. An answer has blocks of thinking, text and tool uses, in
this order.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json, to_json

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.protocol import Int64, Temperature
from agentjet.server.dialects.dialect import (
    UNREADABLE_PARTS,
    AnswerHead,
    Chunks,
    call_of,
    call_request,
    check_choice,
    function_tool,
    placeholder_of,
)
from agentjet.server.dialects.error_shapes import sse
from agentjet.server.dialects.keys import (
    MESSAGES_KEYS,
    PROMPT_KEYS,
    Body,
    Count,
    JsonObject,
    RequestBody,
    StopStrings,
    Text,
    ToolName,
    TypedPart,
    refusal,
    with_keys,
)
from agentjet.types import Constraint, Conversation, Message, ToolCall

# --- bodies


@with_keys(PROMPT_KEYS, "messages[].content[].")
class ContentBlock(TypedPart):
    """A content block. `REQUIRED_KEYS` and `OPTIONAL_KEYS` have the keys of each type."""

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


REQUIRED_KEYS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}
"""The types of block that the policy can read."""
OPTIONAL_KEYS = {"thinking": ("signature",), "tool_result": ("content", "is_error")}
ROLE_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
"""The types of block that a message of each role may have."""
PROVIDER_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "computer_", "mcp_toolset", "tool_search_tool_")
"""Prefixes of the types of tools that the provider runs, or that work on images. The policy is not offered them."""


@with_keys(PROMPT_KEYS, "tools[].")
class ToolDefinition(TypedPart):
    """A tool that the agent runs. Tools that Anthropic runs have a `type`."""

    type: str | None = None
    name: ToolName | None = None
    description: Text | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None


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


@with_keys(PROMPT_KEYS, "output_config.")
class OutputConfig(Body):
    """The form of the answer."""

    format: OutputFormat | None = None


@with_keys(PROMPT_KEYS)
class PromptBody(Body):
    """The keys that make a prompt. Also the body of `POST /v1/messages/count_tokens`."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[TurnBody], Field(min_length=1)]
    system: Text | list[ContentBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: Any = None


@with_keys(MESSAGES_KEYS)
class MessagesBody(PromptBody, RequestBody):
    """A request. Keys of Anthropic's API that cannot be honoured are refused, never ignored."""

    max_tokens: Count
    stop_sequences: StopStrings | None = None
    temperature: Annotated[Temperature, Field(le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=0)] | None = None
    thread: dict[str, Any] | None = None
    """A request to store the history on the server. The error makes Anthropic's SDK send the history instead."""


# --- translation


def to_request(body: MessagesBody) -> CallRequest:
    """Returns the canonical request. Raises `InvalidRequest` for the first thing that cannot be honoured."""
    if body.thread is not None:
        why = " is not supported: the server stores no history, send all of it."
        raise refusal("thread", why, "thread_unsupported_request")
    conversation, notes = to_conversation(body)
    return replace(
        call_request(body, conversation, notes),
        max_tokens=body.max_tokens,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        constraint=_constraint(body, [tool["function"]["name"] for tool in conversation.tools]),
    )


def to_conversation(body: PromptBody) -> tuple[Conversation, list[str]]:
    """Returns the conversation of a request and the notes about it. Raises `InvalidRequest` like `to_request`."""
    notes = body.noted_keys()
    _refuse_edits(body.context_management)
    system = _text(body.system or "", "system", notes)
    messages = [Message("system", system)] if system else []
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{i}", notes)
    if body.messages[-1].role == "assistant":
        why = ": the last message is the assistant's, but a prefilled answer cannot be continued: end with a user "
        raise refusal(f"messages.{len(body.messages) - 1}", f"{why}message.")
    return Conversation(tuple(messages), tuple(_offered(body, notes))), notes


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


def _turn(turn: TurnBody, where: str, notes: list[str]) -> list[Message]:
    """Returns the messages of a turn. Each tool result of a user turn is a message, and so is the text around it."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    blocks = _checked(turn.content, f"{where}.content", ROLE_BLOCKS[turn.role], f"{turn.role} message", notes)
    if turn.role == "assistant":
        content = "".join(block.text or "" for block in blocks)
        reasoning = "".join(block.thinking or "" for block in blocks)
        uses = [block for block in blocks if block.type == "tool_use"]
        calls = (ToolCall(use.id or "", use.name or "", from_tool_input(use.input or {})) for use in uses)
        return [Message("assistant", content, reasoning, tuple(calls))]
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
            known = block.type in REQUIRED_KEYS
            why = f"does not belong into a {parent}" if known else "cannot be read: the policy reads text only"
            raise refusal(place, f" is of type {block.type!r}, which {why}.", "unsupported_content")
        notes += block.check_keys(place, REQUIRED_KEYS[block.type], OPTIONAL_KEYS.get(block.type, ()))
    return readable


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


def _offered(body: PromptBody, notes: list[str]) -> list[dict[str, Any]]:
    """Returns the tools that the policy is offered. Adds to `notes`."""
    offered = []
    choice = body.tool_choice.type if body.tool_choice is not None else "auto"
    for i, tool in enumerate(body.tools or () if choice != "none" else ()):
        kind, where = tool.type or "custom", f"tools.{i}"
        if kind.startswith(PROVIDER_TOOLS):
            notes.append(f"tool {kind} dropped")
            continue
        if kind != "custom":
            why = f" is of type {kind!r}: tools of Anthropic are not supported, define a tool with an input_schema."
            raise refusal(where, why)
        notes += tool.check_keys(where, ("name", "input_schema"), ("description", "strict"))
        offered.append(function_tool(tool.name, tool.description, tool.input_schema))
    return offered


def _constraint(body: MessagesBody, offered: Sequence[str]) -> Constraint:
    """Returns the constraint of `output_config.format`, `tool_choice` and strict tools."""
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


def to_answer(choices: Sequence[CallChunk], body: MessagesBody, head: AnswerHead) -> dict[str, Any]:
    """Returns the whole answer."""
    (last,) = choices
    message = call_of(last).response
    content: list[dict[str, Any]] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.tool_calls:  # Agents expect a text block, so an empty answer has an empty one.
        content.append({"type": "text", "text": message.content})
    content += map(_tool_use, message.tool_calls)
    return _answer(head, content, _end(last, body), last.num_prompt_tokens, len(call_of(last).completion))


async def to_events(chunks: Chunks, body: MessagesBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer: one block after the other, tool uses whole."""
    blocks = _Blocks()
    started = False
    async for chunk in chunks:
        if not started:
            started = True
            empty = _answer(head, [], {"stop_reason": None, "stop_sequence": None}, chunk.num_prompt_tokens, 0)
            yield _event({"type": "message_start", "message": empty})
        for event in blocks.add(chunk):
            yield _event(event)
        if chunk.call is not None:
            usage = _usage(chunk.num_prompt_tokens, len(chunk.call.completion))
            yield _event({"type": "message_delta", "delta": _end(chunk, body), "usage": usage})
    yield _event({"type": "message_stop"})


def _event(payload: dict[str, Any]) -> str:
    return sse(payload, name=payload["type"])


def _answer(
    head: AnswerHead, content: list[Any], end: dict[str, Any], num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        **end,
        "usage": _usage(num_prompt, num_sampled),
    }


def _usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    return {"input_tokens": num_prompt, "output_tokens": num_sampled}


class _Blocks:
    """The blocks of a streamed answer. At most one is open."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""
        self._has_text = False

    def add(self, chunk: CallChunk) -> Iterator[dict[str, Any]]:
        """Yields the events of a chunk. If the open block has another kind, a new block begins."""
        if chunk.reasoning:
            yield from self._append("thinking", chunk.reasoning, {"signature": ""})
        message = chunk.call.response if chunk.call is not None else None
        if chunk.text or (message is not None and not message.tool_calls and not self._has_text):
            self._has_text = True
            yield from self._append("text", chunk.text, {})
        if message is not None:
            for call in message.tool_calls:
                block = _tool_use(call)
                yield from self._begin({**block, "input": {}})
                written = json.dumps(block["input"]) if is_wrapped(block["input"]) else call.arguments
                yield self._delta("input_json_delta", "partial_json", written)
            yield from self._close()

    def _append(self, kind: str, text: str, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._begin({"type": kind, kind: "", **more})
        if text:
            yield self._delta(f"{kind}_delta", kind, text)

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": to_tool_input(call.arguments)}


def _end(last: CallChunk, body: MessagesBody) -> dict[str, Any]:
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
    """True if the input is wrapped text."""
    return value.keys() == {WRAPPER_KEY} and isinstance(value[WRAPPER_KEY], str)


def from_tool_input(value: dict[str, Any]) -> str:
    """Returns the JSON text of an input."""
    return str(value[WRAPPER_KEY]) if is_wrapped(value) else json.dumps(value, ensure_ascii=False)
