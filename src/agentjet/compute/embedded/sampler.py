"""Continuous batching in which every token-in-context is computed once, also between completions.

Completions of the same prompt share one row of the cache and one place in the batch for as long as they have sampled
the same tokens; where they part, the row branches. A request is otherwise independent of the others: its own
parameters, its own random numbers, its own end. `step` is called by the worker's loop; nothing here blocks or runs in
a thread. After the weights change call `invalidate`: running completions go on under the new weights, from keys
computed again.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentjet.compute.embedded.attention import causal_tail_mask, flat_forward, group_queries, ungroup_queries
from agentjet.compute.embedded.cache import Arena, Cache, Row
from agentjet.compute.embedded.grammar import Grammars, Guide
from agentjet.compute.embedded.picking import pick
from agentjet.compute.embedded.policy import Policy
from agentjet.errors import ComputeError, OutOfCache, Unfollowable
from agentjet.types import FinishReason, SamplingParams

PROMPT_TOKENS = 2048
"""Prompt tokens computed in one step, so that running completions never wait long for somebody's long prompt."""
SPARSE = 1.5
"""An arena is read in place while its span is at most this many times its running rows, gathered beyond."""


@dataclass(slots=True, eq=False)
class Completion:
    """A request on its way. `tokens` is its prompt, or all it has when it lost its place and waits for another."""

    id: int
    tokens: np.ndarray
    length: int
    """Of the prompt and the longest completion."""
    params: SamplingParams
    guide: Guide | None
    uniforms: np.random.Generator
    row: Row | None = None
    num_sampled: int = 0

    @property
    def place(self) -> Row:
        assert self.row is not None
        return self.row


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token of completion `id`, and the set it was chosen among (see `timeline.allowed`)."""

    id: int
    token: int
    logprob: float
    allowed: bytes
    finish_reason: FinishReason | None
    error: ComputeError | None = None
    """Why nothing can follow it although it is not the last: the completion is given up."""


@dataclass(slots=True)
class Sampler:
    """Samples completions of one policy, up to `max_concurrent` at a time."""

    policy: Policy
    max_concurrent: int
    cache_tokens: int
    _cache: Cache = field(init=False)
    _grammars: Grammars = field(init=False)
    _waiting: deque[Completion] = field(default_factory=deque)
    _running: dict[int, Completion] = field(default_factory=dict)
    num_computed: int = 0
    """Tokens computed since the start."""

    def __post_init__(self) -> None:
        self._grammars = Grammars(self.policy.card, self.policy.vocabulary)
        shape = self.policy.shape
        self._cache = Cache(
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
        """Queue a request; raises `OutOfCache` when it could never be held, `Unfollowable` for a bad grammar."""
        length = len(prompt) + params.max_tokens
        if not self._cache.fits(length):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {self.policy.card.context_length}, sampler.cache_tokens = {self.cache_tokens})"
            )
        guide = self._grammars.guide(params.grammar)
        self._waiting.append(Completion(id, prompt, length, params, guide, np.random.default_rng(params.seed)))

    def cancel(self, id: int) -> None:
        """Forget a request; unknown ids are ignored, since it may just have ended."""
        running = self._running.pop(id, None)
        if running is not None:
            self._leave(running)
        else:
            self._waiting = deque(c for c in self._waiting if c.id != id)

    def invalidate(self) -> None:
        """The weights changed: no key computed under the old ones is used again."""
        self._cache.clear()

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """One forward pass: the tokens that rows still miss, and one sampled token for every completion that has all.

        A row that was sampled from misses one token, a new prompt what no other row holds of it. Long prompts are
        spread over several steps, so that running completions never wait long for somebody else's.
        """
        self._admit()
        users: dict[int, list[Completion]] = {}
        for c in self._running.values():
            users.setdefault(id(c.place), []).append(c)
        if not users:
            return []
        rows = [completions[0].place for completions in users.values()]
        spans = _spans(rows)
        hidden = self._forward(spans)
        ready: list[tuple[int, list[Completion]]] = []
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
        if not self._waiting:
            return
        same = {c.place.tokens[: c.place.length].tobytes(): c.place for c in self._running.values()}
        deferred: deque[Completion] = deque()
        while self._waiting and len(self._running) < self.max_concurrent:
            completion = self._waiting.popleft()
            row = same.get(completion.tokens.tobytes())
            if row is None or row.arena.capacity < completion.length:
                row = self._cache.acquire(completion.tokens, completion.length)
            if row is None:
                deferred.append(completion)
                continue
            same[completion.tokens.tobytes()] = row
            self._join(completion, row)
        self._waiting = deferred + self._waiting

    def _join(self, completion: Completion, row: Row) -> None:
        row.users += 1
        completion.row = row
        self._running[completion.id] = completion

    def _leave(self, completion: Completion) -> None:
        row = completion.place
        row.users -= 1
        if not row.users:
            self._cache.release(row)

    def _sample(self, hidden: Tensor, shared: list[list[Completion]]) -> list[NewToken]:
        """One token for each completion; `shared` holds the completions of each row of `hidden`."""
        everyone = [c for completions in shared for c in completions]
        of = [i for i, completions in enumerate(shared) for _ in completions]
        chosen, logprobs, sets = pick(
            self.policy.head(hidden),
            of,
            [c.params for c in everyone],
            [c.guide.mask if c.guide else b"" for c in everyone],
            [c.uniforms.random() for c in everyone],
        )
        new: list[NewToken] = []
        goes_on: dict[int, dict[int, list[Completion]]] = {}
        for c, token, logprob, allowed in zip(everyone, chosen, logprobs, sets, strict=True):
            c.num_sampled += 1
            reason = finish_reason(self.policy, c.params, token, c.num_sampled)
            error = dead_end(c.guide, token, logprob, reason)
            new.append(NewToken(c.id, token, logprob, allowed, reason, error))
            if reason is None and error is None:
                goes_on.setdefault(id(c.place), {}).setdefault(token, []).append(c)
            else:
                del self._running[c.id]
                self._leave(c)
        for by_token in goes_on.values():
            self._branch(next(iter(by_token.values()))[0].place, by_token)
        return new

    def _branch(self, row: Row, by_token: dict[int, list[Completion]]) -> None:
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

    def _forward(self, spans: list[tuple[Row, int]]) -> Tensor:
        """Compute the next tokens of each row and store their keys; hidden states of all of them, in order."""
        device = self.policy.device
        tokens = np.concatenate([row.tokens[row.filled : row.filled + n] for row, n in spans])
        positions = np.concatenate([np.arange(row.filled, row.filled + n) for row, n in spans])
        self.num_computed += len(tokens)
        return flat_forward(
            self.policy.decoder,
            torch.as_tensor(tokens, dtype=torch.long, device=device),
            torch.as_tensor(positions, dtype=torch.long, device=device),
            _StepPlan(spans, device),
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
    return Unfollowable(refused) if refused else None


def _spans(rows: list[Row]) -> list[tuple[Row, int]]:
    """How many tokens of each row a step computes: rows that miss one token first, by arena, then prompts in order of
    arrival, up to `PROMPT_TOKENS` in all."""
    singles = sorted((row for row in rows if row.length - row.filled == 1), key=lambda row: row.arena.capacity)
    spans = [(row, 1) for row in singles]
    budget = PROMPT_TOKENS
    for row in rows:
        count = min(row.length - row.filled, budget)
        if row.length - row.filled > 1 and count:
            spans.append((row, count))
            budget -= count
    return spans


class _StepPlan:
    """Attention of one step. Single tokens attend by arena, each to its own row's past; a longer span attends to its
    row's past and, causally, to itself."""

    def __init__(self, spans: list[tuple[Row, int]], device: torch.device) -> None:
        singles = [row for row, n in spans if n == 1]
        by_arena = itertools.groupby(singles, key=lambda row: row.arena.capacity)
        self._parts: list[_ArenaRows | _Span] = [_ArenaRows(list(rows), device) for _, rows in by_arena]
        self._parts += [_Span(row, n, device) for row, n in spans if n > 1]
        self._sizes = [part.num_tokens for part in self._parts]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        queries, keys, values = (torch.split(tensor, self._sizes) for tensor in (query, key, value))
        parts = zip(self._parts, queries, keys, values, strict=True)
        return torch.cat([part.attend(layer, q, k, v, scale) for part, q, k, v in parts])


