"""Continuous batching in which every token-in-context is computed once, also between completions.

Completions of the same prompt share one row of the cache and one place in the batch for as long as they have sampled
the same tokens; where they part, the row branches. A request is otherwise independent of the others: its own
parameters, its own random numbers, its own end. `step` is called by the worker's loop; nothing here blocks or runs in
a thread. After the weights change call `invalidate`: running completions go on under the new weights, from keys
computed again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import (
    attend_blocks,
    causal_tail_mask,
    flat_forward,
    fold_query_heads,
    unfold_query_heads,
)
from agentjet.compute.embedded.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.token_sampling import Grammars, Guide, sample_tokens
from agentjet.errors import ComputeError, GrammarError, OutOfCache
from agentjet.types import FinishReason, SamplingParams

PROMPT_TOKENS = 2048
"""Prompt tokens computed in one step, so that running completions never wait long for somebody's long prompt."""
BLOCKS_PER_CALL = 64
"""Blocks attended to in one call: few enough that blocks gathered for it are still in the processor's cache."""


@dataclass(slots=True, eq=False)
class RunningCompletion:
    """A request on its way. `tokens` is its prompt, or all it has when it lost its place and waits for another."""

    id: int
    tokens: np.ndarray
    length: int
    """Of the prompt and the longest completion."""
    params: SamplingParams
    guide: Guide | None
    uniforms: np.random.Generator
    row: CacheRow | None = None
    num_sampled: int = 0

    @property
    def place(self) -> CacheRow:
        assert self.row is not None
        return self.row


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token of completion `id`, and the set it was chosen among (see `timeline.support`)."""

    id: int
    token: int
    logprob: float
    support: bytes
    finish_reason: FinishReason | None
    error: ComputeError | None = None
    """Why nothing can follow it although it is not the last: the completion is given up."""


@dataclass(slots=True)
class PrefixSampler:
    """Samples completions of one policy, up to `max_concurrent` at a time."""

    policy: Policy
    max_concurrent: int
    cache_tokens: int
    _cache: KeyValueCache = field(init=False)
    _grammars: Grammars = field(init=False)
    _waiting: deque[RunningCompletion] = field(default_factory=deque)
    _running: dict[int, RunningCompletion] = field(default_factory=dict)
    _may_admit: bool = False
    """True if something happened since the last try that could let a waiting request start."""
    num_computed: int = 0
    """Tokens computed since the start."""

    def __post_init__(self) -> None:
        self._grammars = Grammars(self.policy.card, self.policy.vocabulary)
        shape = self.policy.shape
        self._cache = KeyValueCache(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            context=self.policy.card.context_length,
            max_tokens=self.cache_tokens,
            dtype=self.policy.dtype,
            device=self.policy.device,
        )

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def submit(self, id: int, prompt: np.ndarray, params: SamplingParams) -> None:
        """Queue a request; raises `OutOfCache` when it could never be held, `GrammarError` for a bad grammar."""
        length = len(prompt) + params.max_tokens
        if not self._cache.fits(length):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {self.policy.card.context_length}, sampler.cache_tokens = {self.cache_tokens})"
            )
        guide = self._grammars.guide(params.grammar)
        self._waiting.append(RunningCompletion(id, prompt, length, params, guide, np.random.default_rng(params.seed)))
        self._may_admit = True

    def cancel(self, id: int) -> None:
        """Forget a request; unknown ids are ignored, since it may just have ended."""
        running = self._running.pop(id, None)
        if running is not None:
            self._leave(running)
        else:
            self._waiting = deque(c for c in self._waiting if c.id != id)
            self._may_admit = True

    def invalidate(self) -> None:
        """The weights changed: no key computed under the old ones is used again."""
        self._cache.clear()
        self._may_admit = True

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One forward pass: the tokens that rows still miss, and one sampled token for every completion that has all.

        A row that was sampled from misses one token, a new prompt what no other row holds of it. Long prompts are
        spread over several steps, so that running completions never wait long for somebody else's.
        """
        self._admit()
        users: dict[int, list[RunningCompletion]] = {}
        for c in self._running.values():
            users.setdefault(id(c.place), []).append(c)
        if not users:
            return []
        rows = [completions[0].place for completions in users.values()]
        spans = _spans(rows)
        hidden = self._forward(spans)
        ready: list[tuple[int, list[RunningCompletion]]] = []
        last = -1
        for row, count in spans:
            last += count
            row.filled += count
            if row.filled == row.length:
                ready.append((last, users[id(row)]))
        if not ready:
            return []
        return self._sample(hidden[[index for index, _ in ready]], [completions for _, completions in ready])

    def _admit(self) -> None:
        """Start waiting requests in order of arrival: none overtakes one that waits for room.

        A request whose prefix another row is computing steps aside until that is done.
        """
        if not (self._waiting and self._may_admit):
            return
        self._may_admit = False
        same = {c.place.tokens[: c.place.length].tobytes(): c.place for c in self._running.values()}
        aside: deque[RunningCompletion] = deque()
        while self._waiting and len(self._running) < self.max_concurrent:
            completion = self._waiting.popleft()
            row = same.get(completion.tokens.tobytes())
            if row is None or row.capacity < completion.length:
                if self._cache.awaits_prefix(completion.tokens):
                    aside.append(completion)
                    continue
                row = self._cache.acquire(completion.tokens, completion.length)
            if row is None:
                self._waiting.appendleft(completion)
                break
            same[completion.tokens.tobytes()] = row
            self._join(completion, row)
        self._may_admit |= bool(aside)
        self._waiting = aside + self._waiting

    def _join(self, completion: RunningCompletion, row: CacheRow) -> None:
        row.users += 1
        completion.row = row
        self._running[completion.id] = completion

    def _leave(self, completion: RunningCompletion) -> None:
        row = completion.place
        row.users -= 1
        self._may_admit = True
        if not row.users:
            self._cache.release(row)

    def _sample(self, hidden: Tensor, shared: list[list[RunningCompletion]]) -> list[NewToken]:
        """One token for each completion; `shared` holds the completions of each row of `hidden`."""
        everyone = [c for completions in shared for c in completions]
        of = [i for i, completions in enumerate(shared) for _ in completions]
        chosen, logprobs, sets = sample_tokens(
            self.policy.head(hidden),
            of,
            [c.params for c in everyone],
            [c.guide.mask if c.guide else b"" for c in everyone],
            [c.uniforms.random() for c in everyone],
        )
        new: list[NewToken] = []
        goes_on: dict[int, dict[int, list[RunningCompletion]]] = {}
        for c, token, logprob, support in zip(everyone, chosen, logprobs, sets, strict=True):
            c.num_sampled += 1
            reason = finish_reason(self.policy, c.params, token, c.num_sampled)
            error = dead_end(c.guide, token, logprob, reason)
            new.append(NewToken(c.id, token, logprob, support, reason, error))
            if reason is None and error is None:
                goes_on.setdefault(id(c.place), {}).setdefault(token, []).append(c)
            else:
                del self._running[c.id]
                self._leave(c)
        for by_token in goes_on.values():
            self._branch(next(iter(by_token.values()))[0].place, by_token)
        return new

    def _branch(self, row: CacheRow, by_token: dict[int, list[RunningCompletion]]) -> None:
        """Let a row's completions go on with the tokens they sampled: the first token stays, the others part."""
        for token, completions in list(by_token.items())[1:]:
            twin = self._cache.branch(row)
            for c in completions:
                self._leave(c)
                if twin is not None:
                    self._join(c, twin)
                else:  # no room: wait for a place with all tokens so far
                    del self._running[c.id]
                    c.row, c.tokens = None, np.append(row.tokens[: row.length], np.int32(token))
                    self._waiting.appendleft(c)
            if twin is not None:
                twin.append(token)
        row.append(next(iter(by_token)))

    def _forward(self, spans: list[tuple[CacheRow, int]]) -> Tensor:
        """Compute the next tokens of each row and store their keys; hidden states of all of them, in order."""
        device = self.policy.device
        for row, n in spans:
            self._cache.extend(row, row.filled + n)
        tokens = np.concatenate([row.tokens[row.filled : row.filled + n] for row, n in spans])
        positions = np.concatenate([np.arange(row.filled, row.filled + n) for row, n in spans])
        self.num_computed += len(tokens)
        return flat_forward(
            self.policy.decoder,
            torch.as_tensor(tokens, dtype=torch.long, device=device),
            torch.as_tensor(positions, dtype=torch.long, device=device),
            _StepPlan(spans, positions, self._cache),
        )


