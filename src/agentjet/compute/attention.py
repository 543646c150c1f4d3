"""The attention plans: which tokens of one forward pass attend to which, and how that is computed.

The model is a stock `transformers` model, and the tokens of all sequences or branches form one flat row.

| | CPU | CUDA |
|---|---|---|
| learning on a forest | `ForestPlan` | `FlexPlan` |
| a sampling step over the cache | `StepPlan` | `PagedPlan`, in CUDA graphs by `DecodeGraphs` |

On a CPU, partial results over some of the keys are merged by their log-sum-exps. `torch`'s public attention does not
return the log-sum-exp, and its autograd would differentiate each part alone. So this module calls the fused kernel of
the CPU below it. On CUDA nothing is merged: `flex_attention` is one fused kernel a layer.

`flex_attention` has no backward pass on a CPU, so only tests on a GPU cover it. `model.py` tries the forward pass when
a model is loaded, so it detects a kernel that fails or computes another result.

Shapes: N tokens or nodes, B parts or blocks of the cache, Q queries, L keys, H heads, K key heads, D widths, T tiles of
queries, W blocks of a tile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.policy import Policy, first_line
from agentjet.compute.recurrence import Recurrence, States, computing
from agentjet.timeline.forest import Forest

log = logging.getLogger(__name__)

ATTENTION = "agentjet_plan"
UNSUPPORTED_ARGUMENTS = ("sinks", "position_bias")
"""Arguments of attention variants that a plan does not compute."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """A layer's attention besides causal: functions of two depths on one path, and of a score. 0 means none."""

    window: int = 0
    """A token sees itself and the `window - 1` tokens before it."""
    chunk: int = 0
    """A token sees the tokens of its chunk of the path only."""
    cap: float = 0.0
    """A score `s` becomes `cap * tanh(s / cap)`."""

    def lowest(self, depth: int) -> int:
        """Returns the lowest depth that a token of this depth sees."""
        low = depth - self.window + 1 if self.window else 0
        return max(low, depth // self.chunk * self.chunk if self.chunk else 0)

    def within(self, depth: int) -> AttentionKind:
        """Returns the kind without limits that no token up to `depth` reaches."""
        return replace(self, window=self.window * (self.window <= depth), chunk=self.chunk * (self.chunk <= depth))


PLAIN = AttentionKind()


class AttentionPlan(Protocol):
    """Computes the attention of one forward pass over a flat row of tokens."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        kind: AttentionKind = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Returns [N, H, E] for `query` [N, H, D], `key` [N, K, D] and `value` [N, K, E] of the pass's own tokens.

        `sinks` [H] are scores of one more key of each head, whose value is 0.
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """`transformers`' attention signature: [1, heads, N, D] in, [1, N, heads, E] out.

    Raises `NotImplementedError` for what a plan does not compute; the model then keeps its own attention.
    """
    if unsupported := [name for name in UNSUPPORTED_ARGUMENTS if unused.get(name) is not None]:
        raise NotImplementedError(f"attention with {', '.join(unsupported)}")
    assert plan is not None, "this model runs under an attention plan only"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    kind = AttentionKind(sliding_window or 0, _chunk(module), softcap or 0.0)
    heads = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return plan.attend(layer, *heads, scale, kind, s_aux).unsqueeze(0), None


def _chunk(module: nn.Module) -> int:
    """Returns the chunk of a layer, which `transformers` puts into masks and not into arguments."""
    config, layer = cast(Any, module).config, cast(Any, module).layer_idx
    kinds = getattr(config, "layer_types", None)
    return int(config.attention_chunk_size) if kinds and kinds[layer] == "chunked_attention" else 0


AttentionInterface.register(ATTENTION, _attention)


def flat_forward(decoder: nn.Module, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
    """Returns hidden states [N, hidden] of a flat row of tokens [N] at the given positions [N]."""
    with computing(getattr(plan, "recurrence", None)):
        out = decoder(input_ids=tokens[None], position_ids=positions[None], use_cache=False, plan=plan)
    hidden: Tensor = out.last_hidden_state
    return hidden[0]


FEW_KEYS = 384
"""With fewer keys, the fused backward pass is up to four times faster in float32 than in bfloat16."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and log-sum-exp [B, H, Q] of queries [B, H, Q, D], keys and values [B, H, L, D].

    `mask` is added to the scores [B, H, Q, L]. Every query must see at least one key. All tensors are on a CPU.
    """
    out, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def attend_capped(
    query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns `attend_part` with capped scores. The fused kernels have no cap."""
    scores = cap * torch.tanh(query @ key.mT * (scale / cap))
    scores = (scores if mask is None else scores + mask).to(torch.promote_types(query.dtype, torch.float32))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(value.dtype) @ value, lse


def attend_capped_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    cap: float,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `attend_part_backward` with capped scores."""
    grad_out, query, key, value, out = (x.to(lse.dtype) for x in (grad_out, query, key, value, out))
    bent = torch.tanh(query @ key.mT * (scale / cap))
    scores = cap * bent if mask is None else cap * bent + mask
    share = (scores - lse[..., None]).exp_()
    grad = share * (grad_out @ value.mT - (grad_out * out).sum(-1, keepdim=True)) * (1 - bent * bent) * scale
    return grad @ key, grad.mT @ query, share.mT @ grad_out


def attend_part_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value through one part; `out` and `lse` are those of all parts."""
    if key.shape[2] < FEW_KEYS and query.dtype != lse.dtype:
        grad_out, query, key, value, out = (x.to(lse.dtype) for x in (grad_out, query, key, value, out))
    mask = None if mask is None else mask.to(query.dtype)
    q, k, v = _flash_backward(grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return q, k, v


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


def _tiles(forest: Forest, num_past: int, kind: AttentionKind) -> list[_Part]:
    """Returns parts for another kind of attention: one for each tile of queries, with all keys that these see.

    The `num_past` nodes are the path above the forest's roots. Depths count from the root of the whole tree.
    """
    blocks, _ = cut(forest)
    depth = np.concatenate([np.arange(num_past), forest.depth])
    parts = []
    for block in blocks:
        size = block.stop - block.start if block.branched else BLOCK_TOKENS
        for start in range(block.start, block.stop, size):
            stop = min(start + size, block.stop)
            path = np.concatenate([np.arange(num_past), num_past + np.flatnonzero(forest.end[:start] > start)])
            path = path[kind.lowest(int(forest.depth[start])) :]
            keys = np.concatenate([path, np.arange(num_past + start, num_past + stop)])
            nodes = np.arange(start, stop)
            lowest = np.array([kind.lowest(int(d)) for d in forest.depth[start:stop]])
            hidden = depth[keys][None, :] < lowest[:, None]
            hidden[:, len(path) :] |= nodes[None, :] > nodes[:, None]
            hidden[:, len(path) :] |= nodes[:, None] >= forest.end[start:stop][None, :]
            mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -torch.inf)
            parts.append(_Part(slice(start, stop), torch.from_numpy(keys), mask))
    return parts


def _keys(runs: tuple[Interval, ...], num_past: int) -> slice | Tensor:
    """Returns the indices of the runs' nodes: for a single run a slice, which needs no copy."""
    if len(runs) == 1:
        return slice(num_past + runs[0][0], num_past + runs[0][1])
    return torch.from_numpy(num_past + np.concatenate([np.arange(*run) for run in runs]))


class ForestPlan:
    """The attention plan of one forward pass over a forest on a CPU. Every layer reuses it.

    Each branch attends to its own past only, and shared prefixes are computed once. The keys of each node are divided
    into parts that need no mask or a small one. The log-sum-exps merge the parts exactly:

    * *Blocks* cover every node once. An unbranched run attends to itself causally. Small subtrees share one block with
      the forest's interval mask.
    * *Crossings*: all nodes below a run attend to the whole run. In depth-first order these queries are one interval,
      and so are the keys. Nothing is gathered or masked. Short runs are combined with the next ones below them.

    The backward pass uses the same parts with the merged output and log-sum-exp. That is exact (as in ring attention).
    """

    def __init__(self, forest: Forest, past: KeyValues | None = None, states: States | None = None) -> None:
        """`past` are nodes that were computed before. Every node of the forest sees them; gradients flow to them.

        `states` are what recurrent layers carry below those nodes.
        """
        self._past = past or {}
        self.recurrence = Recurrence(forest, states)
        self._forest = forest
        self._deepest = int(forest.depth.max(initial=0))
        self._num_past = len(next(iter(self._past.values()))[0]) if self._past else 0
        self._parts: dict[AttentionKind, list[_Part]] = {}
        self._computed: KeyValues | None = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        kind: AttentionKind = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self._computed is not None:
            self._computed[layer] = key, value
        if layer in self._past:
            key, value = (torch.cat(pair) for pair in zip(self._past[layer], (key, value), strict=True))
        kind, width = kind.within(self._deepest), value.shape[-1]
        if kind not in self._parts:
            tiles = () if kind == PLAIN else (kind,)
            self._parts[kind] = (_tiles if tiles else _parts)(self._forest, self._num_past, *tiles)
        # The fused kernels take one width. Zeros change neither a score nor the other columns of a value.
        wide = max(width, query.shape[-1])
        query, key, value = (
            x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value)
        )
        out: Tensor = _ForestAttention.apply(query, key, value, sinks, scale, kind.cap, self._parts[kind])  # type: ignore[no-untyped-call]
        return out[..., :width]

    def take_computed(self) -> KeyValues:
        """Returns keys and values of the forest's own nodes, and records no more: a layer may be computed again."""
        computed, self._computed = self._computed or {}, None
        return computed