class _Span:
    """Several tokens of one row."""

    def __init__(self, row: Row, count: int, device: torch.device) -> None:
        self.num_tokens = count
        self._arena, self._index = row.arena, row.index
        self._start, self._stop = row.filled, row.filled + count
        self._mask = causal_tail_mask(count, self._stop, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._arena.keys[layer, self._index], self._arena.values[layer, self._index]
        keys[:, self._start : self._stop] = key.transpose(0, 1)
        values[:, self._start : self._stop] = value.transpose(0, 1)
        heads, kv_heads = query.shape[1], key.shape[1]
        out = F.scaled_dot_product_attention(
            group_queries(query, kv_heads)[None],
            keys[None, :, : self._stop],
            values[None, :, : self._stop],
            attn_mask=self._mask.repeat(heads // kv_heads, 1),
            scale=scale,
        )
        return ungroup_queries(out[0], heads)


class _ArenaRows:
    """The running rows of one arena: read in place where they stand close together, gathered where they do not."""

    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self._arena: Arena = rows[0].arena
        self.num_tokens = len(rows)
        indices = [row.index for row in rows]
        lengths = [row.filled + 1 for row in rows]
        self._index = torch.tensor(indices, device=device)
        self._last = torch.tensor([row.filled for row in rows], device=device)
        self._longest = max(lengths)
        low, high = min(indices), max(indices) + 1
        self._span = slice(low, high) if high - low <= SPARSE * self.num_tokens else None
        visible = torch.ones(high - low if self._span else self.num_tokens, dtype=torch.long, device=device)
        self._slots = self._index - low if self._span else torch.arange(self.num_tokens, device=device)
        visible[self._slots] = torch.tensor(lengths, device=device)
        self._mask = (torch.arange(self._longest, device=device)[None, :] < visible[:, None])[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._arena.keys[layer], self._arena.values[layer]
        keys[self._index, :, self._last] = key
        values[self._index, :, self._last] = value
        rows, heads, dim = query.shape
        kv_heads = key.shape[1]
        where = self._span if self._span is not None else self._index
        keys, values = keys[where, :, : self._longest], values[where, :, : self._longest]
        spread = query
        if len(keys) != rows or self._span is not None:
            spread = query.new_zeros(len(keys), heads, dim)
            spread[self._slots] = query
        out = F.scaled_dot_product_attention(
            spread.view(len(keys), kv_heads, heads // kv_heads, dim), keys, values, attn_mask=self._mask, scale=scale
        )
        return out.reshape(len(keys), heads, dim)[self._slots]
