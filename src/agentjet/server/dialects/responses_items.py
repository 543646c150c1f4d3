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
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentjet.errors import NotFound
from agentjet.server.dialects.dialect import CallLookup, ContentPart, text_of
from agentjet.server.dialects.keys import Body, Items, Text, refusal
from agentjet.server.dialects.responses_tools import from_custom_input, full_name
from agentjet.types import Message, ToolCall


class ItemPart(ContentPart):
    """A part of a message, of reasoning or of a function's output. All keys but the text are ignored."""

    place = "input[].content[]."
    keys_of_kind: ClassVar = dict.fromkeys(
        ("input_text", "output_text", "reasoning_text"), "text annotations? logprobs? prompt_cache_breakpoint?"
    )


_IGNORED = "id? status? metadata?"
_CALL = f"call_id name namespace? caller? {_IGNORED}"
_OUTPUT = f"call_id output name? namespace? caller? {_IGNORED}"


class Item(Body):
    """An item. A message may have no type, and neither may a reference."""

    place = "input[]."
    keys_of_kind: ClassVar = {
        "message": f"role content phase? {_IGNORED}",
        "function_call": f"arguments {_CALL}",
        "custom_tool_call": f"input {_CALL}",
        "function_call_output": _OUTPUT,
        "custom_tool_call_output": _OUTPUT,
        "reasoning": f"content? encrypted_content? summary? {_IGNORED}",
        "item_reference": "id",
    }
    unknown_kind = "the server runs no tools, leave out their items."
    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Items[ItemPart] | None = None
    id: str | None = None
    call_id: Annotated[str, Field(min_length=1)] | None = None
    name: str | None = None
    namespace: Text | None = None
    arguments: str | None = None
    """JSON text."""
    input: Text | None = None
    """The text of a call of a custom tool."""
    output: str | Items[ItemPart] | None = None
    encrypted_content: str | None = None
    """The text of reasoning, for agents that keep only this key. Read if `content` is empty."""

    @property
    def kind(self) -> str:
        return self.type or ("message" if self.role else "item_reference")


# --- messages

_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_([0-9]{1,4}))?")
_CALL_ID = re.compile(r"call_([0-9a-f]{12})_[0-9]+")


def item_id(item_type: str, call_id: str) -> str:
    """Returns the id of an item of the answer of a call."""
    return f"{_ID_PREFIXES[item_type]}_{call_id}"


def encode_reasoning(reasoning: str) -> str:
    """Returns reasoning as `encrypted_content`, for agents that keep only this key. It is not secret."""
    return base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def to_messages(items: Sequence[Item], lookup_call: CallLookup) -> list[Message]:
    """Returns the messages of the items. Raises `InvalidRequest` or `NotFound` with the place of the item."""
    messages: list[Message] = []
    last, last_call = Message("assistant"), ""
    for i, item in enumerate(items):
        if item.kind.endswith("_output"):
            messages.append(Message("tool", text_of(item.output), tool_call_id=item.call_id or ""))
        elif item.kind == "message" and item.role != "assistant":
            role = "user" if item.role == "user" else "system"  # `developer` is `system`.
            messages.append(Message(role, text_of(item.content)))
        else:
            part, call = _assistant(item, f"input.{i}", lookup_call), _call_prefix(item)
            at = _turn_of(messages, (last, last_call), (part, call))
            if at is None:
                messages.append(part)
            else:
                messages[at] = _joined(messages[at], part)
            last, last_call = part, call
    return messages


def _assistant(item: Item, where: str, lookup_call: CallLookup) -> Message:
    """Returns the message of an item of the assistant, with this item only."""
    if item.kind == "item_reference":
        return _referenced(item.id or "", where, lookup_call)
    if item.kind == "reasoning":
        return Message("assistant", reasoning=text_of(item.content) or _decode_reasoning(item, where))
    if item.kind == "message":
        return Message("assistant", text_of(item.content))
    arguments = from_custom_input(item.input or "") if item.kind == "custom_tool_call" else item.arguments or ""
    return Message(
        "assistant", tool_calls=(ToolCall(item.call_id or "", full_name(item.namespace, item.name or ""), arguments),)
    )


def _call_prefix(item: Item) -> str:
    """Returns the first digits of the id of the call that an item is of; empty if the item does not have them."""
    found = _ID.fullmatch(item.id or "") or _CALL_ID.fullmatch(item.call_id or "")
    return found[1][:12] if found else ""


def _turn_of(messages: Sequence[Message], last: tuple[Message, str], part: tuple[Message, str]) -> int | None:
    """Returns the index of the assistant message that a part belongs to; None if it begins a new message.

    A part is a message with one item, and the `_call_prefix` of that item; `last` is the part before it. Some agents
    put each function's output directly behind its call, although one answer had all calls.
    """
    results = next((i for i, message in enumerate(reversed(messages)) if message.role != "tool"), len(messages))
    at = len(messages) - 1 - results
    if at < 0 or messages[at].role != "assistant":
        return None
    same_call = last[1] == part[1] != ""
    unknown = not (last[1] and part[1])
    stage, last_stage = _stage(part[0]), _stage(last[0])
    if results:
        return at if same_call and stage == 2 else None
    in_order = stage > last_stage or stage == last_stage == 2
    return at if in_order and (same_call or unknown) else None


def _stage(part: Message) -> int:
    """Returns the position of an item in its answer: reasoning, text, tool calls."""
    return 2 if part.tool_calls else 0 if part.reasoning else 1


def _joined(turn: Message, part: Message) -> Message:
    return replace(
        turn,
        content=turn.content + part.content,
        reasoning=turn.reasoning + part.reasoning,
        tool_calls=turn.tool_calls + part.tool_calls,
    )


def _decode_reasoning(item: Item, where: str) -> str:
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
