"""Anthropic's Messages API: bodies to canonical requests, chunks to messages and events.

Equality of messages is by meaning: a tool's input is the value of the arguments that were sampled, text blocks are
joined, results of tools become messages of their own, in the order they stand in. The answer is thinking, text and
tool uses, in this order; sent back, it is recognised as what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic_core import from_json, to_json

from agentjet.errors import InvalidRequest
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.server.dialects.dialect import Chunks, Dialect, Event, Head, sse
from agentjet.server.dialects.messages_bodies import (
    ALLOWED,
    BLOCKS,
    NEUTRAL,
    TOOL,
    Block,
    CountBody,
    Keys,
    MessageAnswer,
    MessagesBody,
    Open,
    StopReason,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolUseBlock,
    TurnBody,
    Usage,
)
from agentjet.server.dialects.messages_errors import ANTHROPIC
from agentjet.types import Call, Conversation, Message, ToolCall

SIGNATURE = "agentjet"
"""Of every thinking block. Not empty, because some SDKs drop blocks without one from the history."""
INVALID_JSON = "INVALID_JSON"


def to_request(body: MessagesBody) -> CallRequest:
    """The canonical request. Raises `InvalidRequest` naming the first thing that cannot be honoured."""
    return CallRequest(
        conversation=to_conversation(body),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        reasoning=body.thinking is None or body.thinking.type != "disabled",
    )


def to_conversation(body: CountBody) -> Conversation:
    """What the model reads of a request. Raises `InvalidRequest` like `to_request`."""
    _refuse_what_is_not_honoured(body)
    messages = [Message("system", system)] if (system := _text(body.system or "", "system")) else []
    for i, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{i}")
    if body.messages[-1].role == "assistant":
        where = f"messages.{len(body.messages) - 1}"
        raise InvalidRequest(
            f"{where}: the last message is the assistant's, and a prefilled answer cannot be continued: end with a "
            "user message.",
            code="unsupported_parameter",
            param=where,
        )
    offered = () if body.tool_choice is not None and body.tool_choice.type == "none" else body.tools or ()
    return Conversation(tuple(messages), tuple(_tool(tool, f"tools.{i}") for i, tool in enumerate(offered)))


async def to_answer(chunks: Chunks, body: MessagesBody, head: Head) -> MessageAnswer:
    """The whole answer, once it has ended."""
    async for chunk in chunks:
        last = chunk
    assert last.call is not None, "the last chunk has the call"
    return MessageAnswer(
        id=f"msg_{head.id}",
        model=head.model,
        content=_content(last.call.response),
        **_end(last, last.call, body),
        usage=Usage(input_tokens=last.num_prompt_tokens, output_tokens=len(last.call.completion)),
    )


async def to_events(chunks: Chunks, body: MessagesBody, head: Head) -> AsyncGenerator[Event]:
    """The events of a streamed answer: blocks come one after the other, tool uses whole."""
    blocks = _Blocks()
    started = False
    async for chunk in chunks:
        if not started:
            started = True
            empty = Usage(input_tokens=chunk.num_prompt_tokens, output_tokens=0)
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
        usage = Usage(input_tokens=chunk.num_prompt_tokens, output_tokens=len(chunk.call.completion))
        yield _event({"type": "message_delta", "delta": _end(chunk, chunk.call, body), "usage": usage.model_dump()})
    yield Event(sse({"type": "message_stop"}, name="message_stop"), is_last=True)


def _event(payload: dict[str, Any]) -> Event:
    return Event(sse(payload, name=payload["type"]))


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
            written = json.dumps(block.input) if _is_wrapped(block.input) else call.arguments
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


def _refuse_what_is_not_honoured(body: CountBody) -> None:
    for name, neutral in NEUTRAL.items():
        _refuse_unless_neutral(getattr(body, name, None), neutral, name)
    choice, thinking = body.tool_choice, body.thinking
    if choice is not None and choice.type in ("any", "tool"):
        raise _unsupported("tool_choice", choice.type, "use 'auto' or 'none'")
    if choice is not None and choice.disable_parallel_tool_use:
        raise _unsupported("tool_choice.disable_parallel_tool_use", True, "leave it out")
    if thinking is not None and thinking.type in ("enabled", "between_tools"):
        raise _unsupported(
            "thinking", thinking.type, "use 'adaptive': the policy alone decides when and how much it thinks"
        )


def _refuse_unless_neutral(value: Any, neutral: Sequence[Any], where: str) -> None:
    if value is None or value in neutral:
        return
    way_out = f"leave it out or use {' or '.join(repr(v) for v in neutral)}" if neutral else "leave it out"
    raise _unsupported(where, value, way_out)


def _unsupported(where: str, value: Any, way_out: str) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequest(f"{where} = {shown} is not supported: {way_out}.", code="unsupported_parameter", param=where)


def _check_keys(part: Open, keys: Keys, where: str) -> None:
    """Raises `InvalidRequest` for a key that is missing, unknown, or asks for what cannot be had."""
    given = {name for name in part.model_fields_set if getattr(part, name) is not None} - {"type", "cache_control"}
    for name in keys.required:
        if name not in given:
            raise InvalidRequest(f"{where}.{name} is missing.", code="invalid_value", param=f"{where}.{name}")
    for name in sorted(given - {*keys.required, *keys.optional}):
        place = f"{where}.{name}"
        if name in keys.neutral:
            _refuse_unless_neutral(getattr(part, name), keys.neutral[name], place)
            continue
        near = get_close_matches(name, [*keys.required, *keys.optional, *keys.neutral, "cache_control"], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise InvalidRequest(f"{place!r} is not a key this server knows{hint}", code="unknown_parameter", param=place)


def _turn(turn: TurnBody, where: str) -> list[Message]:
    """The messages that a turn is: a user's may hold results of tools, each a message, and text around them."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    blocks = turn.content
    for i, block in enumerate(blocks):
        _check_block(block, f"{where}.content.{i}", ALLOWED[turn.role], f"{turn.role} message")
    if turn.role == "assistant":
        return [_answer(blocks, where)]
    if not blocks:
        raise InvalidRequest(
            f"{where}.content is empty: only an assistant message may have no content.", param=f"{where}.content"
        )
    messages: list[Message] = []
    after_text = False
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            messages.append(_result(block, f"{where}.content.{i}"))
        elif after_text:
            messages[-1] = Message(turn.role, messages[-1].content + (block.text or ""))
        else:
            messages.append(Message(turn.role, block.text or ""))
        after_text = block.type == "text"
    return messages


