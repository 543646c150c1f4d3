"""Tool calls and reasoning in completions. Malformed text stays content, whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.rendering.formats import THINK, TOOL_FORMATS, parse_completion
from agentjet.types import Message, ToolCall


def parse(text: str, tool_format: str = "hermes", *, reasons: bool = False, in_reasoning: bool = False) -> Message:
    reasoning = THINK if reasons else None
    return parse_completion(
        text, reasoning=reasoning, in_reasoning=in_reasoning, tool_format=tool_format, id_prefix="c"
    )


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", 'so\n<tool_call>\n{"name": "add", "arguments": {"a":1,  "b": "é"}}\n</tool_call>'),
        ("hermes", 'so <tool_call>{"arguments": {"a":1,  "b": "é"}, "name": "add"}'),
        ("hermes", 'so <tool_call>[{"name": "add", "arguments": "{\\"a\\":1,  \\"b\\": \\"é\\"}"}]</tool_call>'),
        ("mistral", 'so [TOOL_CALLS]{"name": "add", "arguments": {"a":1,  "b": "é"}}'),
    ],
)
def test_a_tool_call_keeps_its_arguments_as_written(tool_format: str, text: str) -> None:
    expected = ToolCall("c_0", "add", '{"a":1,  "b": "é"}')
    assert parse(text, tool_format) == Message("assistant", "so", tool_calls=(expected,))


def test_llama3_writes_a_bare_object() -> None:
    answer = parse('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "llama3")
    assert answer == Message("assistant", tool_calls=(ToolCall("c_0", "add", '{"a": 1}'),))


def test_several_calls_are_numbered_and_broken_ones_stay() -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'
    answer = parse(f"{good} <tool_call>broken</tool_call> {good}")
    assert [(call.id, call.name, call.arguments) for call in answer.tool_calls] == [
        ("c_0", "f", "{}"),
        ("c_1", "f", "{}"),
    ]
    assert answer.content == "<tool_call>broken</tool_call>"
    both = parse('[TOOL_CALLS][{"name": "f"}, {"name": "g", "arguments": {"x": [1]}}]', "mistral")
    assert [(call.name, call.arguments) for call in both.tool_calls] == [("f", "{}"), ("g", '{"x": [1]}')]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", '<tool_call>{"name": "f\\ud800"}</tool_call>'),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": "\\ud800"}}]</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
    ],
)
def test_half_a_surrogate_pair_is_no_name_and_no_argument(tool_format: str, text: str) -> None:
    """Neither can be sent to the agent. Arguments in their original text keep the escape, and can."""
    assert parse(text, tool_format) == Message("assistant", text)
    (call,) = parse('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>').tool_calls
    assert call.arguments == '{"a": "\\ud800"}'


def test_a_value_that_looks_like_the_arguments_does_not_mislead() -> None:
    text = '<tool_call>{"name": "f", "x": {"arguments": {"a": 2}}, "arguments": {"a": 1}}</tool_call>'
    assert parse(text).tool_calls[0].arguments == '{"a": 1}'


@pytest.mark.parametrize(
    "block",
    [
        "",
        "{",
        "3",
        "null",
        "[]",
        "{}",
        '{"name": ""}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no json"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": null}',
        '[{"name": "f"}, 3]',
        '{"name": "f"} and more',
        "[" * 100_000,
    ],
)
def test_malformed_calls_stay_content(block: str) -> None:
    text = f" so <tool_call>{block}</tool_call>\n"
    assert parse(text) == Message("assistant", text)
    if not block.startswith(('[{"name": "f"}', '{"name": "f"} ')):  # There a good call stands beside text.
        assert parse(f" [TOOL_CALLS]{block}", "mistral") == Message("assistant", f" [TOOL_CALLS]{block}")


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "names"),
    [
        ("mistral", 'so [TOOL_CALLS][{"name": "f"}, 3]', "so , 3]", ["f"]),
        ("mistral", '[TOOL_CALLS][{"name": 1}, {"name": "f"}, {"name": "g"}]', '[TOOL_CALLS][{"name": 1},', ["f", "g"]),
        ("llama3", '{"name": "f"}; {"name": "g"}; ', "", ["f", "g"]),
        ("llama3", '<|python_tag|>[{"name": "f"}, {"name": "g"}]', "", ["f", "g"]),
        ("llama3", '{"name": "f"}; {"name"', '; {"name"', ["f"]),
        ("llama3", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    ],
)
def test_the_text_of_a_broken_call_stays_beside_a_good_one(
    tool_format: str, text: str, content: str, names: list[str]
) -> None:
    answer = parse(text, tool_format)
    assert (answer.content, [call.name for call in answer.tool_calls]) == (content, names)


def test_without_a_format_nothing_is_a_tool_call() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(text, "") == Message("assistant", text)


@pytest.mark.parametrize(
    ("text", "in_reasoning", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nhello\n", False, "hm", "hello\n"),
        ("\n<think>hm</think>hello", False, "hm", "hello"),
        ("hm\n</think>\n\nhello", True, "hm", "hello"),
        ("<think>\nhm", False, "hm", ""),
        ("hm", True, "hm", ""),
        ("\nhello <think>", False, "", "\nhello <think>"),
        ("<think></think>hello", False, "", "hello"),
    ],
)
def test_reasoning(text: str, in_reasoning: bool, reasoning: str, content: str) -> None:
    answer = parse(text, reasons=True, in_reasoning=in_reasoning)
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_reasoning_comes_before_tool_calls() -> None:
    answer = parse('<think>f?</think><tool_call>{"name": "f"}</tool_call>', reasons=True)
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("f?", "", 1)


def test_a_model_without_reasoning_keeps_think_tags_in_its_content() -> None:
    assert parse("<think>a</think>b").content == "<think>a</think>b"


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    '{"name": "f"',
    "}",
    '"arguments":',
    "{",
    " ",
]


@given(text=st.lists(st.sampled_from(PIECES)).map("".join), tool_format=st.sampled_from(["", *TOOL_FORMATS]))
def test_anything_can_be_parsed_and_plain_text_is_untouched(text: str, tool_format: str) -> None:
    answer = parse(text, tool_format, reasons=True)
    assert answer.role == "assistant"
    if not answer.tool_calls and not answer.reasoning and not text.lstrip().startswith("<think>"):
        assert answer.content == text
