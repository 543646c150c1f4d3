"""Which tokens may come next under a grammar: `llguidance` over the model's own tokens. No torch.

A grammar is Lark text in `llguidance`'s dialect, which `rendering.grammar` writes. Control tokens are never part of its
text; it names them by id. Text without an alternative may only be written as the tokenizer writes it. Where an end is
accepted, the end tokens are allowed, and where nothing else is, one of them must come.

Choosing the next token: a grammar's mask, temperature, truncation, one seeded uniform number a completion.

Shapes: C completions, R rows of logits, V vocabulary. Completions that share a row share its softmax, too.

Log-probabilities of given tokens: one pass without sampling, for evaluations that compare texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.passes import forest_plan
from agentjet.compute.embedded.policy import Policy
from agentjet.errors import GrammarError
from agentjet.rendering.grammar import TextCache
from agentjet.rendering.vocabulary import Vocabulary
from agentjet.timeline.forest import Row, build_forest
from agentjet.timeline.support import EVERYTHING, encode_set
from agentjet.types import ModelInfo, SamplingParams, TokenScore

MAX_GRAMMARS, MAX_GRAMMAR_CHARACTERS = 64, 2**20
"""Compiled ones, and the characters of them together: a compiled grammar takes about two hundred bytes for each."""


class Guide:
    """Follows one completion. `mask` is what may come next, one bit a token, lowest first; nobody else changes it."""

    def __init__(self, matcher: LLMatcher) -> None:
        """Raises `GrammarError` when the grammar allows nothing."""
        self._matcher = matcher
        self.mask = b""
        if error := self._look():
            raise GrammarError(error)

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

    def __init__(self, card: ModelInfo, vocabulary: int) -> None:
        """`vocabulary` is the number of token ids the model knows, which may be more than its tokenizer has."""
        self._card = card
        self._vocabulary = vocabulary
        self._compiled = TextCache(self._compile, most=MAX_GRAMMARS, characters=MAX_GRAMMAR_CHARACTERS)

    def guide(self, grammar: str) -> Guide | None:
        """A guide from the grammar's start; None for the empty grammar, which allows everything.

        Raises `GrammarError`.
        """
        return Guide(self._compiled(grammar).deep_copy()) if grammar else None

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {first_line(matcher.get_error())}")
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

    def __init__(self, card: ModelInfo, count: int) -> None:
        self._vocabulary = Vocabulary(card.tokenizer_path)
        self.tokens = [self._vocabulary.displayed_bytes(id, literals=True) for id in range(count)]
        self.special_token_ids = [id for id in sorted(self._vocabulary.control) if id < count]
        self.eos_token_id = card.end_tokens[0]
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of plain text: where the grammar leaves no choice, only the tokenizer's own way of writing is allowed."""
        return list(self._vocabulary.tokenize(text.encode() if isinstance(text, str) else text))


def first_line(message: str) -> str:
    """Without the dump of the parser's state that follows it."""
    return message.strip().partition("\n")[0]


DistributionKey = tuple[int, float, int, float, bytes]
"""What makes a distribution: the row of logits, temperature, top_k, top_p and mask."""


def sample_tokens(
    logits: Tensor,
    of: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[bytes],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float], list[bytes]]:
    """Sample one token for each of C completions; `of[c]` is the row of `logits` [R, V] that completion c samples from.

    `masks[c]` has a bit for each token that may follow, lowest first; empty, it allows all of them.
    Returns tokens, log-probabilities, and the set that each token was chosen among (see `timeline.support`). The
    log-probabilities are those of the distribution sampled from: over the set, after temperature. A greedy completion
    (temperature 0) reports those of temperature 1, since a certain choice has none worth reporting. Where a row is no
    distribution (not finite, or nothing allowed), the log-probability is not finite and the token means nothing.
    """
    shapes = [(row, p.temperature, p.top_k, p.top_p, mask) for row, p, mask in zip(of, params, masks, strict=True)]
    distinct = {shape: i for i, shape in enumerate(dict.fromkeys(shapes))}
    tempered, sets = _tempered(logits, list(distinct))
    normaliser = tempered.logsumexp(-1, keepdim=True)
    cumulative = (tempered - normaliser).exp_().cumsum_(-1)
    rows = torch.tensor([distinct[shape] for shape in shapes], device=logits.device)
    chosen = _first_above(cumulative, rows, torch.tensor(uniforms, dtype=torch.float32, device=logits.device))
    if any(p.temperature == 0 for p in params):
        greedy = torch.tensor([p.temperature == 0 for p in params], device=logits.device)
        chosen = torch.where(greedy, tempered.argmax(-1)[rows], chosen)
    logprobs = (tempered[rows, chosen] - normaliser[rows, 0]).tolist()
    return chosen.tolist(), logprobs, [sets[distinct[shape]] for shape in shapes]


