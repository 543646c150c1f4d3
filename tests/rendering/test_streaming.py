"""Completions that grow, for every family of the table (`tests/templates/families.json`):

1. In pieces or whole, a completion has the same reasoning, text and calls, in the same order.
2. Text in front of a call is sent before the call is complete, and a call as soon as it is complete.
3. Nothing that was sent is taken back, whatever follows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.rendering.formats import REASONING_FORMATS, TOOL_FORMATS, ParsedCall, ReasoningFormat, write_calls
from agentjet.rendering.parser import MessageReader, Part, Thought
from tests.rendering.test_formats import ENTRIES, FORMATS, TABLE, conversation, renderer, sampled

CASES = (
    "one_call", "two_calls", "call_beside_text", "typed_arguments", "broken_call", "reasoning", "reasoning_with_call"
)  # fmt: skip
TEXTS = ["", "\n\nSo.", " <", "[1]"]


def joined(parts: list[Part]) -> list[Part]:
    """Returns the parts with neighbours of one kind as one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, str) and isinstance(last, str):
            result[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + part.text)
        else:
            result.append(part)
    return result


def in_pieces(reader: MessageReader, text: str, sizes: Iterator[int]) -> Iterator[tuple[int, list[Part]]]:
    """Yields how much of the text was read, and what that returned."""
    at = 0
    while at < len(text):
        piece = text[at : at + next(sizes)]
        at += len(piece)
        yield at, reader.read(piece)
    yield at, reader.read("", is_whole=True)


def each(size: int) -> Iterator[int]:
    while True:
        yield size


def drawn(seed: int) -> Iterator[int]:
    draws = random.Random(seed)
    while True:
        yield draws.randint(1, 12)


def text_of(name: str, case: str) -> str | None:
    """Returns a completion of the case without the end token, which is not displayed."""
    text, ours = sampled(name, case), renderer(name)
    if text is None:
        return None
    ids = [ours.model.end_tokens[0], *ours.model.end_tokens]
    shown = [ours.token_bytes(token).decode() for token in ids]
    return next((text.removesuffix(end) for end in shown if text.endswith(end) and end != "<|call|>"), text)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_in_pieces_or_whole_it_is_the_same(name: str, case: str) -> None:
    text, ours = text_of(name, case), renderer(name)
    for tail in TEXTS if text is not None else ():
        whole = joined(ours.reader(conversation("prompt")).read(f"{text}{tail}", is_whole=True))
        for sizes in (each(1), each(3), drawn(1), drawn(2)):
            pieces = in_pieces(ours.reader(conversation("prompt")), f"{text}{tail}", sizes)
            assert joined([part for _, parts in pieces for part in parts]) == whole


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_is_sent_before_the_call_and_a_call_once_it_is_complete(name: str) -> None:
    style, form = renderer(name).style, TOOL_FORMATS[FORMATS[name]]
    before = answer_after_reasoning(style.reasoning, style.in_reasoning)
    said = "" if not form.marker else f"I look.{'<|end|><|start|>assistant' if name == 'gpt_oss' else ''}"
    calls = [ParsedCall("weather", f'{{"city": "{city}"}}') for city in ("Paris", "Rome")]
    text = before + said + write_calls(form, calls)
    thought = content = ""
    sent = dict[str, int]()
    """The length of the text after which something was sent."""
    for at, parts in in_pieces(renderer(name).reader(conversation("prompt")), text, each(1)):
        thought += "".join(part.text for part in parts if isinstance(part, Thought))
        content += "".join(part for part in parts if isinstance(part, str))
        whole = [thought, content, *(part.arguments for part in parts if isinstance(part, ParsedCall))]
        for words in ("Hm.", "I look.", "Paris", "Rome"):
            if any(words in one for one in whole):
                sent.setdefault(words, at)
    if style.reasoning:
        assert sent["Hm."] <= len(before)
    if said:
        assert sent["I look."] < text.index("Paris")
    assert sent["Paris"] <= text.index("Rome"), "before the second call is complete"
    assert sent["Rome"] <= len(text)
    assert (thought, content) == ("Hm." * bool(style.reasoning), "I look." * bool(said))


def answer_after_reasoning(reasoning: ReasoningFormat | None, in_reasoning: bool) -> str:
    """Returns a thought, and what opens the answer."""
    if reasoning is None:
        return ""
    opening = "" if in_reasoning else reasoning.opening
    return f"{opening}Hm.{reasoning.closing}{reasoning.answer[0] if reasoning.channels else ''}"


BLOCKS = (None, *REASONING_FORMATS)
TOOLS = tuple(TABLE["tools"])


@st.composite
def completions(draw: st.DrawFn) -> tuple[MessageReader, MessageReader, str]:
    """Draws two equal readers, and a text of pieces of their formats."""
    name, reasoning = draw(st.sampled_from(sorted(TOOL_FORMATS))), draw(st.sampled_from(BLOCKS))
    in_reasoning = draw(st.booleans()) or (reasoning is not None and not reasoning.opening)
    form = TOOL_FORMATS[name]
    city = ParsedCall("weather", '{"city": "a \\"b\\" [}", "n": 3}')
    call, calls = write_calls(form, [city]), write_calls(form, [city, city])
    pieces = [call, call, calls, form.opening, form.closing, form.marker, *form.call.split("{"), *"\n <[{]}\"'(", "hi "]
    if reasoning:
        pieces += [reasoning.opening, reasoning.closing, *reasoning.answer, reasoning.closing[:3]]
    if reasoning and reasoning.channels:
        pieces += ["<|start|>assistant", " to=functions.weather", "<|channel|>analysis<|message|>", "<|end|>"]
    text = "".join(
        piece[draw(st.integers(0, 2)) : len(piece) - draw(st.integers(0, 2))] if draw(st.booleans()) else piece
        for piece in draw(st.lists(st.sampled_from(pieces), max_size=8))
    )
    readers = [
        MessageReader(reasoning=reasoning, in_reasoning=in_reasoning, tool_format=name, tools=TOOLS) for _ in range(2)
    ]
    return readers[0], readers[1], text


@settings(max_examples=500, deadline=None)
@given(case=completions(), seed=st.integers(0, 9))
def test_whatever_follows_nothing_is_taken_back(case: tuple[MessageReader, MessageReader, str], seed: int) -> None:
    whole, growing, text = case
    pieces = in_pieces(growing, text, drawn(seed) if seed else each(1))
    assert joined([part for _, parts in pieces for part in parts]) == joined(whole.read(text, is_whole=True))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_long_and_hostile_text_is_read_in_time(name: str) -> None:
    form = TOOL_FORMATS[name]
    call = write_calls(form, [ParsedCall("weather", '{"city": "%s"}' % ("x {} [] () " * 500))])
    for text in (call, form.marker * 500, (form.marker or "[") + "{f(<" * 1_000, "word " * 2_000):
        for _ in in_pieces(MessageReader(tool_format=name, tools=TOOLS), text, each(3)):
            pass
