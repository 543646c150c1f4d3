"""The sampler's key-value cache in blocks of `BLOCK` tokens.

A sequence takes a block when it grows into it. Its blocks are reserved when it starts, so a running sequence never
waits for a block. A finished sequence stays as an idle row: a prefix that later requests continue or copy. When blocks
are needed, idle rows are evicted, least recently used first. No policy continues or copies the row of another, its
owner.

A model that does not share prefixes has no keys and values here: each row holds a cache of `transformers`, its `state`.
Only blocks are counted, idle rows are dropped, and a branched row copies the state.
"""

from __future__ import annotations

import copy
import heapq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentjet.compute.policy import CacheShape
from agentjet.timeline.forest import common_prefix
from agentjet.timeline.routes import Choices

BLOCK = 128
"""Tokens of a block. Smaller blocks cost more merges of attention; larger ones waste more of each last block."""
MIN_PREFIX_TO_AWAIT = 8
"""Minimum number of additional shared tokens for which a request waits until another row has computed them."""


@dataclass(slots=True, eq=False)
class CacheRow:
    """The cache of one sequence. `tokens[:filled]` have keys and values in `blocks`, or a `state`."""

    tokens: NDArray[np.int32]
    """Allocated at the sequence's maximum length."""
    owner: Any = None
    length: int = 0
    filled: int = 0
    blocks: list[int] = field(default_factory=list)
    state: Any = None
    routes: Choices | None = None
    """Experts [filled, routers, choices] of the tokens, if they are recorded."""

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    @property
    def num_missing(self) -> int:
        return self.length - self.filled

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1

    def add_routes(self, choices: Choices) -> None:
        """Add the routes of the next tokens to be filled."""
        stop = self.filled + len(choices)
        if self.routes is None or len(self.routes) < stop:
            grown = np.full((max(stop, self.capacity), *choices.shape[1:]), -1, choices.dtype)
            if self.routes is not None:
                grown[: len(self.routes)] = self.routes
            self.routes = grown
        self.routes[self.filled : stop] = choices


