"""Pinned here: what makes two messages the same by meaning, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentjet.timeline import conversation_key, message_key
from agentjet.timeline.identity import answer_key, prefix_keys
from agentjet.types import Conversation, Message, ToolCall


def calling(arguments: str, *, id: str = "c1", name: str = "add") -> Message:
    return Message("assistant", tool_calls=(ToolCall(id, name, arguments),))


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1, "b": "x"}', '{"b":"x","a":1}', '{\n "a": 1.0,\n "b": "\\u0078"\n}'],
)
def test_json_equal_arguments_are_the_same(arguments: str) -> None:
    assert message_key(calling(arguments)) == message_key(calling('{"a":1,"b":"x"}'))


@pytest.mark.parametrize(
    "other",
    [
        calling('{"a": 2}'),
        calling('{"a": "1"}'),
        calling('{"a": true}'),
        calling('{"a": [1]}'),
        calling('{"a": 1}', id="c2"),
        calling('{"a": 1}', name="sub"),
        replace(calling('{"a": 1}'), content="so"),
        replace(calling('{"a": 1}'), role="tool"),
        replace(calling('{"a": 1}'), tool_call_id="c1"),
        replace(calling('{"a": 1}'), name="x"),
        replace(calling('{"a": 1}'), reasoning="hm"),
    ],
)
def test_everything_else_tells_messages_apart(other: Message) -> None:
    assert message_key(other) != message_key(calling('{"a": 1}'))


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert message_key(calling('{"a": 1')) == message_key(calling('{"a": 1'))
    assert message_key(calling('{"a": 1')) != message_key(calling('{"a":1'))
    assert message_key(calling('"a"')) != message_key(calling("a"))
    assert message_key(calling("[" * 100_000)) != message_key(calling("[" * 99_999))


def test_reasoning_belongs_to_a_message_but_not_to_its_answer() -> None:
    thought = Message("assistant", "4", reasoning="2+2")
    assert answer_key(thought) == answer_key(Message("assistant", "4"))
    assert answer_key(thought) != answer_key(Message("assistant", "5"))


def test_a_conversation_is_its_messages_in_order_and_its_tools() -> None:
    a, b = Message("user", "a"), Message("user", "b")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1, "y": 2}}}
    same = {"function": {"parameters": {"y": 2, "x": 1}, "name": "f"}, "type": "function"}
    assert conversation_key(Conversation((a, b))) != conversation_key(Conversation((b, a)))
    assert conversation_key(Conversation((a,))) != conversation_key(Conversation((a,), (tool,)))
    assert conversation_key(Conversation((a,), (tool,))) == conversation_key(Conversation((a,), (same,)))
    assert conversation_key(Conversation((Message("user", "\ud83d"),)))  # half a surrogate pair has a key too


def test_prefix_keys_are_the_keys_of_the_prefixes() -> None:
    messages = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    tools = ({"type": "function"},)
    keys = list(prefix_keys(Conversation(messages, tools)))
    assert keys == [conversation_key(Conversation(messages[:n], tools)) for n in range(4)]
    assert len(set(keys)) == 4
