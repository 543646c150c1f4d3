"""Equality of messages and conversations *by meaning*.

Agents send their history through SDKs that rewrite it without changing its meaning: other spacing or key order in JSON
arguments, null for "", arguments that a tool's schema declares as defaults. Tool-call ids, names and the tools are part
of the meaning. The exception is the name that a framework adds to answers to distinguish its agents: the policy never
sampled it. Equality by meaning does not change tokens: the policy is given the recorded ones.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import ne
from types import MappingProxyType
from typing import Any

from agentjet.types import Conversation, Message, ToolCall

Schemas = Mapping[str, Any]
"""JSON schemas of arguments by function."""
REMEMBERED = 4
"""Number of earlier conversations that `Identities` compares with: an agent and sub-agents may take turns."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The keys of a conversation with n messages.

    `answers[i]` is `answer_key` of message i. `prefixes[i]` is the key of the conversation before message i;
    `prefixes[n]` is the key of all of it.
    """

    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    prefixes: tuple[str, ...]

    @property
    def key(self) -> str:
        """Hex digest of the conversation's meaning, including its tools."""
        return self.prefixes[-1]

    @property
    def tools(self) -> str:
        """The `tools_key` of the conversation."""
        return self.prefixes[0]

    def continues(self, other: Identity) -> bool:
        """True if this conversation begins with all of another one."""
        length = len(other.messages)
        return self.tools == other.tools and _num_common(other.messages, self.messages) == length


class Identities:
    """Computes identities of successive conversations.

    Agents send their whole history each time. So messages that a conversation shares with one of the last few that
    were kept are neither hashed nor stored again.
    """

    def __init__(self) -> None:
        self._last: list[Identity] = []

    def of(self, conversation: Conversation) -> Identity:
        """Returns the identity of a conversation. It does not depend on earlier conversations, and is not kept."""
        tools, schemas = tools_key(conversation.tools), schemas_of(conversation.tools)
        known, same = Identity((), (), (tools,)), 0
        for other in self._last:
            if other.tools == tools and (common := _num_common(other.messages, conversation.messages)) > same:
                known, same = other, common
        answers, prefixes = list(known.answers[:same]), list(known.prefixes[: same + 1])
        for message in conversation.messages[same:]:
            answers.append(answer_key(message, schemas))
            prefixes.append(_digest([prefixes[-1], answers[-1]]))
        return Identity(known.messages[:same] + conversation.messages[same:], tuple(answers), tuple(prefixes))

    def keep(self, asked: Identity) -> None:
        """Keeps a conversation for the next ones. One that only grew is stored once."""
        others = [other for other in self._last if not asked.continues(other)]
        self._last = [*others[1 - REMEMBERED :], asked]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Returns the schemas of the arguments in a tool list."""
    functions = (tool.get("function", {}) for tool in tools)
    return {function.get("name", ""): function.get("parameters") for function in functions}


def answer_key(message: Message, schemas: Schemas = MappingProxyType({})) -> str:
    """Returns a hex digest of a message's meaning, without the parts that agents change in an answer.

    Most agents drop the reasoning, some add a name, and some drop or add arguments that are defaults of `schemas`.
    """
    calls = [[call.id, call.name, _arguments(call, schemas.get(call.name))] for call in message.tool_calls]
    name = "" if message.role == "assistant" else message.name
    return _digest([message.role, message.content, calls, message.tool_call_id, name])


def raw_key(prompt: str | Sequence[int]) -> str:
    """Returns the hex digest of a raw prompt."""
    return _digest(["prompt", prompt])


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the hex digest of a tool list."""
    return _digest(["tools", *tools])


def context_hash(*stretches: Sequence[int], before: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Returns a hash of 16 bytes of a sequence of tokens, which continues `before`."""
    found = hashlib.blake2b(digest_size=16) if before is None else before.copy()
    for tokens in stretches:
        found.update(array("I", tokens))  # Packing signed integers takes four times as long.
    return found


def _num_common(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """Returns the length of the common prefix. Messages hold text only, so equal messages are the same."""
    return next(compress(count(), map(ne, known, messages)), min(len(known), len(messages)))


def _arguments(call: ToolCall, schema: Any) -> list[Any]:
    """Returns JSON arguments by value and others as text. The first item distinguishes the two."""
    try:
        value = _plain_numbers(call.value())
    except ValueError:
        return ["text", call.arguments]
    return ["json", _without_defaults(value, schema)]


def _without_defaults(value: Any, schema: Any) -> Any:
    """Returns a JSON value without the keys whose value is the default in the schema."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_without_defaults(item, schema.get("items")) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    return {
        key: _without_defaults(item, properties.get(key))
        for key, item in value.items()
        if not _is_default(item, properties.get(key))
    }


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    return _digest(value) == _digest(_plain_numbers(schema["default"]))  # In Python False equals 0.


def _plain_numbers(value: Any) -> Any:
    """Replaces 1.0 by 1, as JavaScript writes it."""
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