class _ForestAttention(torch.autograd.Function):
    """Maps queries [N, H, D] and keys and values [P + N, K, D] to [N, H, D], part by part."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        cap: float,
        parts: list[_Part],
    ) -> Tensor:
        q, k, v = _heads_first(query, _expand(key, query), _expand(value, query))
        accurate = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:2], value.shape[2]), dtype=accurate)
        (merged,) = _heads_first(out)
        lse = query.new_full(query.shape[:2], -torch.inf, dtype=accurate)
        if sinks is not None:
            lse[:] = sinks
        lse = lse.T[None]
        for part in parts:
            own, mask = part.queries, None if part.mask is None else part.mask.to(query.dtype)
            seen = q[:, :, own], k[:, :, part.keys], v[:, :, part.keys]
            if cap:
                found = attend_capped(*seen, scale, cap, mask)
            else:
                found = attend_part(*seen, scale, mask, causal=part.causal)
            _merge(merged[:, :, own], lse[:, :, own], *found)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.scale, ctx.cap, ctx.parts = scale, cap, parts
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        keys, values = _expand(key, query), _expand(value, query)
        gradients = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, keys, values)]
        grad, q, k, v, merged = _heads_first(grad_outputs[0], query, keys, values, out)
        for part in ctx.parts:
            own, seen = part.queries, part.keys
            given = grad[:, :, own], q[:, :, own], k[:, :, seen], v[:, :, seen], merged[:, :, own], lse[:, :, own]
            if ctx.cap:
                mask = None if part.mask is None else part.mask.to(lse.dtype)
                found = attend_capped_backward(*given, ctx.scale, ctx.cap, mask)
            else:
                found = attend_part_backward(*given, ctx.scale, part.mask, causal=part.causal)
            for total, where, gradient in zip(_heads_first(*gradients), (own, seen, seen), found, strict=True):
                if isinstance(where, slice):
                    total[:, :, where] += gradient
                else:
                    total.index_add_(2, where, gradient.to(total.dtype))
        grad_q, grad_k, grad_v = gradients
        of_sinks = None
        if sinks is not None:  # A sink's share of the softmax, times the gradient of its score; its value is 0.
            delta = (grad_outputs[0] * out).sum(-1).to(lse.dtype)
            of_sinks = -((sinks - lse[0].T).exp() * delta).sum(0).to(sinks.dtype)
        whole = grad_q.to(query.dtype), _contract(grad_k, key), _contract(grad_v, value), of_sinks
        return (*whole, None, None, None)


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
"""Edge of a tile of the mask on CUDA. Learning passes are padded to a multiple of it."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexPlan:
    """The attention plan of one forward pass over a forest on CUDA, with the mask `kv <= q < end[kv]`.

    The smallest and largest `end` of a tile's keys show which 128 x 128 tiles are empty, full or mixed. So the tile
    table needs no N x N mask. Every layer reuses it.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.recurrence = Recurrence(forest)
        self._num_nodes = forest.num_nodes
        self._padding = -forest.num_nodes % TILE
        # A padded node ends right after itself: it attends to itself only, and no other node attends to it.
        padding = np.arange(forest.num_nodes, forest.num_nodes + self._padding, dtype=np.int32) + 1
        self._end = np.concatenate([forest.end, padding])
        self._depth = np.concatenate([forest.depth, np.zeros_like(padding)])
        self._deepest = int(forest.depth.max(initial=0))
        self._device = device
        self._tiles: dict[AttentionKind, BlockMask] = {}
        self._flex: Callable[..., Any] = compiled_flex() if device.type == "cuda" else cast(Any, flex_attention)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        kind: AttentionKind = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        kind = replace(kind.within(self._deepest), cap=kind.cap)
        limits = replace(kind, cap=0.0)
        if limits not in self._tiles:
            self._tiles[limits] = tile_mask(self._end, self._device, self._depth, limits)
        inputs = (F.pad(x, (0, 0, 0, 0, 0, self._padding)) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        bend = soft_cap(kind.cap) if kind.cap else None
        out = self._flex(
            *_heads_first(*inputs),
            score_mod=bend,
            block_mask=self._tiles[limits],
            scale=scale,
            enable_gqa=grouped,
            return_lse=sinks is not None,
        )
        if sinks is not None:
            out = out[0] * torch.sigmoid(out[1] - sinks[:, None])[..., None].to(query.dtype)
        return cast(Tensor, out[0].transpose(0, 1)[: self._num_nodes])


@functools.cache
def soft_cap(cap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Returns the score function of `flex_attention` for capped scores."""

    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return bend


