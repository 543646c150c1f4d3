"""The items of the Responses API, and the conversation that they are.

Messages are compared by meaning, as in chat completions. One answer comes back as several items. Its reasoning, text
and tool calls, in this order, become one assistant message again. The id of an item contains the id of its call:
`rs_<call>`, `msg_<call>`, `fc_<call>_<number>`, `ctc_<call>_<number>`. So two answers in a row stay two messages, and
references can be resolved.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from agentjet.errors import NotFound
from agentjet.server.dialects.dialect import CallLookup, TextPart, text_of
from agentjet.server.dialects.keys import Body, Text, refusal
from agentjet.server.dialects.responses_tools import from_custom_input, full_name
from agentjet.types import Message, ToolCall

Status = Literal["in_progress", "completed", "incomplete"]


class ItemPart(TextPart):
    """A part of a message's content or of a function's output, with the keys of all types of part."""

    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    refusal: str | None = None
    image_url: Any = None
    detail: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: Any = None


class ItemBody(Body):
    """An item, with the keys that have no effect in any type of item."""

    id: str | None = None
    status: Status | None = None
    metadata: Any = None


class MessageItem(ItemBody):
    """A message, in the short form or in the form of an answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ItemPart]
    phase: Any = None


class ToolItem(ItemBody):
    """A part of a tool call."""

    call_id: str
    namespace: Text | None = None
    caller: Any = None


class FunctionCallItem(ToolItem):
    """A function call of the policy; `arguments` is JSON text."""

    type: Literal["function_call"]
    name: str
    arguments: str


class CustomCallItem(ToolItem):
    """A call of a custom tool; `input` is text."""

    type: Literal["custom_tool_call"]
    name: str
    input: Text


class FunctionOutputItem(ToolItem):
    """The result of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[ItemPart]
    name: str | None = None


class ReasoningItem(ItemBody):
    """The reasoning of an answer, as the answers of this server have it."""

    type: Literal["reasoning"]
    content: list[ItemPart] | None = None
    encrypted_content: str | None = None
    """The same text, for agents that keep only this key. Read if `content` is empty."""
    summary: list[ItemPart] | None = None


class ItemReference(Body):
    """An item of an earlier answer of the episode."""

    type: Literal["item_reference"] | None = None
    id: str


def _kind(item: Any) -> str | None:
    """Returns the tag of an item. It is in brackets, and errors omit parts of a path in brackets."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if kind is None and isinstance(item, dict):
        kind = "message" if "role" in item else "item_reference"
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[FunctionOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="Input should be an item of type message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output, reasoning or item_reference",
    ),
]


# --- messages

CallItem = FunctionCallItem | CustomCallItem
AssistantItem = MessageItem | CallItem | ReasoningItem | ItemReference

_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")
_CALL_ID = re.compile(r"call_([0-9a-f]{12})_[0-9]+")


def item_id(item_type: str, call_id: str) -> str:
    """Returns the id of an item of the answer of a call."""
    return f"{_ID_PREFIXES[item_type]}_{call_id}"


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
                why = f" is of type {part.type!r}, not 'reasoning_text'."
                raise refusal(f"{where}.content.{i}", why, "unsupported_content")
        return "".join(part.text or "" for part in item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode(errors="surrogatepass")
    except ValueError:  # Not ASCII, not base64, or not UTF-8.
        raise refusal(f"{where}.encrypted_content", " was not made by this server.", "invalid_value") from None


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
