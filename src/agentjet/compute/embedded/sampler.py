"""Continuous batching: every step computes waiting prompts and one new token for every running completion.

A request is independent of the others: its own parameters, its own random numbers, its own end. `step` is called by
the worker's
loop; nothing here blocks or runs in a thread. After the weights change call `invalidate`: running
completions go on under the new weights, from keys computed again, and their later tokens say so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from agentjet.compute.embedded.attention import causal_tail_mask, flat_forward, group_queries, ungroup_queries
from agentjet.compute.embedded.cache import Arena, Cache, Row
from agentjet.compute.embedded.model import Policy
from agentjet.compute.embedded.picking import pick
from agentjet.errors import OutOfCache
from agentjet.types import FinishReason, SamplingParams

PREFILL_TOKENS = 2048
"""Prompt tokens computed in one step, so that running completions never wait long for somebody's long prompt."""
SPARSE = 1.5
"""An arena is read in place while its span is at most this many times its running rows, gathered beyond."""


@dataclass(slots=True, eq=False)
class Completion:
    """A request on its way."""

    id: int
    prompt: np.ndarray
    params: SamplingParams
    uniforms: np.random.Generator
    row: Row | None = None
    num_sampled: int = 0

    @property
    def started(self) -> Row:
        assert self.row is not None
        return self.row


@dataclass(frozen=True, slots=True)
class NewToken:
    """One sampled token of completion `id`."""

    id: int
    token: int
    logprob: float
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Sampler:
    """Samples completions of one policy, up to `max_concurrent` at a time."""

    policy: Policy
    max_concurrent: int
    cache_tokens: int
    _cache: Cache = field(init=False)
    _waiting: deque[Completion] = field(default_factory=deque)
    _running: dict[int, Completion] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._waiting

    def submit(self, id: int, prompt: np.ndarray, params: SamplingParams) -> None:
        """Queue a request; raises `OutOfCache` when it could never be held."""
        length = len(prompt) + params.max_tokens
        if not self._cache.fits(length):
            raise OutOfCache(
                f"{len(prompt)} prompt tokens + max_tokens = {params.max_tokens} exceed what the sampler can hold "
                f"(context {self.policy.card.context_length}, sampler.cache_tokens = {self.cache_tokens})"
            )
        self._waiting.append(Completion(id, prompt, params, np.random.default_rng(params.seed)))

    def cancel(self, id: int) -> None:
        """Forget a request; unknown ids are ignored, since it may just have ended."""
        running = self._running.pop(id, None)
        if running is not None:
            self._cache.release(running.started)
        else:
            self._waiting = deque(c for c in self._waiting if c.id != id)

    def invalidate(self) -> None:
        """The weights changed: no key computed under the old ones is used again."""
        self._cache.clear()

    @torch.inference_mode()
    def step(self) -> list[NewToken]:
        """Admit, compute prompts, sample one token for every completion whose prompt is computed."""
        self._admit()
        self._prefill()
        ready = [c for c in self._running.values() if c.started.filled == c.started.length - 1]
        return self._decode(ready) if ready else []

    def _admit(self) -> None:
        deferred: deque[Completion] = deque()
        while self._waiting and len(self._running) < self.max_concurrent:
            completion = self._waiting.popleft()
            completion.row = self._cache.acquire(
                completion.prompt, len(completion.prompt) + completion.params.max_tokens
            )
            if completion.row is None:
                deferred.append(completion)
            else:
                self._running[completion.id] = completion
        self._waiting = deferred + self._waiting

    def _prefill(self) -> None:
        """Compute up to `PREFILL_TOKENS` prompt tokens, all but each prompt's last, in order of arrival."""
        budget = PREFILL_TOKENS
        spans: list[tuple[Row, int]] = []
        for completion in self._running.values():
            row = completion.started
            missing = min(row.length - 1 - row.filled, budget)
            if missing > 0:
                spans.append((row, missing))
                budget -= missing
        if not spans:
            return
        tokens = np.concatenate([row.tokens[row.filled : row.filled + n] for row, n in spans])
        positions = np.concatenate([np.arange(row.filled, row.filled + n) for row, n in spans])
        self._forward(tokens, positions, _PrefillPlan(spans, self.policy.device))
        for row, n in spans:
            row.filled += n

    def _decode(self, completions: list[Completion]) -> list[NewToken]:
        by_arena: dict[int, list[Completion]] = {}
        for c in completions:
            by_arena.setdefault(c.started.arena.capacity, []).append(c)
        ordered = [c for group in by_arena.values() for c in group]
        rows = [c.started for c in ordered]
        tokens = np.array([row.tokens[row.filled] for row in rows])
        positions = np.array([row.filled for row in rows])
        plan = _DecodePlan([[c.started for c in group] for group in by_arena.values()], self.policy.device)
        hidden = self._forward(tokens, positions, plan)
        chosen, logprobs = pick(
            self.policy.head(hidden), [c.params for c in ordered], [c.uniforms.random() for c in ordered]
        )
        new = []
        for c, token, logprob in zip(ordered, chosen, logprobs, strict=True):
            row = c.started
            row.filled += 1
            c.num_sampled += 1
            reason: FinishReason | None = None
            if token in self.policy.end_tokens:
                reason = "stop"
            elif c.num_sampled == c.params.max_tokens:
                reason = "length"
            if reason is None:
                row.append(token)
            else:
                del self._running[c.id]
                self._cache.release(row)
            new.append(NewToken(c.id, token, logprob, reason))
        return new

    def _forward(self, tokens: np.ndarray, positions: np.ndarray, plan: _PrefillPlan | _DecodePlan) -> Tensor:
        device = self.policy.device
        return flat_forward(
            self.policy.decoder,
            torch.as_tensor(tokens, dtype=torch.long, device=device),
            torch.as_tensor(positions, dtype=torch.long, device=device),
            plan,
        )


