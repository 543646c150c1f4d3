"""When two messages, or two conversations, are the same *by meaning*.

Agents send their history back through SDKs that rewrite it harmlessly: JSON arguments with other spacing or key order,
null for "", arguments that a tool's schema declares as
defaults. None of that makes a message another one. Tool-call ids, names and the tools are part of the meaning, but
for the name that a framework puts on answers to tell its agents apart: no policy ever says it. The leniency costs no
exactness: what the policy is fed are the recorded tokens.
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
"""JSON schemas of arguments, by function: those that declare defaults."""
REMEMBERED = 4
"""Conversations that `Identities` compares with: an agent and a few sub-agents may take turns."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A conversation by meaning: `answers[i]` is `answer_key` of message i, `prefixes[i]` the key of the conversation
    cut before message i. The last of the prefixes, one more than there are messages, is that of all of it.
    """

    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    prefixes: tuple[str, ...]

    @property
    def key(self) -> str:
        """Hex digest of the conversation's meaning, its tools included."""
        return self.prefixes[-1]

    @property
    def tools(self) -> str:
        """What `tools_key` gives."""
        return self.prefixes[0]


class Identities:
    """Identities of one conversation after the other. Agents send their whole history each time: what begins like one
    of the last few is compared with it and not hashed again, and shares its messages in memory.
    """

    def __init__(self) -> None:
        self._last: list[Identity] = []
        self._schemas: dict[str, Schemas] = {}

    def of(self, conversation: Conversation) -> Identity:
        """The identity of `conversation`, the same whatever came before."""
        tools = tools_key(conversation.tools)
        schemas = self.schemas(conversation.tools, tools)
        known, same = Identity((), (), (tools,)), 0
        for other in self._last:
            if other.tools == tools and (common := _num_common(other.messages, conversation.messages)) > same:
                known, same = other, common
        answers, prefixes = list(known.answers[:same]), list(known.prefixes[: same + 1])
        for message in conversation.messages[same:]:
            answers.append(answer_key(message, schemas))
            prefixes.append(_digest([prefixes[-1], answers[-1]]))
        found = Identity(known.messages[:same] + conversation.messages[same:], tuple(answers), tuple(prefixes))
        # One that only grew is held once.
        kept = [other for other in self._last if other is not known or same < len(known.messages)]
        self._last = [*kept[1 - REMEMBERED :], found]
        return found

    def schemas(self, tools: Sequence[Mapping[str, Any]], key: str) -> Schemas:
        """The schemas of a tool list that declare defaults, by function; `key` is its `tools_key`."""
        if key not in self._schemas:
            while len(self._schemas) >= REMEMBERED:
                del self._schemas[next(iter(self._schemas))]
            functions = (tool.get("function", {}) for tool in tools)
            found = {function.get("name", ""): function.get("parameters") for function in functions}
            self._schemas[key] = {name: schema for name, schema in found.items() if _declares_defaults(schema)}
        return self._schemas[key]


def answer_key(message: Message, schemas: Schemas = MappingProxyType({})) -> str:
    """Hex digest of a message's meaning without what an answer loses or gains on its way back: its reasoning, which
    most agents drop, the name that some give it, and arguments that say what `schemas` declare as defaults.
    """
    calls = [[call.id, call.name, _arguments(call, schemas.get(call.name))] for call in message.tool_calls]
    name = "" if message.role == "assistant" else message.name
    return _digest([message.role, message.content, calls, message.tool_call_id, name])


def raw_key(prompt: str | Sequence[int]) -> str:
    """Hex digest of a raw prompt."""
    return _digest(["prompt", prompt])


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Hex digest of a tool list."""
    return _digest(["tools", *tools])


class ContextHash:
    """Hash of a sequence of tokens. It may be continued, in time linear in the tokens that follow."""

    _hash: hashlib.blake2b

    def __init__(self, tokens: Sequence[int] = (), before: ContextHash | None = None) -> None:
        self._hash = hashlib.blake2b(digest_size=16) if before is None else before._hash.copy()
        self._hash.update(array("I", tokens))  # Signed ones are packed four times as slowly.

    def digest(self) -> bytes:
        return self._hash.digest()


def context_digest(*stretches: Sequence[int]) -> bytes:
    """16 bytes that name a sequence of tokens, given in one stretch or several."""
    found = ContextHash()
    for tokens in stretches:
        found = ContextHash(tokens, found)
    return found.digest()


def _num_common(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """How many messages both begin with. Messages hold text only, so those that compare equal are the same."""
    return next(compress(count(), map(ne, known, messages)), min(len(known), len(messages)))


def _arguments(call: ToolCall, schema: Any) -> list[Any]:
    """JSON by value, anything else as it stands; the first item keeps the two apart."""
    try:
        value = _plain_numbers(call.value())
    except ValueError:
        return ["text", call.arguments]
    return ["json", value if schema is None else _without_defaults(value, schema)]


def _without_defaults(value: Any, schema: Any) -> Any:
    """A JSON value without the keys that say what the schema declares as their default."""
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


def _declares_defaults(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    properties = schema.get("properties")
    inner = [schema.get("items"), *(properties.values() if isinstance(properties, Mapping) else ())]
    return any(isinstance(one, Mapping) and ("default" in one or _declares_defaults(one)) for one in inner)


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
