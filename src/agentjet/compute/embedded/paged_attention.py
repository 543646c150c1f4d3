"""The attention of a sampling step on CUDA, and steps of one token a row as CUDA graphs.

`flex_attention` reads the blocks of the cache where they are. Each tile of queries has a table of the blocks that its
rows use, and the mask hides those of other rows and later tokens. A tile has one query if every row computes one token,
so each row then reads its own blocks only.

A CUDA graph launches a whole step at once. Launched one by one, the kernels of a small model take longer to start than
to run. Graphs are captured for a few numbers of rows; a step takes the next larger one, and its other rows are padding.

Shapes: N tokens, T tiles, W blocks of a tile, B blocks of the cache, H heads, K key heads, D widths.
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
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentjet.compute.embedded.attention import flat_forward
from agentjet.compute.embedded.cache import BLOCK, CacheRow, KeyValueCache
from agentjet.compute.embedded.policy import Policy, first_line

log = logging.getLogger(__name__)

TILE = 128
"""Queries of a tile, in a step with prompts."""
SIZES = (8, 64, 128, 256, 512)
"""Numbers of rows of the graphs, up to the first one that suffices for all completions."""


class PagedPlan:
    """The attention plan of one sampling step: see `AttentionPlan`."""

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
        """See `AttentionPlan`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)  # It would sort the places, which are distinct.
        keys[self._block, :, self._slot] = key
        values[self._block, :, self._slot] = value
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        attend: Callable[..., Tensor] = _attention
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


def _attention(
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
    return torch.compile(_attention, dynamic=True)


@functools.cache
def compiled_by_row() -> Callable[..., Tensor]:
    """Returns the attention of steps of one token a row, compiled for each number of rows."""

    def by_row(*tensors: Any) -> Tensor:  # A function of its own: PyTorch limits how often it compiles one.
        return _attention(*tensors)

    return torch.compile(by_row, dynamic=False)


class DecodeGraphs:
    """CUDA graphs of the steps in which each row of one policy computes one token."""

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
