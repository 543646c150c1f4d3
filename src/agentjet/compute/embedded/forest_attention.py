"""Attention over a forest: each branch attends to its own past only, and shared prefixes are computed once.

`ForestPlan` is the plan on a CPU. A dense N x N mask would cost more than the forest saves. Instead, the keys of each
node are divided into parts that need no mask or a small one. The log-sum-exps merge the parts exactly:

* *Blocks* cover every node once. An unbranched run attends to itself causally. Small subtrees share one block with the
  forest's interval mask.
* *Crossings*: all nodes below a run attend to the whole run. In depth-first order these queries are one interval, and
  so are the keys. Nothing is gathered or masked. Short runs are combined with the next ones below them.

The backward pass uses the same parts with the merged output and log-sum-exp. That is exact (as in ring attention).

`FlexPlan` is the plan on CUDA: `flex_attention`, one fused kernel a layer, with the mask `kv <= q < end[kv]`. The
smallest and largest `end` of a tile's keys show which 128 x 128 tiles are empty, full or mixed. So the tile table needs
no N x N mask.

On a CPU, tests compare the tile table and the forward pass of `FlexPlan`, eager and compiled, with `ForestPlan`. Never
run: the backward pass, which `flex_attention` does not have on a CPU, and CUDA. `model.py` tries the forward pass
when a model is loaded, so it detects a kernel that fails or computes another result.

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

from agentjet.compute.embedded.attention import AttentionPlan, Gradients, attend_part, attend_part_backward
from agentjet.timeline.forest import Forest

BLOCK_TOKENS = 256
"""Largest subtree that attends to itself under a mask. Larger ones are cut at their branches."""
MIN_CROSSING_TOKENS = 128
"""Minimum number of keys of a crossing. Shorter runs are combined."""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Nodes `start:stop` that attend to each other: under the interval mask if `branched`, else causally.

    `ancestors` are the runs above all of them, root first.
    """

    start: int
    stop: int
    branched: bool
    ancestors: tuple[Interval, ...]


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
    cutting = _Cutting(forest, block_tokens, crossing_tokens)
    pending: list[_Siblings] = [_Siblings(0, forest.num_nodes, (), 0)]
    while pending:
        pending += cutting.siblings(pending.pop())
    return cutting.blocks, cutting.crossings


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Sibling subtrees `start:stop` below `ancestors`. The last `uncrossed` runs have no crossing yet."""

    start: int
    stop: int
    ancestors: tuple[Interval, ...]
    uncrossed: int

    @property
    def open_runs(self) -> tuple[Interval, ...]:
        return self.ancestors[len(self.ancestors) - self.uncrossed :]


class _Cutting:
    """Collects the parts of a forest."""

    def __init__(self, forest: Forest, block_tokens: int, crossing_tokens: int) -> None:
        self._end = forest.end
        self._block_tokens = block_tokens
        self._crossing_tokens = crossing_tokens
        self._run_stops = forest.run_stops()
        self.blocks: list[AttentionBlock] = []
        self.crossings: list[Crossing] = []

    def siblings(self, group: _Siblings) -> list[_Siblings]:
        """Cut one group; returns the groups below it. Small neighbours share a block."""
        below: list[_Siblings] = []
        child = packed = group.start
        while child < group.stop:
            end = int(self._end[child])
            if end - packed > self._block_tokens:
                self._block(group, packed, child)
                packed = child
            if end - child > self._block_tokens:
                below += self._large(group, child, end)
                packed = end
            child = end
        self._block(group, packed, group.stop)
        return below

    def _large(self, group: _Siblings, start: int, end: int) -> list[_Siblings]:
        """Cut a subtree that is too large for a block: its first run is a block; returns the groups below."""
        stop = self._run_stop(start)
        self._block(group, start, stop)
        if stop == end:
            return []
        below = _Siblings(stop, end, (*group.ancestors, (start, stop)), group.uncrossed + 1)
        if sum(b - a for a, b in below.open_runs) < self._crossing_tokens:
            return [below]
        self.crossings.append(Crossing(stop, end, below.open_runs))
        return [_Siblings(stop, end, below.ancestors, 0)]

    def _block(self, group: _Siblings, start: int, stop: int) -> None:
        if start == stop:
            return
        self.blocks.append(AttentionBlock(start, stop, self._run_stop(start) < stop, group.ancestors))
        if group.uncrossed:
            self.crossings.append(Crossing(start, stop, group.open_runs))

    def _run_stop(self, start: int) -> int:
        """Returns the end of the unbranched run that contains `start`."""
        return int(self._run_stops[np.searchsorted(self._run_stops, start, side="right")])


KeyValues = dict[int, tuple[Tensor, Tensor]]
"""Keys and values [P, K, D] of P nodes, by layer."""


class ForestParts:
    """The parts of a forest with their masks: everything that the backward pass needs.

    It must not hold computed tensors. Each layer's gradient function holds this object, and the keys and values hold
    the layers below. A plan in its place would keep itself alive, because no collector sees cycles through autograd.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        blocks, crossings = cut(forest)
        self._forest = forest
        self._device = device
        self._masks: dict[torch.dtype, list[Tensor | None]] = {}
        self.blocks = blocks
        self.crossings = [(slice(c.start, c.stop), _keys(c.runs, device)) for c in crossings]

    def masks(self, dtype: torch.dtype) -> list[Tensor | None]:
        """Returns the mask of each block, [Q, Q] of 0 and -inf; None for causal blocks."""
        if dtype not in self._masks:
            self._masks[dtype] = [self._mask(block, dtype) if block.branched else None for block in self.blocks]
        return self._masks[dtype]

    def _mask(self, block: AttentionBlock, dtype: torch.dtype) -> Tensor:
        nodes = np.arange(block.start, block.stop)
        end = self._forest.end[block.start : block.stop]
        visible = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < end[None, :])
        mask = torch.zeros(visible.shape, dtype=dtype)
        return mask.masked_fill_(~torch.from_numpy(visible), -torch.inf).to(self._device)