class KeyValueCache:
    """Allocates rows. `keys` and `values` are [layers, blocks and a spare one, kv heads, BLOCK, head dim].

    Invariant: free and idle blocks suffice for all blocks that active rows have reserved but not taken.
    """

    def __init__(self, shape: CacheShape | None, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """`shape` is None for a model that does not share prefixes."""
        self._shares_prefixes = shape is not None
        self._num_blocks = max_tokens // BLOCK
        shape = shape or CacheShape(0, 0, 0)
        sizes = [shape.layers, self._num_blocks + 1, shape.kv_heads, BLOCK, shape.head_dim]
        if device.type == "cuda":  # The blocks of a head lie one after the other: see `PagedPlan`.
            sizes[1], sizes[2] = sizes[2], sizes[1]
        # A CPU allocates memory at the first write; blocks are zeroed when they are taken.
        self.keys = torch.empty(sizes, dtype=dtype, device=device)
        self.values = torch.empty(sizes, dtype=dtype, device=device)
        if device.type == "cuda":
            self.keys, self.values = self.keys.transpose(1, 2), self.values.transpose(1, 2)
        self.spare = self._num_blocks
        """A block that no row takes. A step on CUDA writes the keys of its padding there."""
        self._clear_block(self.spare, 0)
        self._free = list(range(self._num_blocks))  # a heap: low blocks first, so that rows lie close together
        self._active: dict[CacheRow, None] = {}
        self._idle: dict[CacheRow, None] = {}  # least recently used first

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence that the cache can hold when it is otherwise empty."""
        return self._num_blocks * BLOCK

    @property
    def num_unreserved(self) -> int:
        """Blocks that no active row has reserved."""
        return self._num_blocks - sum(_blocks_of(row.capacity) for row in self._active)

    def acquire(self, prompt: NDArray[np.int32], length: int, owner: Any = None) -> CacheRow | None:
        """Returns a row for `prompt` of `length` tokens, filled with the longest stored prefix; None if blocks lack.

        At least the last prompt token is left to compute, because its hidden state predicts the first sampled token.
        """
        spare = self.num_unreserved - _blocks_of(length)
        if spare < 0:
            return None
        source, shared = self._longest_prefix(prompt[:-1], owner)
        if source in self._idle and (source.filled == shared or len(source.blocks) > spare):
            del self._idle[source]
            row = source
            self._trim(row, shared)
        else:
            row = CacheRow(prompt, owner)
            self._copy(source, row, shared)
        row.tokens, row.length = np.zeros(length, np.int32), len(prompt)
        row.tokens[: row.length] = prompt
        self._active[row] = None
        return row

    def awaits_prefix(self, prompt: NDArray[np.int32], owner: Any = None) -> bool:
        """True if a row that is being filled will hold a longer prefix of `prompt` than any row holds now.

        Waiting for that row is cheaper than computing the prefix twice.
        """
        shared = [
            common_prefix(row.tokens[: row.length - 1], prompt[:-1])
            for row in self._active
            if self._shares_prefixes and row.num_missing > 1 and row.owner is owner
        ]
        soon = max(shared, default=0)
        return soon >= MIN_PREFIX_TO_AWAIT and soon >= self._longest_prefix(prompt[:-1], owner)[1] + MIN_PREFIX_TO_AWAIT

    def branch(self, row: CacheRow) -> CacheRow | None:
        """Returns a copy of a row, for a completion that continues differently; None if blocks lack."""
        if _blocks_of(row.capacity) > self.num_unreserved:
            return None
        twin = CacheRow(row.tokens.copy(), row.owner, row.length)
        self._copy(row, twin, row.filled)
        self._active[twin] = None
        return twin

    def release(self, row: CacheRow) -> None:
        """Make a row idle: its sequence ended. Its keys stay as a prefix until their blocks are needed."""
        del self._active[row]
        row.length = row.filled
        if self._shares_prefixes:
            self._idle[row] = None
        else:
            self._trim(row, 0)

    def clear(self, owner: Any = None) -> None:
        """Drop the keys and values of an owner. Its active rows must be computed again from their tokens."""
        for row in (*self._idle, *self._active):
            if row.owner is owner:
                self._trim(row, 0)
                self._idle.pop(row, None)

    def _copy(self, source: CacheRow | None, target: CacheRow, count: int) -> None:
        """Copy the first `count` keys and values of `source` to `target`; marks `source` as recently used."""
        if source is None:
            return
        is_idle = source in self._idle
        self._idle.pop(source, None)  # so that the copy does not evict its source
        self.extend(target, count)
        for at, (old, new) in enumerate(zip(source.blocks, target.blocks, strict=False)):
            part = slice(min(BLOCK, count - at * BLOCK))
            self.keys[:, new, :, part] = self.keys[:, old, :, part]
            self.values[:, new, :, part] = self.values[:, old, :, part]
        target.filled, target.state = count, copy.deepcopy(source.state)
        target.routes = None if source.routes is None else source.routes[:count].copy()
        if is_idle:
            self._idle[source] = None

    def extend(self, row: CacheRow, length: int) -> None:
        """Take the blocks for the first `length` tokens of a row, within its capacity."""
        while len(row.blocks) < _blocks_of(length):
            while not self._free:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                self._trim(oldest, 0)
            block = heapq.heappop(self._free)
            self._clear_block(block, 0)
            row.blocks.append(block)

    def _trim(self, row: CacheRow, filled: int) -> None:
        """Drop the keys and values after the first `filled`, and free the blocks that held only those."""
        row.filled, row.state = filled, None
        whole, rest = divmod(filled, BLOCK)
        if rest:
            self._clear_block(row.blocks[whole], rest)
        for block in row.blocks[_blocks_of(filled) :]:
            heapq.heappush(self._free, block)
        del row.blocks[_blocks_of(filled) :]

    def _clear_block(self, block: int, start: int) -> None:
        """Zero the unused part: masked positions are multiplied by probability 0, and 0 times garbage may be NaN."""
        self.keys[:, block, :, start:] = 0
        self.values[:, block, :, start:] = 0

    def _longest_prefix(self, prompt: NDArray[np.int32], owner: Any = None) -> tuple[CacheRow | None, int]:
        """Returns the owner's row that shares most tokens (idle rows first) and the number of shared tokens."""
        best, shared = None, 0
        for row in (*self._idle, *self._active) if self._shares_prefixes else ():
            if row.owner is owner and (n := common_prefix(row.tokens[: row.filled], prompt)) > shared:
                best, shared = row, n
        return best, shared


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)