def forest_plan(
    forest: Forest, device: torch.device, past: KeyValues | None = None, states: States | None = None
) -> FlexPlan | ForestPlan:
    """Returns the plan of a forest for a device. On CUDA nothing is computed before."""
    return FlexPlan(forest, device) if device.type == "cuda" else ForestPlan(forest, past, states)


def forest_mask(end: Tensor, depth: Tensor, limits: AttentionKind) -> MaskMod:
    """Returns the mask function of a forest for `flex_attention`: a node sees itself and its ancestors, within limits."""
    window, chunk = limits.window, limits.chunk

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < end[key])
        if window:
            seen = seen & (depth[query] - depth[key] < window)
        if chunk:
            seen = seen & (depth[query] // chunk == depth[key] // chunk)
        return seen

    return sees


def tile_mask(
    end: NDArray[np.int32], device: torch.device, depth: NDArray[np.int32] | None = None, limits: AttentionKind = PLAIN
) -> BlockMask:
    """Returns the tile table of a forest with a multiple of `TILE` nodes."""
    tiles = end.reshape(-1, TILE)
    number = np.arange(len(tiles))
    start, before = number * TILE, number[None, :] < number[:, None]  # [query tile, key tile]
    touched = before & (tiles.max(1)[None, :] > start[:, None])
    full = before & (tiles.min(1)[None, :] >= start[:, None] + TILE)
    depths = np.zeros_like(tiles) if depth is None else depth.reshape(-1, TILE)
    lowest, highest = depths.min(1), depths.max(1)
    if limits.window:
        touched &= lowest[:, None] - highest[None, :] < limits.window
        full &= highest[:, None] - lowest[None, :] < limits.window
    if limits.chunk:
        touched &= highest[None, :] // limits.chunk >= lowest[:, None] // limits.chunk
        full &= lowest[None, :] // limits.chunk == highest[:, None] // limits.chunk
    mixed = (touched & ~full) | np.eye(len(tiles), dtype=bool)
    on_device = torch.from_numpy(end).to(device), torch.from_numpy(depths.reshape(-1)).to(device)
    return BlockMask.from_kv_blocks(
        *_table(mixed, device), *_table(full, device), BLOCK_SIZE=TILE, mask_mod=forest_mask(*on_device, limits)
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


BLOCKS_PER_CALL = 64
"""Blocks of one attention call. Gathered blocks of this number still fit into the processor's cache."""


class StepPlan:
    """The attention plan of one sampling step on a CPU.

    Single tokens attend together, block by block, each to its row's past. A longer span attends to its row's past and,
    causally, to itself.
    """

    def __init__(self, spans: list[tuple[CacheRow, int]], positions: NDArray[np.int64], cache: KeyValueCache) -> None:
        """`positions` [N] belong to the tokens of all spans, in order."""
        self._cache = cache
        device = cache.keys.device
        blocks = [row.blocks[at // BLOCK] for row, n in spans for at in range(row.filled, row.filled + n)]
        self._block, self._slot = torch.tensor(blocks, device=device), torch.from_numpy(positions % BLOCK).to(device)
        singles = [row for row, n in spans if n == 1]
        self._parts: list[_Singles | _Span] = [_Singles(singles, cache)] if singles else []
        self._parts += [_Span(row, n, cache) for row, n in spans if n > 1]
        self._sizes = [part.num_tokens for part in self._parts]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._block, :, self._slot] = key
        values[self._block, :, self._slot] = value
        queries = torch.split(query, self._sizes)
        return torch.cat([part.attend(q, keys, values, scale) for part, q in zip(self._parts, queries, strict=True)])


class _Span:
    """Attention of several tokens of one row."""

    def __init__(self, row: CacheRow, count: int, cache: KeyValueCache) -> None:
        self.num_tokens = count
        self._stop = row.filled + count
        self._blocks = torch.tensor(row.blocks, device=cache.keys.device)
        positions = torch.arange(self._stop, device=cache.keys.device)
        self._mask = positions[None, :] <= positions[row.filled :, None]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Returns [N, H, D] for queries [N, H, D] over one layer of the cache."""
        key, value = (
            x.index_select(0, self._blocks).transpose(0, 1).flatten(1, 2)[None, :, : self._stop] for x in (keys, values)
        )
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], key, value, attn_mask=self._mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


class _Singles:
    """Attention of one token of each of R rows.

    Each block of a row gives a partial output. The log-sum-exps merge them, so rows need no padding.
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
        self._masks = torch.split(mask.to(device)[:, None, None], BLOCKS_PER_CALL)
        ascending = blocks[order]
        self._blocks = [
            _place(ascending[at : at + BLOCKS_PER_CALL], device) for at in range(0, len(ascending), BLOCKS_PER_CALL)
        ]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Returns [R, H, D] for queries [R, H, D] over one layer of the cache."""
        rows, heads, dim = query.shape
        kv_heads = keys.shape[1]
        queries = torch.split(query.view(rows, kv_heads, heads // kv_heads, dim)[self._owner], BLOCKS_PER_CALL)
        found = [
            attend_part(q, _at(keys, where, self._width), _at(values, where, self._width), scale, mask)
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
    """Returns ascending blocks as an index; as a slice, which needs no copy, if they have no gaps."""
    low, high = int(blocks[0]), int(blocks[-1]) + 1
    return slice(low, high) if high - low == len(blocks) else torch.from_numpy(blocks).to(device)


def _at(stored: Tensor, where: slice | Tensor, width: int) -> Tensor:
    """Returns the first `width` tokens of some blocks, [T, K, width, D]."""
    chosen = stored[where] if isinstance(where, slice) else stored.index_select(0, where)
    return chosen[:, :, :width]


SIZES = (8, 64, 128, 256, 512)
"""Numbers of rows of the graphs, up to the first one that suffices for all completions."""


class PagedPlan:
    """The attention plan of one sampling step on CUDA.

    `flex_attention` reads the blocks of the cache where they are. Each tile of queries has a table of the blocks that
    its rows use, and the mask hides those of other rows and later tokens. A tile has one query if every row computes
    one token, so each row then reads its own blocks only.
    """

    def __init__(self, cache: KeyValueCache, num_tokens: int, num_tiles: int, width: int) -> None:
        """A plan for up to `num_tokens` tokens. `num_tiles` is the number of tokens if each row computes one."""
        self._cache = cache
        self._by_row = num_tiles == num_tokens
        device = cache.keys.device
        sizes = [num_tokens] * 5 + [cache.keys.shape[1]] * 2 + [num_tiles, num_tiles * width]
        # All tables are one vector, so one transfer brings them to the device.
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._vector = torch.empty_like(self._host, device=device)
        self._arrays = [part.numpy() for part in torch.split(self._host, sizes)]
        self.tokens, self.positions, self._row, self._block, self._slot, *tables = torch.split(self._vector, sizes)
        self._owner, self._start, self._count, table = tables
        self._table = table.view(num_tiles, width)

    def fill(self, spans: Sequence[tuple[CacheRow, int]]) -> None:
        """Take the next tokens of these rows. The other tokens of the plan are padding in the cache's spare block."""
        tokens, positions, rows, block, slot, owner, start, count, table = self._arrays
        table = table.reshape(self._table.shape)
        for padded, value in ((tokens, 0), (positions, 0), (rows, -1), (block, self._cache.spare), (slot, 0)):
            padded[:] = value
        owner[:], start[:], count[:], table[:, 0] = -1, 0, 1, self._cache.spare
        if spans:
            filled, counts = (np.array(x) for x in zip(*((row.filled, n) for row, n in spans), strict=True))
            own, first = np.repeat(np.arange(len(spans)), counts), np.cumsum(counts) - counts
            where = np.arange(len(own)) - (first - filled)[own]
            tokens[: len(own)] = np.concatenate([row.tokens[row.filled : row.filled + n] for row, n in spans])
            positions[: len(own)], rows[: len(own)] = where, own
            # The blocks of all rows, one row after the other, and the place of each in its row.
            num_blocks = (filled + counts - 1) // BLOCK + 1
            begin = np.cumsum(num_blocks) - num_blocks
            blocks = np.concatenate([row.blocks[:k] for (row, _), k in zip(spans, num_blocks.tolist(), strict=True)])
            owners = np.repeat(np.arange(len(spans)), num_blocks)
            place = np.arange(len(blocks)) - begin[owners]
            owner[blocks], start[blocks] = owners, place * BLOCK
            block[: len(own)], slot[: len(own)] = blocks[begin[own] + where // BLOCK], where % BLOCK
            if self._by_row:
                table[owners, place], count[: len(spans)] = blocks, num_blocks
            else:
                for tile in range(len(count)):
                    inside = np.unique(own[tile * TILE : (tile + 1) * TILE])
                    seen = blocks[np.isin(owners, inside)]
                    table[tile, : len(seen)], count[tile] = seen, len(seen)
        self._vector.copy_(self._host, non_blocking=True)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)  # It would sort the places, which are distinct.
        keys[self._block, :, self._slot] = key
        values[self._block, :, self._slot] = value
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        attend: Callable[..., Tensor] = _paged_attention
        if query.device.type == "cuda":
            attend = compiled_by_row() if self._by_row else compiled()
        # Heads first, and the blocks one after the other: on CUDA the cache lies in this order.
        whole = [x.transpose(0, 1).flatten(1, 2)[None] for x in (keys, values)]
        tables = self._count, self._table, self._row, self.positions, self._owner, self._start
        if self._by_row:
            # The fast kernel takes groups of heads whose number is a power of two.
            num_keys, width = key.shape[1:]
            group = query.shape[1] // num_keys
            padding = (1 << (group - 1).bit_length()) - group
            groups = F.pad(query.reshape(-1, num_keys, group, width), (0, 0, 0, padding))
            out = attend(groups.flatten(1, 2)[:, :, None], *whole, *tables, scale)
            return out.view(len(query), num_keys, group + padding, width)[:, :, :group].flatten(1, 2)
        return attend(query.transpose(0, 1)[None], *whole, *tables, scale)[0].transpose(0, 1)


def step_plan(spans: Sequence[tuple[CacheRow, int]], cache: KeyValueCache) -> PagedPlan:
    """Returns the plan of a step with prompts."""
    num_tokens = sum(n for _, n in spans)
    plan = PagedPlan(cache, num_tokens, -(-num_tokens // TILE), cache.keys.shape[1])
    plan.fill(spans)
    return plan


def _paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    count: Tensor,
    table: Tensor,
    row: Tensor,
    position: Tensor,
    owner: Tensor,
    start: Tensor,
    scale: float,
) -> Tensor:
    """Returns attention like `query`: [1, H, N, D] in tiles, or [N, H, 1, D] by row. Keys are [1, K, B * BLOCK, D].

    `count` [T] and `table` [T, W] are the blocks of each tile; `row` and `position` [N] belong to the tokens; `owner`
    and `start` [B] are the row of each block, and the position of its first token.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token, block = batch + query, key // BLOCK  # One of batch and query is 0.
        return (owner[block] == row[token]) & (start[block] + key % BLOCK <= position[token])

    by_row = query.shape[2] == 1
    mask = BlockMask.from_kv_blocks(
        count[:, None, None] if by_row else count[None, None],
        table[:, None, None] if by_row else table[None, None],
        BLOCK_SIZE=(TILE, BLOCK),
        mask_mod=sees,
        seq_lengths=(query.shape[2], keys.shape[2]),
        compute_q_blocks=False,
    )
    grouped = query.shape[1] != keys.shape[1]
    out: Any = flex_attention(query, keys, values, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out  # type: ignore[no-any-return]


@functools.cache
def compiled() -> Callable[..., Tensor]:
    """Returns the attention of steps with prompts, compiled with dynamic shapes."""
    return torch.compile(_paged_attention, dynamic=True)


@functools.cache
def compiled_by_row() -> Callable[..., Tensor]:
    """Returns the attention of steps of one token a row, compiled for each number of rows."""

    def by_row(*tensors: Any) -> Tensor:  # A function of its own: PyTorch limits how often it compiles one.
        return _paged_attention(*tensors)

    return torch.compile(by_row, dynamic=False)


class DecodeGraphs:
    """CUDA graphs of the steps in which each row of one policy computes one token.

    A CUDA graph launches a whole step at once. Launched one by one, the kernels of a small model take longer to start
    than to run. Graphs are captured for a few numbers of rows; a step takes the next larger one, and its other rows are
    padding.
    """

    def __init__(self, cache: KeyValueCache, max_rows: int, context: int) -> None:
        self._cache = cache
        self._sizes = [size for i, size in enumerate(SIZES) if i == 0 or SIZES[i - 1] < max_rows]
        self._width = -(-min(context, cache.max_tokens) // BLOCK)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakKeyDictionary[Policy, dict[int, _Graph | None]] = WeakKeyDictionary()

    def hidden(self, policy: Policy, rows: Sequence[CacheRow]) -> Tensor | None:
        """Returns hidden states [rows, hidden], overwritten by the next call; None if the step cannot be a graph."""
        size = next((size for size in self._sizes if size >= len(rows)), None)
        if size is None:
            return None
        graphs = self._graphs.setdefault(policy, {})
        if size not in graphs:
            graphs[size] = self._captured(policy, size)
        graph = graphs[size]
        return graph.hidden(rows) if graph else None

    def forget(self, policy: Policy) -> None:
        """Drop the graphs of a policy if its weights are at other addresses than when they were captured."""
        graphs = self._graphs.get(policy, {})
        if any(graph and graph.addresses != _addresses(policy) for graph in graphs.values()):
            del self._graphs[policy]

    def _captured(self, policy: Policy, size: int) -> _Graph | None:
        """Boundary: any exception of the model's code under capture means that its steps are not graphs."""
        try:
            return _Graph(policy, PagedPlan(self._cache, size, size, self._width), self._pool)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            log.warning("%s: sampling is slower, its steps are not CUDA graphs: %s", policy.info.name, reason)
            return None


class _Graph:
    """A captured step. It holds no policy, so that a removed one is freed."""

    def __init__(self, policy: Policy, plan: PagedPlan, pool: Any) -> None:
        self.addresses = _addresses(policy)
        self._plan = plan
        plan.fill([])
        stream: Any = cast(Any, torch.cuda).Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Compiles attention and allocates workspaces, which a capture must not.
            for _ in range(2):
                flat_forward(policy.decoder, plan.tokens, plan.positions, plan)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._hidden = flat_forward(policy.decoder, plan.tokens, plan.positions, plan)

    def hidden(self, rows: Sequence[CacheRow]) -> Tensor:
        self._plan.fill([(row, 1) for row in rows])
        self._graph.replay()
        return self._hidden[: len(rows)]


def _addresses(policy: Policy) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*policy.decoder.parameters(), *policy.decoder.buffers()))
