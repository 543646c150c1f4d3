"""Pinned here: which differences between two messages change their meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.timeline.tree import Identities, answer_key
from agentjet.types import MAX_NESTING, Conversation, Message, ToolCall


def conversation_key(conversation: Conversation) -> str:
    return Identities().of(conversation).key


def calling(arguments: str, *, id: str = "c1", name: str = "add") -> Message:
    return Message("assistant", tool_calls=(ToolCall(id, name, arguments),))


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1, "b": "x"}', '{"b":"x","a":1}', '{\n "a": 1.0,\n "b": "\\u0078"\n}'],
)
def test_json_equal_arguments_are_the_same(arguments: str) -> None:
    assert answer_key(calling(arguments)) == answer_key(calling('{"a":1,"b":"x"}'))


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
    ],
)
def test_everything_else_tells_messages_apart(other: Message) -> None:
    assert answer_key(other) != answer_key(calling('{"a": 1}'))


DEFAULTS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "edits": {"type": "array", "items": {"properties": {"times": {"default": 1}}}},
    },
}


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ('{"path": "x", "all": false}', True),
        ('{"all": false, "path": "x"}', True),
        ('{"path": "x", "all": true}', False),
        ('{"path": "x", "all": 0}', False),
        ('{"path": "x", "all": null}', False),
        ('{"path": "x", "some": false}', False),
    ],
)
def test_an_argument_that_says_the_declared_default_changes_nothing(written: str, same: bool) -> None:
    plain = calling('{"path": "x"}')
    assert (answer_key(calling(written), {"add": DEFAULTS}) == answer_key(plain, {"add": DEFAULTS})) is same
    assert answer_key(calling(written)) != answer_key(plain), "without a schema there are no defaults"
    tool = {"type": "function", "function": {"name": "add", "parameters": DEFAULTS}}
    keys = {conversation_key(Conversation((message,), (tool,))) for message in (plain, calling(written))}
    assert (len(keys) == 1) is same


def test_defaults_within_lists_and_objects() -> None:
    known = {"add": DEFAULTS}
    bare = answer_key(calling('{"edits": [{}, {"times": 2}]}'), known)
    assert answer_key(calling('{"edits": [{"times": 1.0}, {"times": 2}]}'), known) == bare
    assert answer_key(calling('{"edits": [{"times": 2}, {"times": 2}]}'), known) != bare
    assert answer_key(calling('{"times": 1}'), known) != answer_key(calling("{}"), known)


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert answer_key(calling('{"a": 1')) == answer_key(calling('{"a": 1'))
    assert answer_key(calling('{"a": 1')) != answer_key(calling('{"a":1'))
    assert answer_key(calling('"a"')) != answer_key(calling("a"))
    assert answer_key(calling("[" * 100_000)) != answer_key(calling("[" * 99_999))


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1])
def test_the_same_arguments_are_the_same_whoever_compares_them(depth: int) -> None:
    """The depth of Python's stack has no influence."""

    def deep_down(frames: int, text: str) -> str:
        return deep_down(frames - 1, text) if frames else answer_key(calling(text))

    for opening, closing in (("[", "]"), ('{"a":', "}")):
        text = opening * depth + "1" + closing * depth
        assert deep_down(300, text) == answer_key(calling(text))
        is_json = answer_key(calling(text)) == answer_key(calling(text.replace("1", " 1")))
        assert is_json == (depth <= MAX_NESTING)


def test_reasoning_belongs_to_a_message_but_not_to_its_answer() -> None:
    thought = Message("assistant", "4", reasoning="2+2")
    assert answer_key(thought) == answer_key(Message("assistant", "4"))
    assert answer_key(thought) != answer_key(Message("assistant", "5"))


def test_a_framework_may_name_an_answer_but_not_a_question() -> None:
    answer, question = Message("assistant", "4"), Message("user", "2+2?")
    assert answer_key(replace(answer, name="reckoner")) == answer_key(answer)
    assert answer_key(replace(question, name="alice")) != answer_key(question)


def test_a_conversation_is_its_messages_in_order_and_its_tools() -> None:
    a, b = Message("user", "a"), Message("user", "b")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": 1, "y": 2}}}
    same = {"function": {"parameters": {"y": 2, "x": 1}, "name": "f"}, "type": "function"}
    assert conversation_key(Conversation((a, b))) != conversation_key(Conversation((b, a)))
    assert conversation_key(Conversation((a,))) != conversation_key(Conversation((a,), (tool,)))
    assert conversation_key(Conversation((a,), (tool,))) == conversation_key(Conversation((a,), (same,)))
    assert conversation_key(Conversation((Message("user", "\ud83d"),)))  # half a surrogate pair has a key too


A, B, C = Message("user", "a"), Message("assistant", "b"), Message("user", "c")


def test_an_identity_has_the_keys_of_all_prefixes() -> None:
    tools = ({"type": "function"},)
    found = Identities().of(Conversation((A, B, C), tools))
    assert list(found.prefixes) == [conversation_key(Conversation((A, B, C)[:n], tools)) for n in range(4)]
    assert list(found.answers) == [answer_key(message) for message in (A, B, C)]
    assert len(set(found.prefixes)) == 4 and found.key == found.prefixes[-1]


CONVERSATIONS = [
    Conversation((A,)),
    Conversation((A, B, C)),
    Conversation((A, B)),
    Conversation((A, Message("assistant", "b", reasoning="r"), C)),
    Conversation((A, Message("assistant", "B"), C)),
    Conversation((C, B)),
    Conversation((A, B, C), ({"n": 1},)),
    Conversation((A, B, C), ({"n": True},)),  # equal to the one before, as Python compares
    Conversation((A, B, C, A, B, C)),
]


@given(asked=st.lists(st.sampled_from(CONVERSATIONS), max_size=12))
def test_what_came_before_changes_no_identity(asked: list[Conversation]) -> None:
    one = Identities()
    for conversation in asked:
        found = one.of(conversation)
        assert found == Identities().of(conversation)
        one.keep(found)


def test_what_a_conversation_begins_with_is_held_once() -> None:
    one = Identities()
    first = one.of(Conversation((Message("user", "a" * 2), B)))
    one.keep(first)
    second = one.of(Conversation((Message("user", "a" * 2), Message("assistant", "b"), C)))
    assert second.messages[0] is first.messages[0] and second.messages[1] is first.messages[1]
