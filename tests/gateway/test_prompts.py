"""A prompt that cannot fit is refused before it is tokenised, because tokenising a long text blocks everything else."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.errors import InvalidRequest
from agentjet.gateway.prompts import prepare_prompt
from agentjet.rendering import Renderer
from agentjet.timeline import ConversationTree
from agentjet.types import Conversation, Message
from tests.tiny import make_model_info


class Counting(Renderer):
    """Counts the bytes that it was given to tokenise."""

    tokenised = 0

    def tokenize(self, encoded: bytes) -> tuple[int, ...]:
        self.tokenised += len(encoded)
        return super().tokenize(encoded)


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
