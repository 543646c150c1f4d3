"""The attention plans of learning: which nodes of a forest attend to which, and how that is computed.

The model is a stock `transformers` model, and the nodes of all branches form one flat row: under a `ForestPlan` on a
CPU, under a `FlexPlan` on CUDA. The plans of sampling are in `cached_attention.py`.

On a CPU, partial results over some of the keys are merged by their log-sum-exps. `torch`'s public attention does not
return the log-sum-exp, and its autograd would differentiate each part alone. So this module calls the fused kernel of
the CPU below it. On CUDA nothing is merged: `flex_attention` is one fused kernel a layer.

`flex_attention` has no backward pass on a CPU, so only tests on a GPU cover it. `model.py` tries the forward pass when
a model is loaded, so it detects a kernel that fails or computes another result.

Shapes: N tokens or nodes, B parts, Q queries, L keys, H heads, K key heads, D and E widths of keys and values, T tiles
of queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface

from agentjet.compute.recurrence import Recurrence, States, computing
from agentjet.processes.progress import PROGRESS
from agentjet.timeline.forest import Forest, ancestors

ATTENTION = "agentjet_plan"
UNSUPPORTED_ARGUMENTS = ("sinks", "position_bias")  # Sinks come as `s_aux`.
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
        return int(self.lowest_of(np.array(depth)))

    def lowest_of(self, depths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Returns the lowest depths that tokens of these depths see."""
        low = np.maximum(depths - self.window + 1, 0) if self.window else np.zeros_like(depths)
        return np.maximum(low, depths // self.chunk * self.chunk if self.chunk else 0).astype(np.int64)

    def within(self, depth: int) -> AttentionKind:
        """Returns the kind without limits that no token up to `depth` reaches."""
        return replace(self, window=self.window * (self.window <= depth), chunk=self.chunk * (self.chunk <= depth))

    def __str__(self) -> str:
        limits = {"a window of": self.window, "chunks of": self.chunk, "scores capped at": self.cap}
        return " and ".join(f"{name} {value}" for name, value in limits.items() if value) or "the whole context"


PLAIN = AttentionKind()


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The request of one layer to a plan: `query` [N, H, D], `key` [N, K, D] and `value` [N, K, E] of its tokens."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    kind: AttentionKind = PLAIN
    sinks: Tensor | None = None
    """Scores [H] of one more key of each head, whose value is 0."""


class AttentionPlan(Protocol):
    """Computes the attention of one forward pass over a flat row of tokens."""

    def attend(self, call: LayerCall) -> Tensor:
        """Returns [N, H, E]."""


running_layer: ContextVar[tuple[nn.Module, AttentionPlan]] = ContextVar("running_layer")
"""The compiled decoder layer that this thread runs, and its plan."""


@torch.library.custom_op("agentjet::attend", mutates_args=())
def attend_opaquely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`_attention` as one operator of a compiled layer. Layer and plan are not part of the compiled code."""
    layer, plan = running_layer.get()
    module = next(part for part in layer.modules() if hasattr(part, "layer_idx") and hasattr(part, "config"))
    out, _ = _attention(module, query, key, value, None, scaling, plan, sliding_window, softcap, sinks)
    return out.contiguous()


@attend_opaquely.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


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
    if torch.compiler.is_compiling():
        return attend_opaquely(query, key, value, scaling, sliding_window, softcap, s_aux), None
    assert plan is not None, "this model runs under an attention plan only"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    kind = AttentionKind(sliding_window or 0, _chunk(module), softcap or 0.0)
    heads = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return plan.attend(LayerCall(layer, *heads, scale, kind, s_aux)).unsqueeze(0), None


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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and log-sum-exp [B, H, Q] of queries [B, H, Q, D], keys and values [B, H, L, D].

    `mask` is added to the scores [B, H, Q, L]. Every query must see at least one key. All tensors are on a CPU. Causal
    parts have no cap, because the fused kernels have none.
    """
    if not cap:
        out, lse = _flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    scores = cap * torch.tanh(query @ key.mT * (scale / cap))
    scores = (scores if mask is None else scores + mask).to(torch.promote_types(query.dtype, torch.float32))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(value.dtype) @ value, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns outputs [..., E] with one more key of value 0; `lse` [...] is without it, `sinks` are its scores."""
    return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype)


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
class Carried:
    """Tensors of a path that the nodes below it need: keys and values of its nodes, states of recurrent layers."""

    keys: KeyValues = field(default_factory=dict)
    states: States = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors, in the order in which the layers were computed."""
        return [*(x for pair in self.keys.values() for x in pair), *self.states.values()]

    def leaves(self) -> Carried:
        """Returns the same values as leaf tensors, which collect gradients."""
        keys = {layer: (_leaf(key), _leaf(value)) for layer, (key, value) in self.keys.items()}
        return Carried(keys, {key: _leaf(state) for key, state in self.states.items()})


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled() and tensor.requires_grad)


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
            path = np.concatenate([np.arange(num_past), num_past + ancestors(forest, start)])
            path = path[kind.lowest(int(forest.depth[start])) :]
            keys = np.concatenate([path, np.arange(num_past + start, num_past + stop)])
            nodes = np.arange(start, stop)
            lowest = kind.lowest_of(forest.depth[start:stop])
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

    def __init__(self, forest: Forest, past: Carried | None = None) -> None:
        """`past` is the path above the forest's roots, which was computed before. Gradients flow to it."""
        past = past or Carried()
        self.recurrence = Recurrence(forest, past.states)
        self._forest = forest
        self._deepest = int(forest.depth.max(initial=0))
        self._past = past.keys
        self._num_past = len(next(iter(self._past.values()))[0]) if self._past else 0
        self._parts: dict[AttentionKind, list[_Part]] = {}
        self._computed: KeyValues | None = {}

    def attend(self, call: LayerCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        if self._computed is not None:
            self._computed[call.layer] = key, value
        if call.layer in self._past:
            key, value = (torch.cat(pair) for pair in zip(self._past[call.layer], (key, value), strict=True))
        kind, width = call.kind.within(self._deepest), value.shape[-1]
        if kind not in self._parts:
            plain = kind == PLAIN
            self._parts[kind] = (
                _parts(self._forest, self._num_past) if plain else _tiles(self._forest, self._num_past, kind)
            )
        # The fused kernels take one width. Zeros change neither a score nor the other columns of a value.
        wide = max(width, query.shape[-1])
        query, key, value = (
            x if x.shape[-1] == wide else F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value)
        )
        parts = self._parts[kind]
        out = _ForestAttention.apply(query, key, value, call.sinks, call.scale, kind.cap, parts)  # type: ignore[no-untyped-call]
        return cast(Tensor, out)[..., :width]

    def take_computed(self) -> Carried:
        """Returns what the forest's own nodes carry, and records no more: a layer may be computed again."""
        computed, self._computed = self._computed or {}, None
        return Carried(computed, self.recurrence.take_computed())


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
            _merge(merged[:, :, own], lse[:, :, own], *attend_part(*seen, scale, mask, causal=part.causal, cap=cap))
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
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


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

    def attend(self, call: LayerCall) -> Tensor:
        kind = call.kind.within(self._deepest)
        limits = replace(kind, cap=0.0)
        if limits not in self._tiles:
            self._tiles[limits] = tile_mask(self._end, self._device, self._depth, limits)
        inputs = (F.pad(x, (0, 0, 0, 0, 0, self._padding)) for x in (call.query, call.key, call.value))
        out = self._flex(
            *_heads_first(*inputs),
            score_mod=soft_cap(kind.cap, self._device) if kind.cap else None,
            block_mask=self._tiles[limits],
            scale=call.scale,
            enable_gqa=call.query.shape[1] != call.key.shape[1],
            return_aux=AuxRequest(lse=True) if call.sinks is not None else None,
        )
        if call.sinks is not None:
            out = with_sinks(out[0], out[1].lse, call.sinks[:, None])
        return cast(Tensor, out[0].transpose(0, 1)[: self._num_nodes])

    def take_computed(self) -> Carried:
        """Returns nothing: on CUDA no piece is kept."""
        self.recurrence.take_computed()
        return Carried()


