"""The answers, events and errors of Anthropic's Messages API.

An answer has blocks of thinking, text and tool uses, in this order.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

from pydantic import BaseModel

from agentjet.errors import ContextOverflow, RequestError
from agentjet.gateway.requests import CallChunk
from agentjet.server.dialects.dialect import AnswerHead, Chunks, ErrorShape, call_of, collect, sse
from agentjet.server.dialects.messages_requests import MessagesBody, is_wrapped, to_tool_input
from agentjet.types import Message, ToolCall

SIGNATURE = "agentjet"
"""The signature of every thinking block. Some SDKs drop blocks with an empty one from the history."""


class TextBlock(BaseModel):
    """The text of an answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """The reasoning of an answer. The signature is a constant that is never checked."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    """A tool call. Arguments that JSON cannot carry safely (half a surrogate pair, for example) have the form
    `{"INVALID_JSON": "<as sampled>"}`, which Anthropic proposes.
    """

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """Numbers of tokens as the policy saw and sampled them."""

    input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
AnswerBlock = ThinkingBlock | TextBlock | ToolUseBlock


class MessageAnswer(BaseModel):
    """The answer to a request that does not stream. A stream begins with an empty one."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int


async def to_answer(chunks: Chunks, body: MessagesBody, head: AnswerHead) -> MessageAnswer:
    """Returns the whole answer, after it has ended."""
    (last,) = await collect(chunks)
    return MessageAnswer(
        id=f"msg_{head.id}",
        model=head.model,
        content=_content(call_of(last).response),
        **_end(last, body),
        usage=_usage(last),
    )


async def to_events(chunks: Chunks, body: MessagesBody, head: AnswerHead) -> AsyncGenerator[str]:
    """Yields the events of a streamed answer: one block after the other, tool uses whole."""
    blocks = _Blocks()
    started = False
    async for chunk in chunks:
        if not started:
            started = True
            empty = MessageUsage(input_tokens=chunk.num_prompt_tokens, output_tokens=0)
            message = MessageAnswer(id=f"msg_{head.id}", model=head.model, content=[], usage=empty)
            yield _event({"type": "message_start", "message": message.model_dump()})
        if chunk.reasoning:
            for event in blocks.add("thinking", chunk.reasoning):
                yield _event(event)
        if chunk.text:
            for event in blocks.add("text", chunk.text):
                yield _event(event)
        if chunk.call is not None:
            for event in blocks.finish(chunk.call.response):
                yield _event(event)
            usage = _usage(chunk).model_dump()
            yield _event({"type": "message_delta", "delta": _end(chunk, body), "usage": usage})
    yield _event({"type": "message_stop"})


def _event(payload: dict[str, Any]) -> str:
    return sse(payload, name=payload["type"])


class _Blocks:
    """The blocks of a streamed answer. At most one is open."""

    def __init__(self) -> None:
        self._index = -1
        self._open = ""
        self._has_text = False

    def add(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Yields the events that append text. If the open block has another kind, a new block begins."""
        if self._open != kind:
            yield from self._close()
            empty = ThinkingBlock(thinking="", signature="") if kind == "thinking" else TextBlock(text="")
            yield self._start(empty)
        if text:
            yield self._delta(f"{kind}_delta", kind, text)

    def finish(self, message: Message) -> Iterator[dict[str, Any]]:
        """Yields the remaining events of an answer, whose text was streamed."""
        if not (self._has_text or message.tool_calls):
            yield from self.add("text", "")
        for call in message.tool_calls:
            yield from self._close()
            block = _tool_use(call)
            yield self._start(block.model_copy(update={"input": {}}))
            written = json.dumps(block.input) if is_wrapped(block.input) else call.arguments
            yield self._delta("input_json_delta", "partial_json", written)
        yield from self._close()

    def _start(self, block: AnswerBlock) -> dict[str, Any]:
        self._index += 1
        self._open = block.type
        self._has_text = self._has_text or block.type == "text"
        return {"type": "content_block_start", "index": self._index, "content_block": block.model_dump()}

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", SIGNATURE)
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""


def _content(message: Message) -> list[AnswerBlock]:
    """Returns the blocks of an answer. Agents expect a text block, so an answer without blocks gets an empty one."""
    content: list[AnswerBlock] = []
    if message.reasoning:
        content.append(ThinkingBlock(thinking=message.reasoning, signature=SIGNATURE))
    if message.content or not message.tool_calls:
        content.append(TextBlock(text=message.content))
    return [*content, *map(_tool_use, message.tool_calls)]


def _tool_use(call: ToolCall) -> ToolUseBlock:
    return ToolUseBlock(id=call.id, name=call.name, input=to_tool_input(call.arguments))


def _usage(last: CallChunk) -> MessageUsage:
    return MessageUsage(input_tokens=last.num_prompt_tokens, output_tokens=len(call_of(last).completion))


def _end(last: CallChunk, body: MessagesBody) -> dict[str, Any]:
    """Returns the reason why an answer ended.

    If it was cut before `max_tokens`, the context was full.
    """
    call = call_of(last)
    reason: StopReason = "end_turn"
    if call.finish_reason == "length":
        reason = "max_tokens" if len(call.completion) >= body.max_tokens else "model_context_window_exceeded"
    elif call.finish_reason == "tool_calls":
        reason = "tool_use"
    elif last.stop:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop if reason == "stop_sequence" else None}


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


class AnthropicErrorDetails(BaseModel):
    """The error fields that Anthropic's SDKs decide by."""

    error_code: str


class AnthropicErrorBody(BaseModel):
    """The error fields that Anthropic's SDKs read. The message names the key, because no field does."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicError(BaseModel):
    """An error on a route of Anthropic's API. Also the last event of a stream that failed."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None = None


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error."""
    kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    if isinstance(error, ContextOverflow):  # Claude Code reads both numbers to compact its history.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum - 1} maximum"
    elif error.code == ContextOverflow.code:
        message = f"prompt is too long: {error.message}"
    message = message.replace(".function.parameters", ".input_schema")  # The grammar uses OpenAI's name.
    details = AnthropicErrorDetails(error_code=error.code)
    return AnthropicError(error=AnthropicErrorBody(type=kind, message=message, details=details)).model_dump()


ANTHROPIC_ERRORS = ErrorShape(
    model=AnthropicError, body=anthropic_error, event=lambda error, num_sent: sse(anthropic_error(error), name="error")
)
