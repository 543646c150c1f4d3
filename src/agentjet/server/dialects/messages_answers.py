"""How Anthropic's routes say what went wrong.

What is sampled as Anthropic's messages: blocks of thinking, text and tool uses, in this order, whole or streamed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

from pydantic import BaseModel

from agentjet.errors import ContextOverflow, RequestError
from agentjet.gateway.requests import CallChunk
from agentjet.server.dialects.dialect import AnswerHead, Chunks, ErrorShape, StreamEvent, sse
from agentjet.server.dialects.messages_requests import (
    MessageAnswer,
    MessagesBody,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    is_wrapped,
    to_tool_input,
)
from agentjet.types import Call, Message, ToolCall

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; the rest are `invalid_request_error` or, from 500 on, `api_error`."""


class AnthropicErrorDetails(BaseModel):
    """What Anthropic's SDKs act upon."""

    error_code: str


class AnthropicErrorBody(BaseModel):
    """What Anthropic's SDKs read. There is no place for the offending key: the message names it."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicError(BaseModel):
    """An error on a route of Anthropic's, also sent as the last event of a broken stream."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None = None


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    if isinstance(error, ContextOverflow):  # Claude Code reads both numbers to compact its history.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum - 1} maximum"
    elif error.code == ContextOverflow.code:
        message = f"prompt is too long: {error.message}"
    message = message.replace(".function.parameters", ".input_schema")  # What the grammar calls it in any dialect.
    details = AnthropicErrorDetails(error_code=error.code)
    return AnthropicError(error=AnthropicErrorBody(type=kind, message=message, details=details)).model_dump()


ANTHROPIC_ERRORS = ErrorShape(
    model=AnthropicError, body=anthropic_error, event=lambda error, num_sent: sse(anthropic_error(error), name="error")
)


SIGNATURE = "agentjet"
"""Of every thinking block. Not empty, because some SDKs drop blocks without one from the history."""


async def to_answer(chunks: Chunks, body: MessagesBody, head: AnswerHead) -> MessageAnswer:
    """The whole answer, once it has ended."""
    async for chunk in chunks:
        last = chunk
    assert last.call is not None, "the last chunk has the call"
    return MessageAnswer(
        id=f"msg_{head.id}",
        model=head.model,
        content=_content(last.call.response),
        **_end(last, last.call, body),
        usage=MessageUsage(input_tokens=last.num_prompt_tokens, output_tokens=len(last.call.completion)),
    )


async def to_events(chunks: Chunks, body: MessagesBody, head: AnswerHead) -> AsyncGenerator[StreamEvent]:
    """The events of a streamed answer: blocks come one after the other, tool uses whole."""
    blocks = _Blocks()
    started = False
    async for chunk in chunks:
        if not started:
            started = True
            empty = MessageUsage(input_tokens=chunk.num_prompt_tokens, output_tokens=0)
            message = MessageAnswer(id=f"msg_{head.id}", model=head.model, content=[], usage=empty)
            yield _event({"type": "message_start", "message": message.model_dump()})
        if chunk.reasoning:
            for event in blocks.more("thinking", chunk.reasoning):
                yield _event(event)
        if chunk.text:
            for event in blocks.more("text", chunk.text):
                yield _event(event)
        if chunk.call is None:
            continue
        for event in blocks.end(chunk.call.response):
            yield _event(event)
        usage = MessageUsage(input_tokens=chunk.num_prompt_tokens, output_tokens=len(chunk.call.completion))
        yield _event({"type": "message_delta", "delta": _end(chunk, chunk.call, body), "usage": usage.model_dump()})
    yield StreamEvent(sse({"type": "message_stop"}, name="message_stop"))


def _event(payload: dict[str, Any]) -> StreamEvent:
    return StreamEvent(sse(payload, name=payload["type"]))


class _Blocks:
    """The blocks of a streamed answer; at most one is open."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""
        self._has_text = False

    def more(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Text for the open block, or for a new one when that is of another kind."""
        if self._open != kind:
            yield from self._close()
            empty = ThinkingBlock(thinking="", signature="") if kind == "thinking" else TextBlock(text="")
            yield from self._start(kind, empty.model_dump())
        if text:
            yield self._delta(f"{kind}_delta", kind, text)

    def end(self, message: Message) -> Iterator[dict[str, Any]]:
        """What is left of an answer whose text has been given out."""
        if not (self._has_text or message.tool_calls):
            yield from self.more("text", "")
        for call in message.tool_calls:
            yield from self._close()
            block = _tool_use(call)
            yield from self._start("tool_use", {**block.model_dump(), "input": {}})
            written = json.dumps(block.input) if is_wrapped(block.input) else call.arguments
            yield self._delta("input_json_delta", "partial_json", written)
        yield from self._close()

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._index += 1
        self._open = kind
        self._has_text = self._has_text or kind == "text"
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""


def _content(message: Message) -> list[ThinkingBlock | TextBlock | ToolUseBlock]:
    """The blocks of an answer. One that is neither text nor tool uses says the empty text: agents look for one."""
    content: list[ThinkingBlock | TextBlock | ToolUseBlock] = []
    if message.reasoning:
        content.append(ThinkingBlock(thinking=message.reasoning, signature=SIGNATURE))
    if message.content or not message.tool_calls:
        content.append(TextBlock(text=message.content))
    return [*content, *map(_tool_use, message.tool_calls)]


def _tool_use(call: ToolCall) -> ToolUseBlock:
    return ToolUseBlock(id=call.id, name=call.name, input=to_tool_input(call.arguments))


def _end(chunk: CallChunk, call: Call, body: MessagesBody) -> dict[str, Any]:
    """Why an answer ended. One cut short of `max_tokens` had no room left in the context."""
    reason: StopReason = "end_turn"
    if call.finish_reason == "length":
        reason = "max_tokens" if len(call.completion) >= body.max_tokens else "model_context_window_exceeded"
    elif call.finish_reason == "tool_calls":
        reason = "tool_use"
    elif chunk.stop:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": chunk.stop if reason == "stop_sequence" else None}
