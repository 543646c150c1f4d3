"""The items of a Responses request as messages: what a model said in one answer comes back in several items.

Reasoning, text and tool calls of one answer, in this order, are one assistant message again. Ids name the call they
come from (`rs_<call>`, `msg_<call>`, `fc_<call>_<number>`, `ctc_<call>_<number>`), so that two answers in a row stay
two, and references to items can be followed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentjet.errors import InvalidRequest, NotFound
from agentjet.server.dialects.bodies import text_of
from agentjet.server.dialects.dialect import Past
from agentjet.server.dialects.responses_bodies import (
    CustomCallItem,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    ItemPart,
    ItemReference,
    MessageItem,
    ReasoningItem,
)
from agentjet.server.dialects.responses_tools import called, to_arguments
from agentjet.types import Message, ToolCall

CallItem = FunctionCallItem | CustomCallItem

_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")
_CALL_ID = re.compile(r"call_([0-9a-f]{12})_[0-9]+")


def item_id(kind: str, call_id: str) -> str:
    """The id of an answer's item, by the call that the answer is."""
    return f"{kind}_{call_id}"


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for agents that keep nothing else of it. It is no secret from them."""
    return base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def to_messages(items: Sequence[Item], past: Past, notes: list[str]) -> list[Message]:
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
    item: MessageItem | CallItem | ReasoningItem | ItemReference, where: str, past: Past, notes: list[str]
) -> _Spoken:
    origin = _origin(item)
    if isinstance(item, ItemReference):
        return _Spoken(_recalled(item.id, where, past), origin)
    if isinstance(item, FunctionCallItem):
        call = ToolCall(item.call_id, called(item.namespace, item.name), item.arguments)
        return _Spoken(Message("assistant", tool_calls=(call,)), origin)
    if isinstance(item, CustomCallItem):
        call = ToolCall(item.call_id, called(item.namespace, item.name), to_arguments(item.input))
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


def _recalled(id_: str, where: str, past: Past) -> Message:
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
