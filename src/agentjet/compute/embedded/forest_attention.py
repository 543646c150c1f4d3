"""Attention over a forest: each branch attends to its own past only, and shared prefixes are computed once.

`ForestPlan` is the plan on a CPU. The keys of each node are divided into parts that need no mask or a small one. The
log-sum-exps merge the parts exactly:

* *Blocks* cover every node once. An unbranched run attends to itself causally. Small subtrees share one block with the
  forest's interval mask.
* *Crossings*: all nodes below a run attend to the whole run. In depth-first order these queries are one interval, and
  so are the keys. Nothing is gathered or masked. Short runs are combined with the next ones below them.

The backward pass uses the same parts with the merged output and log-sum-exp. That is exact (as in ring attention).

`FlexPlan` is the plan on CUDA: `flex_attention`, one fused kernel a layer, with the mask `kv <= q < end[kv]`. The
smallest and largest `end` of a tile's keys show which 128 x 128 tiles are empty, full or mixed. So the tile table needs
no N x N mask.

`flex_attention` has no backward pass on a CPU, so only tests on a GPU cover it. `model.py` tries the forward pass when
a model is loaded, so it detects a kernel that fails or computes another result.

Shapes: N nodes, H query heads, K key heads, D head width; a part has Q queries and L keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentjet.compute.embedded.attention import AttentionPlan, attend_part, attend_part_backward
from agentjet.timeline.forest import Forest

BLOCK_TOKENS = 256
"""Largest subtree that attends to itself under a mask. Larger ones are cut at their branches."""
MIN_CROSSING_TOKENS = 128
"""Minimum number of keys of a crossing. Shorter runs are combined."""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Nodes `start:stop` that attend to each other: under the interval mask if `branched`, else causally."""

    start: int
    stop: int
    branched: bool


@dataclass(frozen=True, slots=True)
class Crossing:
    """Queries `start:stop`, which all attend to all of `runs`."""

    start: int
    stop: int
    runs: tuple[Interval, ...]


def cut(
    forest: Forest, block_tokens: int = BLOCK_TOKENS, crossing_tokens: int = MIN_CROSSING_TOKENS
) -> tuple[list[AttentionBlock], list[Crossing]]:
    """Returns the parts of a forest. Through them, every node attends to its path to the root exactly once."""
    blocks: list[AttentionBlock] = []
    crossings: list[Crossing] = []
    run_stops = forest.run_stops()

    def run_stop(start: int) -> int:
        return int(run_stops[np.searchsorted(run_stops, start, side="right")])

    def add_block(start: int, stop: int, above: tuple[Interval, ...]) -> None:
        if start < stop:
            blocks.append(AttentionBlock(start, stop, run_stop(start) < stop))
            if above:
                crossings.append(Crossing(start, stop, above))

    # Sibling subtrees `packed:last`, and the runs above them that have no crossing yet.
    pending: list[tuple[int, int, tuple[Interval, ...]]] = [(0, forest.num_nodes, ())]
    while pending:
        packed, last, above = pending.pop()
        child = packed
        while child < last:  # Small neighbours share a block. The first run of a large subtree is a block.
            end = int(forest.end[child])
            if end - packed > block_tokens:
                add_block(packed, child, above)
                packed = child
            if end - child > block_tokens:
                packed, stop = end, run_stop(child)
                add_block(child, stop, above)
                below = (*above, (child, stop))
                if stop < end and sum(b - a for a, b in below) >= crossing_tokens:
                    crossings.append(Crossing(stop, end, below))
                    below = ()
                pending.append((stop, end, below))
            child = end
        add_block(packed, last, above)
    return blocks, crossings


KeyValues = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [P, K, D] of P nodes, by layer."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries that attend to some keys: all to all, causally, or under a mask [Q, L] of 0 and -inf.

    A part must not hold computed tensors. Each layer's gradient function holds the parts, and the keys and values hold
    the layers below. A plan in their place would keep itself alive, because no collector sees cycles through autograd.
    """

    queries: slice
    keys: slice | Tensor
    mask: Tensor | None = None
    causal: bool = False


def _parts(forest: Forest, num_past: int) -> list[_Part]:
    """Returns the parts of a forest. All of its nodes see the `num_past` nodes whose keys stand before its own."""
    blocks, crossings = cut(forest)
    parts = []
    for block in blocks:
        own, mask = slice(block.start, block.stop), None
        if block.branched:
            nodes = torch.arange(block.start, block.stop)
            end = torch.from_numpy(forest.end[own])
            hidden = (nodes[None, :] > nodes[:, None]) | (nodes[:, None] >= end[None, :])
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        keys = slice(num_past + block.start, num_past + block.stop)
        parts.append(_Part(own, keys, mask, causal=mask is None))
    parts += [_Part(slice(c.start, c.stop), _keys(c.runs, num_past)) for c in crossings]
    return [*parts, _Part(slice(None), slice(num_past))] if num_past else parts


def _keys(runs: tuple[Interval, ...], num_past: int) -> slice | Tensor:
    """Returns the indices of the runs' nodes: for a single run a slice, which needs no copy."""
    if len(runs) == 1:
        return slice(num_past + runs[0][0], num_past + runs[0][1])
    return torch.from_numpy(num_past + np.concatenate([np.arange(*run) for run in runs]))


