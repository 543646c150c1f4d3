"""Attention over a forest: each branch attends to its own past only, and shared prefixes are computed once.

A dense N x N mask would cost more than it saves at length. The forest is cut into *blocks*, each a contiguous piece
of the depth-first order whose tokens share the same ancestors: small subtrees are one block, a long unbranched run is
chunked.
A block's queries meet the keys of its gathered ancestors (all visible) and of the block itself (interval mask).
Blocks of similar size run as one padded batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.embedded.attention import group_queries, ungroup_queries
from agentjet.timeline.forest import Forest

BLOCK_TOKENS = 256
"""Subtrees up to this size are computed with a dense mask of their own; runs are chunked at it."""
PADDING = 1.3
"""Blocks share a batch while the padded area is at most this many times the largest of their own."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `start:stop` with the node indices of all their common `ancestors`, root first."""

    start: int
    stop: int
    ancestors: NDArray[np.int64]

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def num_keys(self) -> int:
        return len(self.ancestors) + self.num_queries


def blocks(forest: Forest, block_tokens: int = BLOCK_TOKENS) -> list[Block]:
    """Cut a forest into blocks that cover every node once."""
    end = forest.end
    found: list[Block] = []
    pending: list[tuple[int, int, NDArray[np.int64]]] = [(0, forest.num_nodes, np.zeros(0, np.int64))]
    while pending:
        start, stop, ancestors = pending.pop()
        if stop - start <= block_tokens:
            found.append(Block(start, stop, ancestors))
            continue
        child, packed = start, start
        while child < stop:
            size = int(end[child]) - child
            if packed < child and (child + size - packed > block_tokens):
                found.append(Block(packed, child, ancestors))
                packed = child
            if size > block_tokens:
                run = _run_length(end, child)
                for at in range(child, child + run, block_tokens):
                    before = np.concatenate([ancestors, np.arange(child, at)])
                    found.append(Block(at, min(at + block_tokens, child + run), before))
                inner = np.concatenate([ancestors, np.arange(child, child + run)])
                if child + run < end[child]:
                    pending.append((child + run, int(end[child]), inner))
                packed = int(end[child])
            child = int(end[child])
        if packed < stop:
            found.append(Block(packed, stop, ancestors))
    return found


def _run_length(end: NDArray[np.int32], start: int) -> int:
    """Nodes from `start` on that have a single child each, `start`'s last such descendant included."""
    stop = int(end[start])
    broken = np.flatnonzero(end[start:stop] != stop)
    return int(broken[0]) if len(broken) else stop - start


class ForestPlan:
    """The attention plan of one forward pass over a forest, reused by every layer and by the backward pass."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        ordered = sorted(blocks(forest), key=lambda b: (b.num_queries, b.num_keys))
        self._batches: list[_Batch] = []
        position = np.zeros(forest.num_nodes, np.int64)
        offset = 0
        for batch in _batched(ordered):
            self._batches.append(_Batch(batch, forest, device))
            width = max(b.num_queries for b in batch)
            for i, b in enumerate(batch):
                position[b.start : b.stop] = offset + i * width + np.arange(b.num_queries)
            offset += len(batch) * width
        self._position = torch.from_numpy(position).to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        outs = [batch.attend(query, key, value, scale) for batch in self._batches]
        return torch.cat(outs).index_select(0, self._position)


class _Batch:
    """Blocks padded to one shape: queries [B, Q], keys [B, L], a mask [B, 1, Q, L]."""

    def __init__(self, batch: list[Block], forest: Forest, device: torch.device) -> None:
        num_queries, num_keys = max(b.num_queries for b in batch), max(b.num_keys for b in batch)
        queries = np.zeros((len(batch), num_queries), np.int64)
        keys = np.zeros((len(batch), num_keys), np.int64)
        mask = np.zeros((len(batch), num_queries, num_keys), bool)
        for i, b in enumerate(batch):
            nodes = np.arange(b.start, b.stop)
            shared = len(b.ancestors)
            queries[i, : len(nodes)] = nodes
            keys[i, :shared] = b.ancestors
            keys[i, shared : b.num_keys] = nodes
            mask[i, : len(nodes), :shared] = True
            visible = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < forest.end[nodes][None, :])
            mask[i, : len(nodes), shared : b.num_keys] = visible
            mask[i, len(nodes) :, 0] = True  # a padded query must see something, or its softmax is NaN
        self._shape = queries.shape
        self._queries = torch.from_numpy(queries.reshape(-1)).to(device)
        self._keys = torch.from_numpy(keys.reshape(-1)).to(device)
        self._mask = torch.from_numpy(mask[:, None]).to(device)
        self._num_keys = num_keys

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        count, width = self._shape
        _, heads, dim = query.shape
        kv_heads = key.shape[1]
        q = query.index_select(0, self._queries).view(count, width, heads, dim)
        k = key.index_select(0, self._keys).view(count, self._num_keys, kv_heads, dim).transpose(1, 2)
        v = value.index_select(0, self._keys).view(count, self._num_keys, kv_heads, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            group_queries(q, kv_heads), k, v, attn_mask=self._mask.repeat(1, 1, heads // kv_heads, 1), scale=scale
        )
        return ungroup_queries(out, heads).reshape(count * width, heads, dim)


def _batched(ordered: list[Block]) -> list[list[Block]]:
    """Group blocks, sorted by size, while padding stays cheap."""
    batches: list[list[Block]] = []
    for block in ordered:
        if batches:
            together = [*batches[-1], block]
            area = max(b.num_queries for b in together) * max(b.num_keys for b in together)
            if area * len(together) <= PADDING * sum(b.num_queries * b.num_keys for b in together):
                batches[-1] = together
                continue
        batches.append([block])
    return batches
