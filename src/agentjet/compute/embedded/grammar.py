"""Which tokens may come next under a grammar: `llguidance` over the model's own tokens. No torch.

A grammar is Lark text in `llguidance`'s dialect, which `rendering.grammar` writes. Control tokens are never part of its
text; it names them by id. Text without an alternative may only be written as the tokenizer writes it. Where an end is
accepted, the end tokens are allowed, and where nothing else is, one of them must come.
"""

from __future__ import annotations

from functools import cached_property

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from agentjet.errors import Unfollowable
from agentjet.rendering.text_cache import TextCache
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.types import ModelCard

GRAMMARS_KEPT, CHARACTERS_KEPT = 64, 2**20
"""Compiled ones, and the characters of them together: a compiled grammar takes about two hundred bytes for each."""


class Guide:
    """Follows one completion. `mask` is what may come next, one bit a token, lowest first; nobody else changes it."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Raises `Unfollowable` when the grammar allows nothing."""
        self._matcher = matcher
        self.mask = b""
        if error := self._look():
            raise Unfollowable(error)

    def advance(self, token: int) -> str:
        """A token of the mask was sampled and another is to follow; returns why none can, or nothing."""
        self._matcher.consume_token(token)
        return self._look()

    def _look(self) -> str:
        self.mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return f"the grammar cannot be followed: {first_line(self._matcher.get_error())}"
        return "" if any(self.mask) else "the grammar allows no token here"


class Grammars:
    """Compiles grammars for one model, each once while it is in use."""

    def __init__(self, card: ModelCard, vocabulary: int) -> None:
        """`vocabulary` is the number of token ids the model knows, which may be more than its tokenizer has."""
        self._card = card
        self._vocabulary = vocabulary
        self._compiled = TextCache(self._compile, most=GRAMMARS_KEPT, characters=CHARACTERS_KEPT)

    def guide(self, grammar: str) -> Guide | None:
        """A guide from the grammar's start; None for the empty grammar, which allows everything.

        Raises `Unfollowable`.
        """
        return Guide(self._compiled(grammar).deep_copy()) if grammar else None

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise Unfollowable(f"the grammar cannot be compiled: {first_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(_Tokens(self._card, self._vocabulary)),
            n_vocab=self._vocabulary,
            eos_token=list(self._card.end_tokens),
        )


class _Tokens:
    """A model's tokens as `TokenizerWrapper` asks for them; ids that no text has are empty and never allowed."""

    def __init__(self, card: ModelCard, count: int) -> None:
        self._vocabulary = Vocabulary(card.tokenizer_path)
        self.tokens = [self._vocabulary.raw(id, literals=True) for id in range(count)]
        self.special_token_ids = [id for id in sorted(self._vocabulary.control) if id < count]
        self.eos_token_id = card.end_tokens[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of plain text: where the grammar leaves no choice, only the tokenizer's own way of writing is allowed."""
        return list(self._vocabulary.tokenize(text.encode() if isinstance(text, str) else text))


def first_line(message: str) -> str:
    """Without the dump of the parser's state that follows it."""
    return message.strip().partition("\n")[0]