def _first_above(cumulative: Tensor, rows: Tensor, uniforms: Tensor) -> Tensor:
    """First index [C] at which `cumulative[rows]` exceeds the uniforms, by bisection, without copying shared rows.

    The last entry of a row is 1 up to rounding; scaling by it keeps the threshold below it, so that a token of
    probability 0 is never hit.
    """
    last = cumulative.shape[-1] - 1
    thresholds = uniforms * cumulative[rows, last]
    low, high = torch.zeros_like(rows), torch.full_like(rows, last)
    for _ in range(last.bit_length()):
        middle = (low + high) // 2
        above = cumulative[rows, middle] > thresholds
        high = torch.where(above, middle, high)
        low = torch.where(above, low, (middle + 1).clamp(max=last))
    return low


def _tempered(logits: Tensor, shapes: Sequence[DistributionKey]) -> tuple[Tensor, list[bytes]]:
    """Logits [D, V] of the distinct distributions, in float32, after mask, temperature and truncation; and the set
    that each leaves."""
    rows = torch.tensor([row for row, *_ in shapes], device=logits.device)
    tempered = logits.index_select(0, rows).float()
    temperatures = [temperature or 1.0 for _, temperature, *_ in shapes]
    if any(t != 1.0 for t in temperatures):
        tempered /= torch.tensor(temperatures, device=logits.device)[:, None]
    sets = [EVERYTHING] * len(shapes)
    for i, (_, temperature, top_k, top_p, mask) in enumerate(shapes):
        if mask:
            outside = torch.from_numpy(~unpack_mask(mask, logits.shape[-1])).to(logits.device)
            tempered[i].masked_fill_(outside, -torch.inf)
        if temperature > 0 and (top_k or top_p < 1):
            tempered[i] = truncate(tempered[i], top_k, top_p)
        elif not mask:
            continue
        members = (tempered[i] != -torch.inf).cpu().numpy()
        sets[i] = encode_set(members) if members.any() else EVERYTHING
    return tempered, sets


def unpack_mask(mask: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """The bits of a mask as truth values [V]."""
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocabulary, bitorder="little").view(bool)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`logits` [V] with everything outside the top k, then outside the smallest set of mass `top_p`, at -inf.

    The likeliest token stays, however little mass is asked for.
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


HEAD_POSITIONS = 128
"""Positions that are multiplied with the vocabulary at a time."""


@torch.inference_mode()
def score(policy: Policy, tokens: NDArray[np.int32], num_likeliest: int) -> list[TokenScore]:
    """The score of each token of `tokens` [T] but the first, given those before it, at temperature 1: T - 1 scores."""
    hidden = _hidden(policy, tokens)[:-1]
    targets = torch.from_numpy(tokens[1:].astype(np.int64)).to(policy.device)
    scores = []
    for start in range(0, len(targets), HEAD_POSITIONS):
        logprobs = policy.head(hidden[start : start + HEAD_POSITIONS]).float().log_softmax(-1)
        own = logprobs.gather(-1, targets[start : start + HEAD_POSITIONS, None])[:, 0].tolist()
        best, ids = logprobs.topk(min(num_likeliest, logprobs.shape[-1]), -1)
        for logprob, values, which in zip(own, best.tolist(), ids.tolist(), strict=True):
            scores.append(TokenScore(logprob, tuple(zip(which, values, strict=True))))
    return scores


def _hidden(policy: Policy, tokens: NDArray[np.int32]) -> Tensor:
    """Hidden states [T, hidden]."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(policy.device)
    if not policy.card.shares_prefixes:
        hidden: Tensor = cast(Any, policy.decoder)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        return hidden
    nothing = np.zeros(0, np.float32)
    forest = build_forest([Row(tokens, nothing, nothing.astype(np.int32), 0.0, 1.0, 0)])
    positions = torch.arange(len(tokens), device=policy.device)
    return flat_forward(policy.decoder, ids, positions, forest_plan(forest, policy.device))