@functools.cache
def soft_cap(cap: float, device: torch.device) -> ScoreMod:
    """Returns the score function of `flex_attention` for capped scores."""
    with torch.inference_mode(False):  # An inference tensor could not be saved for a backward pass.
        limit = torch.tensor(cap, device=device)  # The compiler of dynamic shapes refuses a number of a closure.

    def bend(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return bend


def forest_plan(forest: Forest, device: torch.device, past: Carried | None = None) -> FlexPlan | ForestPlan:
    """Returns the plan of a forest for a device. On CUDA nothing is computed before."""
    return FlexPlan(forest, device) if device.type == "cuda" else ForestPlan(forest, past)


def forest_mask(end: Tensor, depth: Tensor, limits: AttentionKind) -> MaskMod:
    """Returns the mask function of a forest for `flex_attention`: a node sees its path, within limits."""
    # Numbers of a closure would be symbols of a compiled kernel with dynamic shapes, which not all kernels take.
    window, chunk = (
        torch.tensor(limit, dtype=depth.dtype, device=depth.device) if limit else None
        for limit in (limits.window, limits.chunk)
    )

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < end[key])
        if window is not None:
            seen = seen & (depth[query] - depth[key] < window)
        if chunk is not None:
            seen = seen & (depth[query] // chunk == depth[key] // chunk)
        return seen

    return sees


def tile_mask(
    end: NDArray[np.int32], device: torch.device, depth: NDArray[np.int32] | None = None, limits: AttentionKind = PLAIN
) -> BlockMask:
    """Returns the tile table of a forest with a multiple of `TILE` nodes.

    Limits are taken from the lowest and highest depth of a tile. So a tile that is mixed may be empty or full.
    """
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
    from torch._dynamo import callback

    callback.on_compile_start(PROGRESS.begin_long_step)  # It is compiled again for other kinds of layers.
    callback.on_compile_end(PROGRESS.end_long_step)
    return torch.compile(flex_attention, dynamic=True)