def _check_block(block: Block, where: str, allowed: Sequence[str], parent: str) -> None:
    if block.type in allowed:
        _check_keys(block, BLOCKS[block.type], where)
        return
    why = f"does not belong into a {parent}" if block.type in BLOCKS else "cannot be heard: the policy reads text only"
    raise InvalidRequest(f"{where} is of type {block.type!r}, which {why}.", code="unsupported_content", param=where)


def _answer(blocks: Sequence[Block], where: str) -> Message:
    return Message(
        "assistant",
        content="".join(block.text or "" for block in blocks),
        reasoning="".join(block.thinking or "" for block in blocks),
        tool_calls=tuple(
            ToolCall(block.id or "", block.name or "", _arguments(block.input or {}, f"{where}.content.{i}.input"))
            for i, block in enumerate(blocks)
            if block.type == "tool_use"
        ),
    )


def _result(block: Block, where: str) -> Message:
    """What a tool said. Templates have no place for `is_error`: it is put into words, unless the tool did so."""
    text = _text(block.content or "", f"{where}.content")
    if block.is_error and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=block.tool_use_id or "")


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        _check_block(block, f"{where}.{i}", ("text",), where.rpartition(".")[2])
    return "".join(block.text or "" for block in content)


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {tool.type!r}: Anthropic's own tools are not known here, define one with an "
            "input_schema.",
            code="unsupported_parameter",
            param=where,
        )
    _check_keys(tool, TOOL, where)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _content(message: Message) -> list[ThinkingBlock | TextBlock | ToolUseBlock]:
    """The blocks of an answer. One that is neither text nor tool uses says the empty text: agents look for one."""
    content: list[ThinkingBlock | TextBlock | ToolUseBlock] = []
    if message.reasoning:
        content.append(ThinkingBlock(thinking=message.reasoning, signature=SIGNATURE))
    if message.content or not message.tool_calls:
        content.append(TextBlock(text=message.content))
    return [*content, *map(_tool_use, message.tool_calls)]


def _tool_use(call: ToolCall) -> ToolUseBlock:
    try:
        value = from_json(call.arguments, allow_inf_nan=False)
        from_json(to_json(value), allow_inf_nan=False)  # 1e400 is read as infinity, which no JSON can carry.
    except ValueError:
        value = None
    if value is None or _is_wrapped(value):
        value = {INVALID_JSON: call.arguments}
    return ToolUseBlock(id=call.id, name=call.name, input=value)


def _is_wrapped(value: dict[str, Any]) -> bool:
    return value.keys() == {INVALID_JSON} and isinstance(value[INVALID_JSON], str)


def _arguments(value: dict[str, Any], where: str) -> str:
    """JSON text of a tool's input: what was sampled, by meaning."""
    if _is_wrapped(value):
        return str(value[INVALID_JSON])
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{where} is no JSON: it holds NaN or infinity, or nests too deep.", code="invalid_value", param=where
        ) from None


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


DIALECT = Dialect(
    path="/v1/messages",
    answer=MessageAnswer,
    errors=ANTHROPIC,
    to_request=lambda body, past: to_request(body),
    to_answer=to_answer,
    to_events=to_events,
)
