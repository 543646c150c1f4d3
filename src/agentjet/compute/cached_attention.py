"""The attention plans of sampling: a step's tokens attend to the cache. `StepPlan` runs on a CPU, `PagedPlan` on CUDA.

A layer's window or chunk hides the keys before it, and a cache keeps them: the blocks of a row belong to all layers.

Shapes: N tokens, R rows, B blocks of the cache, Q queries, L keys, H heads, K key heads, D widths, T tiles of queries,
W blocks of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from agentjet.compute.attention import (
    BLOCK_TOKENS,
    TILE,
    AttentionKind,
    Carried,
    ForestPlan,
    LayerCall,
    ScoreMod,
    attend_part,
    soft_cap,
    with_sinks,
)
from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.cached_states import StepRecurrence
from agentjet.compute.policy import KeySizes
from agentjet.compute.token_choice import ChoiceRules
from agentjet.timeline.forest import Row, build_forest

BLOCKS_PER_CALL = 64
"""Blocks of one attention call. Gathered blocks of this number still fit into the processor's cache."""


class StepPlan:
    """The attention plan of one sampling step on a CPU.

    Single tokens attend together, block by block, each to its row's past. A longer span attends to its row's past and,
    causally, to itself. Blocks that no token of a layer's kind sees are not read.
    """

    def __init__(self, spans: Spans, positions: NDArray[np.int64], cache: KeyValueCache) -> None:
        """`positions` [N] belong to the tokens of all spans, in order."""
        self._cache = cache
        self.recurrence: StepRecurrence | None = None
        places = np.repeat([row.place for row, _ in spans], [n for _, n in spans])
        self._block = torch.from_numpy(cache.table[places, positions // BLOCK].astype(np.int64)).to(cache.device)
        self._slot = torch.from_numpy(positions % BLOCK).to(cache.device)
        self._singles = [row for row, n in spans if n == 1]
        self._longer = [(row, n) for row, n in spans if n > 1]
        self._sizes = [len(self._singles)] * bool(self._singles) + [n for _, n in self._longer]
        self._deepest = int(positions.max())
        self._parts: dict[AttentionKind, list[_Singles | _Span]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        keys, values = self._cache.of_layer(call.layer)
        query, key, value = (_widened(x, keys.shape[-1]) for x in (call.query, call.key, call.value))
        keys[self._block, :, self._slot] = key
        values[self._block, :, self._slot] = value
        kind = call.kind.within(self._deepest)
        limits = replace(kind, cap=0.0)
        if limits not in self._parts:
            singles = [_Singles(self._singles, self._cache, limits)] if self._singles else []
            self._parts[limits] = [*singles, *(_Span(row, n, self._cache, limits) for row, n in self._longer)]
        parts = zip(self._parts[limits], torch.split(query, self._sizes), strict=True)
        out = [part.attend(replace(call, query=query, kind=kind), keys, values) for part, query in parts]
        return torch.cat(out)[..., : call.value.shape[-1]]


def _widened(heads: Tensor, width: int) -> Tensor:
    return heads if heads.shape[-1] == width else F.pad(heads, (0, width - heads.shape[-1]))


class _Span:
    """Attention of several tokens of one row, in tiles of queries: each reads the keys that its queries see."""

    def __init__(self, row: CacheRow, count: int, cache: KeyValueCache, limits: AttentionKind) -> None:
        first = limits.lowest(row.filled) // BLOCK
        self._blocks = torch.tensor(row.blocks[first:], device=cache.device)
        self._tiles: list[tuple[slice, slice, Tensor]] = []
        for start in range(0, count, BLOCK_TOKENS):
            own = np.arange(start, min(start + BLOCK_TOKENS, count)) + row.filled
            lowest = limits.lowest_of(own)
            seen = np.arange(lowest[0], own[-1] + 1)
            hidden = torch.from_numpy((seen > own[:, None]) | (seen < lowest[:, None]))
            mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, -torch.inf).to(cache.device)
            keys = slice(int(lowest[0]) - first * BLOCK, int(own[-1]) + 1 - first * BLOCK)
            self._tiles.append((slice(start, start + len(own)), keys, mask))

    def attend(self, call: LayerCall, keys: Tensor, values: Tensor) -> Tensor:
        """Returns [N, H, D] over one layer of the cache."""
        num_keys = keys.shape[1]
        query = call.query.view(len(call.query), num_keys, -1, keys.shape[-1]).permute(1, 2, 0, 3)
        key, value = (
            x.index_select(0, self._blocks).transpose(0, 1).flatten(1, 2)[:, None].expand(-1, query.shape[1], -1, -1)
            for x in (keys, values)
        )
        found = [
            attend_part(query[:, :, own], key[:, :, seen], value[:, :, seen], call.scale, mask, cap=call.kind.cap)
            for own, seen, mask in self._tiles
        ]
        out, lse = (torch.cat(tiles, 2) for tiles in zip(*found, strict=True))
        if call.sinks is not None:
            out = with_sinks(out, lse, call.sinks.view(num_keys, -1, 1))
        return out.permute(2, 0, 1, 3).flatten(1, 2)


class _Singles:
    """Attention of one token of each of R rows.

    Each block of a row gives a partial output. The log-sum-exps merge them, so rows need no padding.
    """

    def __init__(self, rows: list[CacheRow], cache: KeyValueCache, limits: AttentionKind) -> None:
        device, dtype = cache.device, cache.dtype
        own = np.array([row.filled for row in rows])
        lowest = limits.lowest_of(own)
        first, stop = lowest // BLOCK, own // BLOCK + 1
        blocks, owner, ordinal = cache.listed(rows, first, stop)
        start = ordinal * BLOCK
        visible = np.minimum(own[owner] + 1 - start, BLOCK)
        order = np.argsort(blocks)
        self._owner, self._ordinal = (torch.from_numpy(x[order]).to(device) for x in (owner, ordinal - first[owner]))
        self._longest = int((stop - first).max())
        self._width = int(visible.max())
        slots = np.arange(self._width)
        hidden = (slots >= visible[order][:, None]) | (slots < (lowest[owner] - start)[order][:, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), -torch.inf)
        self._masks = torch.split(mask.to(device)[:, None, None], BLOCKS_PER_CALL)
        ascending = blocks[order].astype(np.int64)
        self._blocks = [
            _place(ascending[at : at + BLOCKS_PER_CALL], device) for at in range(0, len(ascending), BLOCKS_PER_CALL)
        ]

    def attend(self, call: LayerCall, keys: Tensor, values: Tensor) -> Tensor:
        """Returns [R, H, D] over one layer of the cache."""
        query = call.query.view(len(call.query), keys.shape[1], -1, keys.shape[-1])
        parts = zip(torch.split(query[self._owner], BLOCKS_PER_CALL), self._blocks, self._masks, strict=True)
        found = [
            attend_part(
                q, _at(keys, where, self._width), _at(values, where, self._width), call.scale, mask, cap=call.kind.cap
            )
            for q, where, mask in parts
        ]
        out, lse = (torch.cat(part) for part in zip(*found, strict=True))
        if self._longest == 1:
            merged, whole = torch.empty_like(out).index_copy_(0, self._owner, out), lse
            if call.sinks is not None:
                whole = torch.empty_like(lse).index_copy_(0, self._owner, lse)
        else:
            by_row = lse.new_full((len(query), self._longest, *lse.shape[1:]), -torch.inf)
            by_row[self._owner, self._ordinal] = lse
            whole = by_row.logsumexp(1)
            share = (lse - whole[self._owner]).exp_()
            merged = lse.new_zeros(query.shape).index_add_(0, self._owner, out * share.unsqueeze(-1))
        if call.sinks is not None:
            merged = with_sinks(merged, whole, call.sinks.view(keys.shape[1], -1))
        return merged.to(query.dtype).flatten(1, 2)


def _place(blocks: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Returns ascending blocks as an index; as a slice, which needs no copy, if they have no gaps."""
    low, high = int(blocks[0]), int(blocks[-1]) + 1
    return slice(low, high) if high - low == len(blocks) else torch.from_numpy(blocks).to(device)


def _at(stored: Tensor, where: slice | Tensor, width: int) -> Tensor:
    """Returns the first `width` tokens of some blocks, [T, K, width, D]."""
    chosen = stored[where] if isinstance(where, slice) else stored.index_select(0, where)
    return chosen[:, :, :width]


MAX_KERNELS = 64
"""Largest number of compiled kernels of either kind of step."""


class PagedPlan:
    """The attention plan of one sampling step on CUDA.

    `flex_attention` reads the blocks of the cache where they are. Each tile of queries has a table of the blocks that
    its rows use, and the mask hides those of other rows and later tokens. A tile has one query if every row computes
    one token, so each row then reads its own blocks only.
    """

    def __init__(self, cache: KeyValueCache, num_tokens: int, num_tiles: int, width: int) -> None:
        """A plan for up to `num_tokens` tokens. `num_tiles` is the number of tokens if each row computes one."""
        self._cache = cache
        self.recurrence: StepRecurrence | None = None
        self._by_row = num_tiles == num_tokens
        device = cache.device
        choices = num_tokens if self._by_row else 0
        sizes = [num_tokens] * 5 + [cache.num_blocks] * 2 + [num_tiles, num_tiles * width] + [choices] * 3
        # All tables are one vector, so one transfer brings them to the device.
        self._hosts = [_HostTables(sizes, device) for _ in range(2 if self._by_row else 1)]
        self._vector = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        self.tokens, self.positions, self._row, self._block, self._slot, *tables = torch.split(self._vector, sizes)
        self._owner, self._start, self._count, table, self.source, *choices_of = tables
        self._table = table.view(num_tiles, width)
        self.temperatures, self.uniforms = (part.view(torch.float32) for part in choices_of)

    def fill(self, spans: Spans, rules: ChoiceRules | None = None, source: NDArray[np.int64] | None = None) -> None:
        """Take the next tokens of these rows, and blocks for them. With single tokens, `rules` are those of the rows.

        Row i gets the token that row `source[i]` of the step before has chosen, which is only on the device.
        The other tokens of the plan are padding in the cache's spare block.
        """
        self._hosts.reverse()  # The tables of the step before may still be copied.
        host = self._hosts[0]
        host.await_copy()
        tokens, positions, rows, block, slot, owner, start, count, table, sources, temperatures, uniforms = host.arrays
        table = table.reshape(self._table.shape)
        sources[:] = -1
        if source is not None:
            sources[: len(source)] = source
        if rules is not None:
            temperatures.view(np.float32)[: len(spans)] = rules.temperatures
            uniforms.view(np.float32)[: len(spans)] = rules.uniforms
        for padded, value in ((tokens, 0), (positions, 0), (rows, -1), (block, self._cache.spare), (slot, 0)):
            padded[:] = value
        owner[:], start[:], count[:], table[:, 0] = -1, 0, 1, self._cache.spare
        if spans:
            where, own = next_positions(spans, self._cache)
            positions[: len(own)], rows[: len(own)] = where, own
            if source is None:
                tokens[: len(own)] = next_tokens(spans)
            last = np.arange(len(own)) if spans[-1][1] == 1 else np.cumsum([n for _, n in spans]) - 1
            num_blocks = where[last] // BLOCK + 1
            blocks, owners, place = self._cache.listed([row for row, _ in spans], 0, num_blocks)
            owner[blocks], start[blocks] = owners, place * BLOCK
            begin = np.cumsum(num_blocks) - num_blocks
            block[: len(own)], slot[: len(own)] = blocks[begin[own] + where // BLOCK], where % BLOCK
            if self._by_row:
                table[owners, place], count[: len(spans)] = blocks, num_blocks
            else:
                for tile in range(len(count)):
                    inside = np.unique(own[tile * TILE : (tile + 1) * TILE])
                    seen = blocks[np.isin(owners, inside)]
                    table[tile, : len(seen)], count[tile] = seen, len(seen)
        host.copy_to(self._vector)

    def fill_trial(self, tokens: Tensor) -> None:
        """Take the tokens [BLOCK] of one sequence, one a row, in the cache's spare block. Further rows repeat them."""
        self.fill([])
        at = torch.arange(len(self.tokens), device=tokens.device) % BLOCK
        for table, values in ((self.tokens, tokens[at]), (self.positions, at), (self._slot, at)):
            table.copy_(values)

    def attend(self, call: LayerCall) -> Tensor:
        keys, values = self._cache.of_layer(call.layer)
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)  # It would sort the places, which are distinct.
        keys[self._block, :, self._slot] = _widened(call.key, keys.shape[-1])
        values[self._block, :, self._slot] = _widened(call.value, values.shape[-1])
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        kind = call.kind.within(self._table.shape[1] * BLOCK - 1)
        count, table, lowest = self._seen(kind)
        tables = count, table, self._row, self.positions, self._owner, self._start, lowest
        # Heads first, and the blocks one after the other: on CUDA the cache lies in this order.
        whole = [x.transpose(0, 1).flatten(1, 2)[None] for x in (keys, values)]
        on_cuda = call.query.device.type == "cuda"
        attend: Callable[..., Tensor] = compiled(self._by_row) if on_cuda else _paged_attention
        cap = soft_cap(kind.cap, call.query.device) if kind.cap else None
        query, sinks = _widened(call.query, keys.shape[-1]), call.sinks
        if self._by_row:
            # The fast kernel takes groups of heads whose number is a power of two.
            num_keys = keys.shape[1]
            group = query.shape[1] // num_keys
            padding = (1 << (group - 1).bit_length()) - group
            groups = F.pad(query.reshape(len(query), num_keys, group, -1), (0, 0, 0, padding))
            sinks = None if sinks is None else F.pad(sinks.view(num_keys, group), (0, padding)).flatten()
            out = attend(groups.flatten(1, 2)[:, :, None], *whole, *tables, sinks, cap, call.scale)
            out = out.view(len(query), num_keys, group + padding, -1)[:, :, :group].flatten(1, 2)
        else:
            out = attend(query.transpose(0, 1)[None], *whole, *tables, sinks, cap, call.scale)[0].transpose(0, 1)
        return out[..., : call.value.shape[-1]]

    def _seen(self, kind: AttentionKind) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the number of blocks of each tile, the blocks, and the lowest position [N] that each token sees.

        By row, the blocks are those that the token sees. A tile of a prompt reads all blocks of its rows.
        """
        if not (kind.window or kind.chunk):
            return self._count, self._table, None
        lowest = torch.zeros_like(self.positions)
        if kind.window:
            lowest = (self.positions - kind.window + 1).clamp(min=0)
        if kind.chunk:
            lowest = torch.maximum(lowest, self.positions // kind.chunk * kind.chunk)
        if not self._by_row:
            return self._count, self._table, lowest
        first, last = lowest // BLOCK, self._table.shape[1] - 1
        places = first[:, None] + torch.arange(last + 1, device=first.device)
        return self._count - first, self._table.gather(1, places.clamp(max=last)), lowest


class _HostTables:
    """The tables of a plan in the memory of the host."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self._vector = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.arrays: list[NDArray[np.int32]] = [part.numpy() for part in torch.split(self._vector, sizes)]
        self._copied: Any = cast(Any, torch.cuda).Event() if device.type == "cuda" else None

    def copy_to(self, vector: Tensor) -> None:
        vector.copy_(self._vector, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def await_copy(self) -> None:
        """Wait until the last copy has ended."""
        if self._copied is not None:
            self._copied.synchronize()


Spans = list[tuple[CacheRow, int]]
"""Rows with the number of their next tokens that a step computes. Rows of one token come first."""


def next_positions(spans: Spans, cache: KeyValueCache) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the positions [N] of the next tokens of some rows, and the number [N] of the row of each.

    Takes the blocks of these tokens.
    """
    filled = np.array([row.filled for row, _ in spans])
    if spans[-1][1] == 1:
        for i in np.flatnonzero(filled % BLOCK == 0).tolist():  # The others have their block.
            cache.extend(spans[i][0], spans[i][0].filled + 1)
        return filled, np.arange(len(spans))
    for row, n in spans:
        cache.extend(row, row.filled + n)
    counts = np.array([n for _, n in spans])
    own = np.repeat(np.arange(len(spans)), counts)
    return np.arange(len(own)) - (np.cumsum(counts) - counts - filled)[own], own


def next_tokens(spans: Spans) -> NDArray[np.int32]:
    """Returns the next tokens [N] of some rows from the memory of the host."""
    if spans[-1][1] == 1:
        return np.array([row.tokens[row.filled] for row, _ in spans])
    return np.concatenate([row.tokens[row.filled : row.filled + n] for row, n in spans])


def step_inputs(spans: Spans, cache: KeyValueCache) -> tuple[Tensor, Tensor, StepPlan | PagedPlan]:
    """Returns the next tokens [N] of some rows, their positions [N], and the plan of the step that computes them."""
    if cache.device.type == "cuda":
        inputs: tuple[Tensor, Tensor, StepPlan | PagedPlan] = paged_inputs(spans, cache)
    else:
        tokens, (positions, _) = next_tokens(spans), next_positions(spans, cache)
        inputs = torch.from_numpy(tokens).long(), torch.from_numpy(positions), StepPlan(spans, positions, cache)
    if cache.slots:
        inputs[2].recurrence = StepRecurrence(cache.runs(spans), cache.slots, cache.device)
    return inputs


def paged_inputs(spans: Spans, cache: KeyValueCache) -> tuple[Tensor, Tensor, PagedPlan]:
    """Returns the `step_inputs` of CUDA."""
    num_tokens = sum(n for _, n in spans)
    plan = PagedPlan(cache, num_tokens, -(-num_tokens // TILE), cache.num_blocks)
    plan.fill(spans)
    return plan.tokens, plan.positions, plan


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
    lowest: Tensor | None,
    sinks: Tensor | None,
    cap: ScoreMod | None,
    scale: float,
) -> Tensor:
    """Returns [1, H, N, E] of queries [1, H, N, D] in tiles, or [N, H, 1, E] of [N, H, 1, D] by row.

    Keys and values are [1, K, B * BLOCK, ...]. `count` [T] and `table` [T, W] are the blocks of each tile; `row`,
    `position` and `lowest` [N] belong to the tokens; `owner` and `start` [B] are the row of each block, and the
    position of its first token.
    """

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        token, block = batch + query, key // BLOCK  # One of batch and query is 0.
        at = start[block] + key % BLOCK
        seen = (owner[block] == row[token]) & (at <= position[token])
        return seen if lowest is None else seen & (at >= lowest[token])

    by_row = query.shape[2] == 1
    mask = BlockMask.from_kv_blocks(
        count[:, None, None] if by_row else count[None, None],
        table[:, None, None] if by_row else table[None, None],
        BLOCK_SIZE=(TILE, BLOCK),
        mask_mod=sees,
        seq_lengths=(query.shape[2], keys.shape[2]),
        compute_q_blocks=False,
    )
    out: Any = flex_attention(
        query,
        keys,
        values,
        score_mod=cap,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
        return_aux=AuxRequest(lse=True) if sinks is not None else None,
    )
    return cast(Tensor, out if sinks is None else with_sinks(out[0], out[1].lse, sinks[:, None]))


@functools.cache
def compiled(by_row: bool) -> Callable[..., Tensor]:
    """Returns the compiled attention of steps: for each number of rows, or with dynamic shapes for prompts."""

    def attention(*given: Any) -> Tensor:
        return _paged_attention(*given)

    # PyTorch limits how often it compiles a function: here, for the numbers of rows, sizes of layers and kinds.
    settings = {"isolate_recompiles": True, "recompile_limit": MAX_KERNELS}
    return cast(Any, torch.compile)(attention, dynamic=not by_row, **settings)  # type: ignore[no-any-return]


def difference_beyond(call: LayerCall, kind: AttentionKind, dtype: torch.dtype) -> float:
    """Returns how far a step's plan is from the learner's for tokens beyond the limits of a layer's kind.

    Relative to the results. Keys are random, so the model does not compute so many tokens. Values at the edge of what
    the tokens see are large: one key too many or too few shows.
    """
    num_past, generator = max(kind.window, kind.chunk) + BLOCK, torch.Generator().manual_seed(0)
    past, tail = (
        [torch.randn(count, *x.shape[1:], generator=generator).to(dtype) for x in (call.query, call.key, call.value)]
        for count in (num_past, 3)
    )
    edge = kind.lowest(num_past)
    past[2][edge - 2 : edge + 4] *= num_past
    forest = build_forest([Row(np.zeros(3, np.int32), slice(0), {})])
    learning = ForestPlan(
        replace(forest, depth=forest.depth + num_past), Carried({call.layer: (past[1].float(), past[2].float())})
    )
    query, key, value = (x.float() for x in tail)
    sinks = None if call.sinks is None else call.sinks.float().cpu()
    wanted = learning.attend(LayerCall(call.layer, query, key, value, call.scale, kind, sinks))

    device, sizes = call.query.device, KeySizes(key.shape[1], key.shape[2], value.shape[2])
    cache = KeyValueCache({call.layer: sizes}, num_past + 2 * BLOCK, dtype, device)
    row = CacheRow(np.zeros(num_past + 3, np.int32), filled=num_past)
    cache.extend(row, num_past)
    at = np.arange(num_past)
    for stored, x in zip(cache.of_layer(call.layer), past[1:], strict=True):
        stored[np.array(row.blocks)[at // BLOCK], :, at % BLOCK] = _widened(x, stored.shape[-1]).to(device)
    found = []
    for own in (slice(0, 2), slice(2, 3)):  # A prompt of two tokens, then a single one.
        plan = step_inputs([(row, own.stop - own.start)], cache)[2]
        query, key, value = (x[own].to(device) for x in tail)
        found.append(plan.attend(replace(call, query=query, key=key, value=value, kind=kind)))
        row.filled = num_past + own.stop
    return float((torch.cat(found).float().cpu() - wanted).abs().max() / wanted.abs().max())
