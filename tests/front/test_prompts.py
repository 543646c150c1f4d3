"""Prompts and completions.

A prompt that cannot fit is refused before it is tokenised, because tokenising a long text blocks everything else.

A streamed answer equals the whole one: content, reasoning, stop strings, tool calls, half characters.

The oracle is `Renderer.parse_text` of the whole text, cut at the first stop string.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentjet.errors import InvalidRequest
from agentjet.front.prompts import CompletionParser, prepare_prompt
from agentjet.rendering import Renderer
from agentjet.timeline import ConversationTree
from agentjet.types import Conversation, Message, ModelInfo, Sampled
from tests.tiny import make_model_info, tokenizer

# ---- prompts ---------------------------------------------------------------------------------------------------------


class Counting(Renderer):
    """Counts the bytes that it was given to tokenise."""

    def __init__(self, model_info: ModelInfo) -> None:
        super().__init__(model_info)
        self.tokenised = 0
        tokenize = self.tokenize

        def counted(encoded: bytes) -> tuple[int, ...]:
            self.tokenised += len(encoded)
            return tokenize(encoded)

        self.tokenize = counted


@pytest.mark.parametrize("asked", ["messages", "prompt"])
def test_a_text_that_cannot_fit_is_not_tokenised(tmp_path: Path, asked: str) -> None:
    card = make_model_info(tmp_path / "model")
    renderer = Counting(card)
    text = "x" * 1_000_000

    def ask(text: str) -> int:
        messages = (Message("user" if asked == "messages" else "prompt", text),)
        conversation = Conversation(messages, prompt=None if asked == "messages" else text)
        return len(prepare_prompt(renderer, ConversationTree(), conversation, "template").tokens)

    with pytest.raises(InvalidRequest, match="maximum context length is 2048 tokens") as refused:
        ask(text)
    assert (refused.value.code, refused.value.param, renderer.tokenised) == ("context_length_exceeded", asked, 0)
    assert ask("x" * 100) > 0 and 0 < renderer.tokenised < 1000


def test_a_refused_prompt_leaves_nothing_in_the_tree(tmp_path: Path) -> None:
    """Its episode may live for long, and the prompt may have megabytes."""
    renderer, tree = Renderer(replace(make_model_info(tmp_path / "model"), context_length=2048)), ConversationTree()
    fits, refused = Message("user", "hello"), Message("user", "x" * 200_000)
    before = sys.getrefcount(fits), sys.getrefcount(refused)
    with suppress(InvalidRequest):
        prepare_prompt(renderer, tree, Conversation((refused,)), "template")
        raise AssertionError("it does not fit")
    prepare_prompt(renderer, tree, Conversation((fits,)), "template")
    assert sys.getrefcount(refused) == before[1]
    assert sys.getrefcount(fits) > before[0], "the next request probably continues it"


def test_a_long_text_is_counted_first(tmp_path: Path) -> None:
    renderer = Counting(replace(make_model_info(tmp_path / "model"), context_length=3000))
    renderer._vocabulary.longest_piece = 100  # As of a vocabulary with rows of blanks in it.
    words = "hello 42 " * 4000
    assert len(renderer.tokenize(words.encode())) > 3000
    renderer.tokenised = 0
    with pytest.raises(InvalidRequest, match="or more"):
        prepare_prompt(renderer, ConversationTree(), Conversation((), prompt=words), "template")
    assert renderer.tokenised == 0
    for text in (words, words * 20, "x" * 200_000, "€" * 90_000):
        encoded = text.encode()
        exact = len(renderer.tokenize(encoded))
        assert 0.8 * exact < renderer.counted_lower_bound(encoded, exact) <= exact
        assert renderer.counted_lower_bound(encoded, 10) > 10


# ---- completions -----------------------------------------------------------------------------------------------------

USER = (Message("user", "hello"),)
TOOLS = ({"type": "function", "function": {"name": "add"}},)
END = 2


@cache
def renderer(tool_format: str) -> Renderer:
    with TemporaryDirectory() as folder:
        return Renderer(make_model_info(Path(folder) / "qwen", "qwen3", tool_format=tool_format))


def answer(tool_format: str = "hermes", *, tools: bool = True, stop: Sequence[str] = ()) -> CompletionParser:
    conversation = Conversation(USER, TOOLS if tools else ())
    return CompletionParser(renderer(tool_format), conversation, stop=stop, id_prefix="call")


def sent(made: CompletionParser, tokens: Sequence[int], sizes: Sequence[int]) -> tuple[str, str, Message]:
    """Feed tokens in pieces of the given sizes; what was sent of reasoning and content, and the message."""
    reasoning = content = ""
    left, sizes = list(tokens), list(sizes) or [1]
    turn = 0
    while left and not made.stopped:
        size = sizes[turn % len(sizes)]
        piece, left, turn = left[:size], left[size:], turn + 1
        made.push(Sampled(tuple(piece), (-0.5,) * len(piece), 0, None if left else "stop"))
        if left and not made.stopped:
            more = made.delta()
            reasoning, content = reasoning + more.reasoning, content + more.text
    message, more = made.message()
    return reasoning + more.reasoning, content + more.text, message


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<thi", "nk>", "</", "<", "\n", "\n\n", "  ", " "),
        *(
            '{"name": "add", "arguments": {"a": 1}}',
            '{"name": "add", "parameters": {"a": 1}}',
            "{",
            "[",
            "[TOOL_CALLS]",
        ),
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        *("\n hello", "hello \n", '[TOOL_CALLS][{"name": "add", "arguments": {}}]'),
        *("hello", "END", "EN", "D", "🙂", "ü", "<|python_tag|>", "x"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    tool_format=st.sampled_from(["hermes", "mistral", "llama3"]),
    tools=st.booleans(),
    stop=st.lists(st.sampled_from(["END", "\n\n", "</tool_call>", "🙂"]), max_size=2),
    cut=st.integers(0, 3),
)
def test_in_pieces_or_whole_it_is_the_same(
    fragments: list[str], sizes: list[int], tool_format: str, tools: bool, stop: list[str], cut: int
) -> None:
    tokens = tokenizer().encode("".join(fragments), add_special_tokens=False).ids
    tokens = [*tokens[: len(tokens) - cut], END]  # a cut may fall within a character
    reasoning, content, message = sent(answer(tool_format, tools=tools, stop=stop), tokens, sizes)
    assert (reasoning, content) == (message.reasoning, message.content)
    text = tokenizer().decode(tokens, skip_special_tokens=True)
    text = text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]
    conversation = Conversation(USER, TOOLS if tools else ())
    assert message == renderer(tool_format).parse_text(text, conversation)


@settings(max_examples=300, deadline=None)
@given(
    fragments=st.lists(FRAGMENTS, max_size=12),
    tool_format=st.sampled_from(["hermes", "mistral", "llama3"]),
    tools=st.booleans(),
    stop=st.lists(st.sampled_from(["END", "\n\n", "🙂"]), max_size=2),
)
def test_what_is_sent_token_by_token_begins_what_is_certain_at_once(
    fragments: list[str], tool_format: str, tools: bool, stop: list[str]
) -> None:
    """A call that is not complete is read again only once a character comes that may end it."""
    tokens = tokenizer().encode("".join(fragments), add_special_tokens=False).ids
    grown, reasoning, content = answer(tool_format, tools=tools, stop=stop), "", ""
    for length in range(1, len(tokens) + 1):
        grown.push(Sampled((tokens[length - 1],), (-0.5,), 0))
        whole = answer(tool_format, tools=tools, stop=stop)
        whole.push(Sampled(tuple(tokens[:length]), (-0.5,) * length, 0))
        if grown.stopped:
            break
        more, at_once = grown.delta(), whole.delta()
        reasoning, content = reasoning + more.reasoning, content + more.text
        assert at_once.reasoning.startswith(reasoning) and at_once.text.startswith(content)


CALLS = {
    "hermes": ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": 1}</tool_call>'],
    "mistral": ['[TOOL_CALLS][{"name": "add", "arguments": {}}]', "[TOOL_CALLS]nonsense"],
    "llama3": ['{"name": "add", "parameters": {}}', '[{"name": "add", "parameters": {}}]', "[1, 2]"],
}


@pytest.mark.parametrize("tool_format", CALLS)
def test_white_space_around_tool_calls(tool_format: str) -> None:
    spaces, texts = ("", " ", "\n\n"), ("", "hello", "<think>hm</think>hello")
    for before, text, between, call, after in product(spaces, texts, spaces, CALLS[tool_format], spaces):
        tokens = [*tokenizer().encode(before + text + between + call + after).ids, END]
        reasoning, content, message = sent(answer(tool_format), tokens, [1])
        assert (reasoning, content) == (message.reasoning, message.content), (before, text, between, call, after)


def test_a_long_stop_string_costs_no_memory_of_its_own() -> None:
    stop = "ab" * 5_000
    tokens = tokenizer().encode("one " + stop[:100]).ids
    tracemalloc.start()
    try:
        made = answer(tools=False, stop=[stop])
        made.push(Sampled(tuple(tokens), (-0.5,) * len(tokens), 0))
        certain, most = made.delta().text, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert certain == "one ", "what may become the stop string waits"
    assert most < 2**20


def test_ordinary_text_is_sent_at_once() -> None:
    made = answer()
    tokens = tokenizer().encode("one two").ids
    pieces = []
    for token in tokens:
        made.push(Sampled((token,), (-0.5,), 0))
        pieces.append(made.delta().text)
    assert sum(bool(piece) for piece in pieces) >= len(tokens) - 2, "only white space waits for what follows"


@pytest.mark.parametrize(("text", "sent_early"), [("a <tool", "a"), ("a E", "a "), ("<think>b", "")])
def test_what_may_become_something_else_waits(text: str, sent_early: str) -> None:
    made = answer(stop=["END"], tools="tool" in text)
    made.push(Sampled(tuple(tokenizer().encode(text).ids), (-0.5,) * len(tokenizer().encode(text).ids), 0))
    assert made.delta().text == sent_early


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    made = answer(stop=["END"])
    tokens = tuple(tokenizer().encode("ab END cd").ids)
    made.push(Sampled(tokens, (-0.5,) * len(tokens), 3, "length"))
    assert made.stopped
    assert tokenizer().decode(made.tokens) == "ab END" and len(made.logprobs) == len(made.versions) == len(made.tokens)
    message, *_ = made.message()
    assert (message.content, made.finish_reason(message)) == ("ab ", "stop")
