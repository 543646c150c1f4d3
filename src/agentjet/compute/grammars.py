"""Grammars of completions, followed token by token. No torch, because every backend uses it.

A grammar is Lark text in `llguidance`'s dialect, written by `rendering.grammar`. `llguidance` follows it over the
model's own tokens. A grammar names control tokens by id; its text never contains them. Text without an alternative is
tokenised as the tokenizer does it. The end tokens are allowed where the grammar accepts an end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from agentjet.errors import GrammarError
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.types import ModelInfo

MAX_GRAMMARS = 16
"""Compiled grammars in memory. Each takes about 200 bytes per character; `rendering.grammar` limits its characters."""


class Guide:
    """Follows the grammar of one completion. `mask` has one bit per token, lowest first: True if it may come next."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Raises `GrammarError` if the grammar allows no token."""
        self._matcher = matcher
        self.mask = b""
        if error := self._update_mask():
            raise GrammarError(error)

    def advance(self, token: int) -> str:
        """Consume a sampled token; returns the reason if no further token is possible, else an empty string."""
        self._matcher.consume_token(token)
        return self._update_mask()

    def _update_mask(self) -> str:
        self.mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}"
        return "" if any(self.mask) else "the grammar allows no token here"


class Grammars:
    """Compiles the grammars of one model and caches them. Threads may share it."""

    def __init__(self, info: ModelInfo, vocabulary: int) -> None:
        """`vocabulary` is the number of token ids of the model, which may exceed that of its tokenizer."""
        self._info = info
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        """The grammars used last, the newest last."""
        self._lock = threading.Lock()
        """Held while the cache is used, not while a grammar is compiled."""

    def guide(self, grammar: str) -> Guide | None:
        """Returns a guide at the grammar's start; None for the empty grammar, which allows everything.

        Raises `GrammarError` for an invalid grammar.
        """
        if not grammar:
            return None
        if (known := self.known_guide(grammar)) is not None:
            return known
        matcher = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return Guide(matcher.deep_copy())

    def known_guide(self, grammar: str) -> Guide | None:
        """Returns a guide if the grammar is compiled already. Raises `GrammarError` if it allows no token."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                return None
            self._compiled.move_to_end(grammar)
            copy = matcher.deep_copy()
        return Guide(copy)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {_first_line(matcher.get_error())}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(_Tokens(self._info, self._vocabulary)),
            n_vocab=self._vocabulary,
            eos_token=list(self._info.end_tokens),
        )


class _Tokens:
    """A model's tokens in the interface of `TokenizerWrapper`. Ids without text are empty and never allowed."""

    def __init__(self, info: ModelInfo, count: int) -> None:
        self._vocabulary = Vocabulary(info.tokenizer_path)
        self.tokens = [self._vocabulary.displayed_bytes(id, literals=True) for id in range(count)]
        self.special_token_ids = [id for id in sorted(self._vocabulary.control) if id < count]
        self.eos_token_id = info.end_tokens[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the ids of plain text. Text without an alternative is only allowed in this tokenisation."""
        return list(self._vocabulary.tokenize(text.encode() if isinstance(text, str) else text))


def _first_line(message: str) -> str:
    """Returns the message without the dump of the parser's state that follows it."""
    return message.strip().partition("\n")[0]
