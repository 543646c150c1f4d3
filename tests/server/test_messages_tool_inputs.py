"""Any sampled arguments become an input and come back with the same meaning."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from agentjet.server.dialects.messages import from_tool_input, is_wrapped, to_tool_input
from agentjet.timeline.identity import answer_key
from agentjet.types import Message, ToolCall

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(max_size=5) | st.just("INVALID_JSON")


def meaning(arguments: str) -> str:
    return answer_key(Message("assistant", tool_calls=(ToolCall("id", "name", arguments),)))


@given(value=st.dictionaries(KEYS, VALUES, max_size=3), indent=st.none() | st.just(2))
def test_there_and_back(value: dict[str, Any], indent: int | None) -> None:
    arguments = json.dumps(value, indent=indent)
    carried = json.loads(to_json({"input": to_tool_input(arguments)}))["input"]
    assert meaning(from_tool_input(carried)) == meaning(arguments)


def test_what_any_reader_takes_is_not_wrapped() -> None:
    assert to_tool_input('{"a": {"b": [1, 2.5, null, "é"]}}') == {"a": {"b": [1, 2.5, None, "é"]}}
    for odd in ('{"a": NaN}', '{"a": 1e400}', '{"a": "\\ud800"}', '{"a": ' + "[" * 300 + "]" * 300 + "}"):
        assert to_tool_input(odd) == {"INVALID_JSON": odd} and is_wrapped(to_tool_input(odd))
