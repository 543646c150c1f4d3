"""The choice of the next token: grammar, temperature, truncation. Both backends use it, one inside vLLM's processes.

A grammar is Lark text in `llguidance`'s dialect, written by `rendering.grammar`. `llguidance` follows it over the
model's own tokens. A grammar names control tokens by id; its text never contains them. Text without an alternative is
tokenised as the tokenizer does it. The end tokens are allowed where the grammar accepts an end.

Shapes: C completions, R rows of logits, V vocabulary. Completions of one row share its softmax.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from torch import Tensor

from agentjet.errors import GrammarError
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.timeline.forest import EVERYTHING, encode_set
from agentjet.types import ModelInfo, SamplingParams

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


def sample_tokens(
    logits: Tensor,
    of: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[bytes],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float], list[bytes]]:
    """Sample one token for each of C completions; `of[c]` is the row of `logits` [R, V] that completion c samples from.

    `masks[c]` has a bit for each token, lowest first; an empty mask allows every token. Returns the tokens, their
    log-probabilities, and the set from which each was chosen (see `timeline.forest`).

    The log-probabilities are those of the sampled distribution: over the set, after temperature. A greedy completion
    (temperature 0) reports those of temperature 1. If a row has NaN logits or an empty mask, its
    log-probability is not finite, and its token must be ignored.
    """
    shapes = [(row, p.temperature, p.top_k, p.top_p, mask) for row, p, mask in zip(of, params, masks, strict=True)]
    distinct = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    tempered, sets = _tempered(logits, list(distinct))
    normaliser = tempered.logsumexp(-1, keepdim=True)
    cumulative = (tempered - normaliser).exp_().cumsum_(-1)
    rows = torch.tensor([distinct[shape] for shape in shapes], device=logits.device)
    by_completion = cumulative if len(distinct) == len(shapes) else cumulative[rows]
    # The last entry of a row is 1 up to rounding. A token of probability 0 is never the first one above a threshold.
    below_1 = torch.tensor(uniforms, dtype=torch.float32, device=logits.device).clamp(max=1 - 2**-24)
    chosen = torch.searchsorted(by_completion, below_1[:, None] * by_completion[:, -1:], right=True)[:, 0]
    chosen = chosen.clamp(max=logits.shape[-1] - 1)  # Of NaN, no entry is above.
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        chosen = torch.where(greedy, tempered.argmax(-1)[rows], chosen)
    logprobs = (tempered[rows, chosen] - normaliser[rows, 0]).tolist()
    return chosen.tolist(), logprobs, [sets[distinct[shape]] for shape in shapes]


def _tempered(logits: Tensor, shapes: Sequence[tuple[int, float, int, float, bytes]]) -> tuple[Tensor, list[bytes]]:
    """Returns logits [D, V] of distinct distributions after mask, temperature and truncation, and their sets.

    `shapes` are row of logits, temperature, top_k, top_p and mask.
    """
    rows = torch.tensor([row for row, *_ in shapes], device=logits.device)
    tempered = logits.index_select(0, rows).float()
    temperatures = [temperature or 1.0 for _, temperature, *_ in shapes]
    if any(t != 1.0 for t in temperatures):
        tempered /= torch.tensor(temperatures, device=logits.device)[:, None]
    sets = [EVERYTHING] * len(shapes)
    for i, (_, temperature, top_k, top_p, mask) in enumerate(shapes):
        sets[i] = restrict(tempered[i], *((top_k, top_p) if temperature > 0 else (0, 1.0)), mask)
    return tempered, sets


def restrict(logits: Tensor, top_k: int, top_p: float, mask: bytes) -> bytes:
    """Set `logits` [V], after temperature, to -inf outside a mask and then a truncation, in place.

    `mask` has a bit for each token, lowest first; an empty one allows every token. Returns the set that remains (see
    `timeline.forest`), and `EVERYTHING` if none remains or nothing is restricted.
    """
    if mask:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little")
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), -torch.inf)
    if top_k or top_p < 1:
        logits.copy_(truncate(logits, top_k, top_p))
    elif not mask:
        return EVERYTHING
    members = (logits != -torch.inf).cpu().numpy()
    return encode_set(members) if members.any() else EVERYTHING


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set `logits` [V] outside the top k, then outside the smallest set of mass `top_p`, to -inf.

    The likeliest token always stays.
    """
    kept = logits
    if top_k and top_k < len(logits):
        smallest = logits.topk(top_k).values[-1]
        kept = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = kept.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        outside[0] = False  # a top_p below float32's smallest number is 0
        kept = kept.scatter(0, order, ordered.masked_fill(outside, -torch.inf))
    return kept
