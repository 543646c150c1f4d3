"""When two messages, or two conversations, are the same *by meaning*.

Agents send their history back through SDKs that rewrite it harmlessly: JSON arguments with other spacing or key order,
null for "". None of that makes a message another one. Tool-call ids, names and the tools are part of the meaning. The
leniency costs no exactness: what the policy is fed are the recorded tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjet.types import Conversation, Message


def message_key(message: Message) -> str:
    """Hex digest of a message's meaning."""
    return _digest([answer_key(message), message.reasoning])


def answer_key(message: Message) -> str:
    """Hex digest of a message's meaning without its reasoning, which most agents do not send back."""
    calls = [[call.id, call.name, _arguments(call.arguments)] for call in message.tool_calls]
    return _digest([message.role, message.content, calls, message.tool_call_id, message.name])


def conversation_key(conversation: Conversation) -> str:
    """Hex digest of a conversation's meaning, its tools included."""
    *_, key = prefix_keys(conversation)
    return key


def prefix_keys(conversation: Conversation) -> Iterator[str]:
    """Keys of the conversation cut before message 0, 1, ..., and at last of all of it: `len(messages) + 1` of them."""
    key = tools_key(conversation.tools)
    yield key
    for message in conversation.messages:
        key = _digest([key, answer_key(message)])
        yield key


def raw_key(prompt: str | Sequence[int]) -> str:
    """Hex digest of a raw prompt."""
    return _digest(["prompt", prompt])


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Hex digest of a tool list."""
    return _digest(["tools", *tools])


def context_digest(tokens: Sequence[int]) -> bytes:
    """16 bytes that name a sequence of tokens."""
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()


def _arguments(text: str) -> list[Any]:
    """JSON by value, anything else as it stands; the first item keeps the two apart."""
    try:
        return ["json", _plain_numbers(json.loads(text))]
    except (ValueError, RecursionError):
        return ["text", text]


def _plain_numbers(value: Any) -> Any:
    """1.0 becomes 1, as JavaScript writes it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    return value


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