class ForestPlan:
    """The attention plan of one forward pass over a forest on a CPU. Every layer reuses it."""

    def __init__(self, forest: Forest, past: KeyValues | None = None) -> None:
        """`past` are nodes that were computed before. Every node of the forest sees them; gradients flow to them."""
        self._past = past or {}
        self._parts = _parts(forest, len(next(iter(self._past.values()))[0]) if self._past else 0)
        self._computed: KeyValues | None = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        if self._computed is not None:
            self._computed[layer] = key, value
        if layer in self._past:
            key, value = (torch.cat(pair) for pair in zip(self._past[layer], (key, value), strict=True))
        out: Tensor = _ForestAttention.apply(query, key, value, scale, self._parts)  # type: ignore[no-untyped-call]
        return out

    def take_computed(self) -> KeyValues:
        """Returns keys and values of the forest's own nodes, and records no more: a layer may be computed again."""
        computed, self._computed = self._computed or {}, None
        return computed


class _ForestAttention(torch.autograd.Function):
    """Maps queries [N, H, D] and keys and values [P + N, K, D] to [N, H, D], part by part."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, parts: list[_Part]) -> Tensor:
        q, k, v = _heads_first(query, _expand(key, query), _expand(value, query))
        accurate = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:2], value.shape[2]), dtype=accurate)
        (merged,) = _heads_first(out)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=accurate).T[None]
        for part in parts:
            own, mask = part.queries, None if part.mask is None else part.mask.to(query.dtype)
            found = attend_part(q[:, :, own], k[:, :, part.keys], v[:, :, part.keys], scale, mask, causal=part.causal)
            _merge(merged[:, :, own], lse[:, :, own], *found)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale, ctx.parts = scale, parts
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = _expand(key, query), _expand(value, query)
        gradients = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, keys, values)]
        grad, q, k, v, merged = _heads_first(grad_outputs[0], query, keys, values, out)
        for part in ctx.parts:
            own, seen = part.queries, part.keys
            found = attend_part_backward(
                *(grad[:, :, own], q[:, :, own], k[:, :, seen], v[:, :, seen], merged[:, :, own], lse[:, :, own]),
                *(ctx.scale, part.mask),
                causal=part.causal,
            )
            for total, where, gradient in zip(_heads_first(*gradients), (own, seen, seen), found, strict=True):
                total[:, :, where] += gradient
        grad_q, grad_k, grad_v = gradients
        return grad_q.to(query.dtype), _contract(grad_k, key), _contract(grad_v, value), None, None


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Reshape [N, H, D] to [1, H, N, D]."""
    return tuple(tensor.transpose(0, 1)[None] for tensor in tensors)


def _expand(heads: Tensor, query: Tensor) -> Tensor:
    """Repeat key heads [N, K, D] to [N, H, D], one for every query head."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _contract(grad: Tensor, like: Tensor) -> Tensor:
    """Returns the gradient of `_expand`."""
    n, k, d = like.shape
    return grad.reshape(n, k, -1, d).sum(2).to(like.dtype)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part's output [B, H, Q, D] and log-sum-exp [B, H, Q] into those of the same queries, in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).add_(part * (part_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


TILE = 128
"""Edge of a tile of the mask. Passes are padded to a multiple of it."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexPlan:
    """The attention plan of one forward pass over a forest on CUDA. Every layer reuses the tile table."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._num_nodes = forest.num_nodes
        self._padding = -forest.num_nodes % TILE
        # A padded node ends right after itself: it attends to itself only, and no other node attends to it.
        padding = np.arange(forest.num_nodes, forest.num_nodes + self._padding, dtype=np.int32) + 1
        self._tiles = tile_mask(np.concatenate([forest.end, padding]), device)
        self._flex: Callable[..., Any] = compiled_flex() if device.type == "cuda" else cast(Any, flex_attention)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        inputs = (F.pad(x, (0, 0, 0, 0, 0, self._padding)) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = self._flex(*_heads_first(*inputs), block_mask=self._tiles, scale=scale, enable_gqa=grouped)
        return cast(Tensor, out[0].transpose(0, 1)[: self._num_nodes])


def forest_plan(forest: Forest, device: torch.device, past: KeyValues | None = None) -> AttentionPlan:
    """Returns the attention plan of a forest for a device. On CUDA nothing is computed before."""
    return FlexPlan(forest, device) if device.type == "cuda" else ForestPlan(forest, past)


def interval_mask(end: Tensor) -> MaskMod:
    """Returns the mask function of a forest for `flex_attention`: a node sees itself and its ancestors."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return sees


def tile_mask(end: NDArray[np.int32], device: torch.device) -> BlockMask:
    """Returns the tile table of a forest with a multiple of `TILE` nodes."""
    tiles = end.reshape(-1, TILE)
    number = np.arange(len(tiles))
    start, before = number * TILE, number[None, :] < number[:, None]  # [query tile, key tile]
    touched = before & (tiles.max(1)[None, :] > start[:, None])
    full = before & (tiles.min(1)[None, :] >= start[:, None] + TILE)
    mixed = (touched & ~full) | np.eye(len(tiles), dtype=bool)
    return BlockMask.from_kv_blocks(
        *_table(mixed, device),
        *_table(full, device),
        BLOCK_SIZE=TILE,
        mask_mod=interval_mask(torch.from_numpy(end).to(device)),
    )


def _table(chosen: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the number of chosen key tiles of each query tile, and the key tiles, chosen ones first."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    count = chosen.sum(1).astype(np.int32)
    return torch.from_numpy(count)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """Returns `flex_attention`, compiled once a process, with dynamic shapes because forests differ in size."""
    return torch.compile(flex_attention, dynamic=True)
