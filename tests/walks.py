"""Random walks through a grammar, without a model: what could be sampled under it. No torch."""

from __future__ import annotations

import re

import numpy as np

from agentjet.compute.token_choice import Grammars
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.types import ModelInfo

LONGEST = 4000
NUM_TOKENS = 320
"""More than any tiny tokenizer has."""


class Walker:
    """Walks over one model's tokens. Ends and markers are taken more often than their share, so that walks end."""

    def __init__(self, card: ModelInfo) -> None:
        self._vocabulary = Vocabulary(card.tokenizer_path)
        self._ends = card.end_tokens
        self._markers = {token.literal: id for id, token in self._vocabulary.control.items()}
        self._grammars = Grammars(card, NUM_TOKENS)

    def walk(self, grammar: str, seed: int, *, hint: str = "") -> list[int]:
        """Tokens up to an end token; the first are those of `hint`, as the tokenizer has them."""
        rng = np.random.default_rng(seed)
        guide = self._grammars.guide(grammar)
        assert guide is not None
        walked: list[int] = []
        hinted = self._tokens(hint)
        while len(walked) < LONGEST:
            bits = np.unpackbits(np.frombuffer(guide.mask, np.uint8), bitorder="little")
            token = hinted.pop(0) if hinted else self._choose(np.flatnonzero(bits), rng)
            assert bits[token], f"{token} is not allowed after {walked}"
            walked.append(token)
            if token in self._ends:
                return walked
            assert not (error := guide.advance(token)), error
        raise AssertionError(f"no end in {LONGEST} tokens: {walked}")

    def _choose(self, allowed: np.ndarray, rng: np.random.Generator) -> int:
        for likely in (self._ends, tuple(self._markers.values())):
            chosen = np.intersect1d(allowed, likely)
            if len(chosen) and rng.random() < 0.4:
                return int(rng.choice(chosen))
        return int(rng.choice(allowed))

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self._markers))})", text):
            tokens += [self._markers[part]] if part in self._markers else self._vocabulary.tokenize(part.encode())
        return tokens
