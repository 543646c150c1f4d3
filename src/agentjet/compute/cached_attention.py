"""The attention plans of sampling: a step's tokens attend to the cache. `StepPlan` runs on a CPU, `PagedPlan` on CUDA.

`DecodeGraphs` are CUDA graphs of steps under a `PagedPlan`. Both plans compute plain attention: a model whose layers
have windows within the context, chunks, caps or sinks is sampled row by row (`model.prefix_sharing_obstacles`).

Shapes: N tokens, R rows, B blocks of the cache, Q queries, L keys, H heads, K key heads, D widths, T tiles of queries,
W blocks of a tile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentjet.compute.attention import TILE, LayerCall, attend_part, flat_forward
from agentjet.compute.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.policy import Policy, first_line
from agentjet.compute.routes import RoutePass, present_routes, routing

log = logging.getLogger(__name__)

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

    def attend(self, call: LayerCall) -> Tensor:
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        keys[self._block, :, self._slot] = call.key
        values[self._block, :, self._slot] = call.value
        parts = zip(self._parts, torch.split(call.query, self._sizes), strict=True)
        return torch.cat([part.attend(query, keys, values, call.scale) for part, query in parts])


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

    def attend(self, call: LayerCall) -> Tensor:
        query, key, value, scale = call.query, call.key, call.value, call.scale
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
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
        # Compiles attention and allocates workspaces, which a capture must not.
        with torch.cuda.stream(stream), routing(None):
            for _ in range(2):
                flat_forward(policy.decoder, plan.tokens, plan.positions, plan)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        self._routes = RoutePass() if policy.records_routes else None
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"), routing(self._routes):
            self._hidden = flat_forward(policy.decoder, plan.tokens, plan.positions, plan)

    def hidden(self, rows: Sequence[CacheRow]) -> Tensor:
        self._plan.fill([(row, 1) for row in rows])
        self._graph.replay()
        if self._routes is not None and (present := present_routes()) is not None:
            present.repeat(self._routes, len(rows))
        return self._hidden[: len(rows)]


def _addresses(policy: Policy) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*policy.decoder.parameters(), *policy.decoder.buffers()))