class ForestPlan:
    """The attention plan of one forward pass over a forest on a CPU. Every layer reuses it."""

    def __init__(self, forest: Forest, device: torch.device, past: KeyValues | None = None) -> None:
        """`past` are nodes that were computed before. Every node of the forest sees them; gradients flow to them."""
        self._parts = ForestParts(forest, device)
        self._past = past or {}
        self.computed: KeyValues = {}
        """Keys and values of the forest's own nodes."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        self.computed[layer] = key, value
        past = self._past.get(layer, (None, None))
        out: Tensor = _ForestAttention.apply(query, key, value, *past, scale, self._parts)  # type: ignore[no-untyped-call]
        return out


def _keys(runs: tuple[Interval, ...], device: torch.device) -> slice | Tensor:
    """Returns the indices of the runs' nodes: for a single run a slice, which needs no copy."""
    if len(runs) == 1:
        return slice(*runs[0])
    return torch.from_numpy(np.concatenate([np.arange(*run) for run in runs])).to(device)


class _ForestAttention(torch.autograd.Function):
    """Maps [N, H, D] queries, [N, K, D] keys and values and an optional [P, K, D] past to [N, H, D], part by part."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past_key: Tensor | None,
        past_value: Tensor | None,
        scale: float,
        parts: ForestParts,
    ) -> Tensor:
        keys, values = _expand(key, query), _expand(value, query)
        accurate = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
        out = query.new_empty((*query.shape[:2], value.shape[2]), dtype=accurate)
        lse = query.new_empty(query.shape[:2], dtype=accurate)
        for block, mask in zip(parts.blocks, parts.masks(query.dtype), strict=True):
            own = slice(block.start, block.stop)
            out[own], lse[own] = attend_part(query[own], keys[own], values[own], scale, mask, causal=mask is None)
        for own, seen in parts.crossings:
            _merge(out[own], lse[own], *attend_part(query[own], keys[seen], values[seen], scale))
        if past_key is not None and past_value is not None:
            _merge(out, lse, *attend_part(query, _expand(past_key, query), _expand(past_value, query), scale))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, past_key, past_value, out, lse)
        ctx.scale, ctx.parts = scale, parts
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, past_key, past_value, out, lse = ctx.saved_tensors
        keys, values = _expand(key, query), _expand(value, query)
        grad_q, grad_k, grad_v = (torch.empty_like(x, dtype=lse.dtype) for x in (query, keys, values))
        heads_of_past: tuple[Tensor | None, Tensor | None] = (None, None)

        def part(own: slice, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Gradients:
            return attend_part_backward(
                grad_outputs[0][own], query[own], k, v, out[own], lse[own], ctx.scale, mask, causal=causal
            )

        for block, mask in zip(ctx.parts.blocks, ctx.parts.masks(query.dtype), strict=True):
            own = slice(block.start, block.stop)
            grad_q[own], grad_k[own], grad_v[own] = part(own, keys[own], values[own], mask, mask is None)
        for own, seen in ctx.parts.crossings:
            q, k, v = part(own, keys[seen], values[seen])
            grad_q[own] += q
            _add(grad_k, seen, k)
            _add(grad_v, seen, v)
        if past_key is not None:
            q, k, v = part(slice(None), _expand(past_key, query), _expand(past_value, query))
            grad_q += q
            heads_of_past = _contract(k, past_key), _contract(v, past_value)
        own_gradients = grad_q.to(query.dtype), _contract(grad_k, key), _contract(grad_v, value)
        return *own_gradients, *heads_of_past, None, None


def _add(total: Tensor, seen: slice | Tensor, gradient: Tensor) -> None:
    if isinstance(seen, slice):
        total[seen] += gradient
    else:
        total.index_add_(0, seen, gradient.to(total.dtype))


def _expand(heads: Tensor, query: Tensor) -> Tensor:
    """Repeat key heads [N, K, D] to [N, H, D], one for every query head."""
    return heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1)


def _contract(grad: Tensor, like: Tensor) -> Tensor:
    """Returns the gradient of `_expand`."""
    n, k, d = like.shape
    return grad.reshape(n, k, -1, d).sum(2, dtype=torch.promote_types(grad.dtype, torch.float32)).to(like.dtype)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part's output [Q, H, D] and log-sum-exp [Q, H] into those of the same queries, in place."""
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
        out = cast(
            Tensor,
            self._flex(
                self._heads_first(query),
                self._heads_first(key),
                self._heads_first(value),
                block_mask=self._tiles,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            ),
        )
        return out[0].transpose(0, 1)[: self._num_nodes]

    def _heads_first(self, tensor: Tensor) -> Tensor:
        """Reshape [N, H, D] to [1, H, padded N, D]."""
        return F.pad(tensor, (0, 0, 0, 0, 0, self._padding)).transpose(0, 1)[None]


def forest_plan(forest: Forest, device: torch.device, past: KeyValues | None = None) -> AttentionPlan:
    """Returns the attention plan of a forest for a device. On CUDA nothing is computed before."""
    return FlexPlan(forest, device) if device.type == "cuda" else ForestPlan(forest, device, past)


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