class _PrefillPlan:
    """Each span's tokens attend to their own row's past and, causally, to themselves."""

    def __init__(self, spans: list[tuple[Row, int]], device: torch.device) -> None:
        self._spans = spans
        self._masks = [causal_tail_mask(n, row.filled + n, device) for row, n in spans]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(query)
        start = 0
        for (row, n), mask in zip(self._spans, self._masks, strict=True):
            end, total = start + n, row.filled + n
            keys, values = row.arena.keys[layer, row.index], row.arena.values[layer, row.index]
            keys[:, row.filled : total] = key[start:end].transpose(0, 1)
            values[:, row.filled : total] = value[start:end].transpose(0, 1)
            heads, kv_heads = query.shape[1], key.shape[1]
            attended = F.scaled_dot_product_attention(
                group_queries(query[start:end], kv_heads)[None],
                keys[None, :, :total],
                values[None, :, :total],
                attn_mask=mask.repeat(heads // kv_heads, 1),
                scale=scale,
            )
            out[start:end] = ungroup_queries(attended[0], heads)
            start = end
        return out


class _DecodePlan:
    """One token a row; the rows of an arena attend together, each up to its own length."""

    def __init__(self, groups: list[list[Row]], device: torch.device) -> None:
        self._groups = [_ArenaRows(rows, device) for rows in groups]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        sizes = [g.num_rows for g in self._groups]
        parts, keys, values = (torch.split(tensor, sizes) for tensor in (query, key, value))
        return torch.cat(
            [g.attend(layer, q, k, v, scale) for g, q, k, v in zip(self._groups, parts, keys, values, strict=True)]
        )


class _ArenaRows:
    """The running rows of one arena: read in place where they stand close together, gathered where they do not."""

    def __init__(self, rows: list[Row], device: torch.device) -> None:
        self._arena: Arena = rows[0].arena
        self.num_rows = len(rows)
        indices = [row.index for row in rows]
        lengths = [row.filled + 1 for row in rows]
        self._index = torch.tensor(indices, device=device)
        self._last = torch.tensor([row.filled for row in rows], device=device)
        self._longest = max(lengths)
        low, high = min(indices), max(indices) + 1
        self._span = slice(low, high) if high - low <= SPARSE * self.num_rows else None
        visible = torch.ones(high - low if self._span else self.num_rows, dtype=torch.long, device=device)
        self._slots = self._index - low if self._span else torch.arange(self.num_rows, device=device)
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