def finish_reason(policy: Policy, params: SamplingParams, token: int, num_sampled: int) -> FinishReason | None:
    """Whether a completion ends with this token, its `num_sampled`-th."""
    if token in policy.end_tokens:
        return "stop"
    return "length" if num_sampled == params.max_tokens else None


def dead_end(guide: Guide | None, token: int, logprob: float, reason: FinishReason | None) -> ComputeError | None:
    """Why a completion is given up at this token, if it is; its guide is taken past the token."""
    if not math.isfinite(logprob):
        return ComputeError("the policy has diverged: its logits are not finite")
    refused = guide.advance(token) if guide and reason is None else ""
    return GrammarError(refused) if refused else None


def _spans(rows: list[CacheRow]) -> list[tuple[CacheRow, int]]:
    """How many tokens of each row a step computes: rows that miss one token first, then prompts in order of arrival, up
    to `PROMPT_TOKENS` in all."""
    spans = [(row, 1) for row in rows if row.length - row.filled == 1]
    budget = PROMPT_TOKENS
    for row in rows:
        count = min(row.length - row.filled, budget)
        if row.length - row.filled > 1 and count:
            spans.append((row, count))
            budget -= count
    return spans


class _StepPlan:
    """Attention of one step. Single tokens attend together, block by block, each to its own row's past; a longer span
    attends to its row's past and, causally, to itself."""

    def __init__(self, spans: list[tuple[CacheRow, int]], positions: NDArray[np.int64], cache: KeyValueCache) -> None:
        """`positions` [N] are those of the tokens of all spans."""
        self._cache = cache
        device = cache.keys.device
        blocks = [row.blocks[p // BLOCK] for row, n in spans for p in range(row.filled, row.filled + n)]
        self._block, self._slot = torch.tensor(blocks, device=device), torch.from_numpy(positions % BLOCK).to(device)
        singles = [row for row, n in spans if n == 1]
        self._parts: list[_Singles | _Span] = [_Singles(singles, cache)] if singles else []
        self._parts += [_Span(row, n, cache) for row, n in spans if n > 1]
        self._sizes = [part.num_tokens for part in self._parts]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._block, :, self._slot] = key
        values[self._block, :, self._slot] = value
        queries = torch.split(query, self._sizes)
        return torch.cat([part.attend(q, keys, values, scale) for part, q in zip(self._parts, queries, strict=True)])


class _Span:
    """Several tokens of one row."""

    def __init__(self, row: CacheRow, count: int, cache: KeyValueCache) -> None:
        self.num_tokens = count
        self._stop = row.filled + count
        self._blocks = torch.tensor(row.blocks, device=cache.keys.device)
        self._mask = causal_tail_mask(count, self._stop, cache.keys.device)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[N, H, D] of queries [N, H, D] over a layer of the cache."""
        heads, kv_heads = query.shape[1], keys.shape[1]
        past = (x.index_select(0, self._blocks).transpose(0, 1).flatten(1, 2) for x in (keys, values))
        key, value = (x[None, :, : self._stop] for x in past)
        out = F.scaled_dot_product_attention(
            fold_query_heads(query, kv_heads)[None],
            key,
            value,
            attn_mask=self._mask.repeat(heads // kv_heads, 1),
            scale=scale,
        )
        return unfold_query_heads(out[0], heads)


class _Singles:
    """One token of each of R rows. Every block of the rows is attended to by itself, and what the blocks of a row give
    is merged by their log-sum-exps: rows of different lengths never pad each other.
    """

    def __init__(self, rows: list[CacheRow], cache: KeyValueCache) -> None:
        device, dtype = cache.keys.device, cache.keys.dtype
        self.num_tokens = len(rows)
        counts = [row.filled // BLOCK + 1 for row in rows]
        blocks = np.concatenate([row.blocks[:count] for row, count in zip(rows, counts, strict=True)])
        owner = np.repeat(np.arange(len(rows)), counts)
        ordinal = np.concatenate([np.arange(count) for count in counts])
        visible = np.minimum(np.repeat([row.filled + 1 for row in rows], counts) - ordinal * BLOCK, BLOCK)
        order = np.argsort(blocks)
        self._owner, self._ordinal = (torch.from_numpy(x[order]).to(device) for x in (owner, ordinal))
        self._longest = max(counts)
        self._width = int(visible.max())
        hidden = np.arange(self._width) >= visible[order][:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        self._masks = torch.split(mask.to(device), BLOCKS_PER_CALL)
        ascending = blocks[order]
        self._blocks = [
            _place(ascending[at : at + BLOCKS_PER_CALL], device) for at in range(0, len(ascending), BLOCKS_PER_CALL)
        ]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[R, H, D] of queries [R, H, D] over a layer of the cache."""
        rows, heads, dim = query.shape
        kv_heads = keys.shape[1]
        queries = torch.split(query.view(rows, kv_heads, heads // kv_heads, dim)[self._owner], BLOCKS_PER_CALL)
        found = [
            attend_blocks(q, _at(keys, where, self._width), _at(values, where, self._width), scale, mask)
            for q, where, mask in zip(queries, self._blocks, self._masks, strict=True)
        ]
        out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
        if self._longest == 1:
            return torch.empty_like(out).index_copy_(0, self._owner, out).view(rows, heads, dim)
        by_row = lse.new_full((rows, self._longest, *lse.shape[1:]), -torch.inf)
        by_row[self._owner, self._ordinal] = lse
        share = by_row.softmax(1)[self._owner, self._ordinal]
        merged = lse.new_zeros(rows, *out.shape[1:]).index_add_(0, self._owner, out * share.unsqueeze(-1))
        return merged.to(query.dtype).view(rows, heads, dim)


def _place(blocks: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Ascending blocks as a slice, which is read in place, where they stand without gaps; else as an index."""
    low, high = int(blocks[0]), int(blocks[-1]) + 1
    return slice(low, high) if high - low == len(blocks) else torch.from_numpy(blocks).to(device)


def _at(stored: Tensor, where: slice | Tensor, width: int) -> Tensor:
    """The first `width` tokens of some blocks, [T, K, width, D]."""
    chosen = stored[where] if isinstance(where, slice) else stored.index_select(0, where)
    return chosen[:, :, :width]
