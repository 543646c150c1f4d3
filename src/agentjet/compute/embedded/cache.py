"""The sampler's key-value cache: sequences in blocks of `BLOCK` tokens, reused by longest common prefix.

A sequence takes a block when it grows into it, so its last block alone is partly empty. Blocks for its whole length are
reserved when it starts: a sequence that runs never waits for room. A finished sequence stays as an idle row, a prefix
that later requests continue or copy. Idle rows are evicted one by one, the longest unused first, as blocks are needed.
`clear` forgets every key: the weights changed.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 128
"""Tokens of a block: fewer cost more merges of attention, more leave more of each last block empty."""
MIN_PREFIX_TO_AWAIT = 8
"""Fewest further shared tokens for which a request waits until another row has computed them."""


@dataclass(slots=True, eq=False)
class CacheRow:
    """One sequence's place. `tokens[:filled]` have keys and values in `blocks`; `users` completions share it."""

    tokens: NDArray[np.int32]
    """As long as the sequence may become."""
    length: int = 0
    filled: int = 0
    users: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    def set_tokens(self, tokens: NDArray[np.int32]) -> None:
        self.tokens[: len(tokens)] = tokens
        self.length = len(tokens)

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1


class KeyValueCache:
    """Hands out rows. `keys` and `values` are [layers, blocks, kv heads, BLOCK, head dim].

    Invariant: the blocks that are free or idle suffice for all that active rows have reserved and not taken.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        context: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._context = context
        self._num_blocks = max_tokens // BLOCK
        shape = (layers, self._num_blocks, kv_heads, BLOCK, head_dim)
        # A CPU provides memory at the first write; blocks are zeroed when they are taken.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._free = list(range(self._num_blocks))  # a heap: low blocks first, so that rows stand close together
        self._reserved = 0
        self._active: dict[CacheRow, None] = {}
        self._idle: dict[CacheRow, None] = {}  # the longest unused first

    def fits(self, length: int) -> bool:
        """Whether a sequence of this many tokens could ever be held."""
        return length <= self._context and _blocks_of(length) <= self._num_blocks

    def acquire(self, prompt: NDArray[np.int32], length: int) -> CacheRow | None:
        """A row for `prompt` with room for `length` tokens, filled with the longest stored prefix; None: no room yet.

        At least the last prompt token is left to compute, since its hidden state is what samples.
        """
        room = self._num_blocks - self._reserved - _blocks_of(length)
        if room < 0:
            return None
        source, shared = self._longest_prefix(prompt[:-1])
        tokens = np.zeros(length, np.int32)
        if source in self._idle and (source.filled == shared or len(source.blocks) > room):
            del self._idle[source]
            row, row.tokens = source, tokens
            self._trim(row, shared)
        else:
            row = CacheRow(tokens)
            self._copy(source, row, shared)
        row.set_tokens(prompt)
        self._activate(row)
        return row

    def awaits_prefix(self, prompt: NDArray[np.int32]) -> bool:
        """True if a row still being filled will soon hold a longer prefix of `prompt` than any row does now.

        To wait for it is cheaper than to compute it twice.
        """
        filling = [row for row in self._active if row.filled < row.length - 1]
        if not filling:
            return False
        soon = max(_common_prefix(row.tokens[: row.length - 1], prompt[:-1]) for row in filling)
        return soon >= MIN_PREFIX_TO_AWAIT and soon >= self._longest_prefix(prompt[:-1])[1] + MIN_PREFIX_TO_AWAIT

    def extend(self, row: CacheRow, length: int) -> None:
        """Take the blocks that the first `length` tokens of an active row need."""
        assert length <= row.capacity and row in self._active
        self._take(row, length)

    def branch(self, row: CacheRow) -> CacheRow | None:
        """Another row with the same tokens and keys, for a completion that goes on differently; None: no room now."""
        if _blocks_of(row.capacity) > self._num_blocks - self._reserved:
            return None
        twin = CacheRow(np.zeros(row.capacity, np.int32))
        self._copy(row, twin, row.filled)
        twin.set_tokens(row.tokens[: row.length])
        self._activate(twin)
        return twin

    def release(self, row: CacheRow) -> None:
        """The sequence ended; its keys stay as a prefix until their blocks are needed."""
        del self._active[row]
        self._reserved -= _blocks_of(row.capacity)
        row.length = row.filled
        self._idle[row] = None

    def clear(self) -> None:
        """Forget every key and value: idle rows go, active rows must be computed again from their tokens."""
        for row in (*self._idle, *self._active):
            self._trim(row, 0)
        self._idle.clear()

    def _activate(self, row: CacheRow) -> None:
        self._active[row] = None
        self._reserved += _blocks_of(row.capacity)

    def _copy(self, source: CacheRow | None, target: CacheRow, count: int) -> None:
        """Give `target` the first `count` keys and values of `source`, which counts as used."""
        if source is None:
            return
        is_idle = source in self._idle
        self._idle.pop(source, None)  # not evicted for its own copy
        self._take(target, count)
        for at, (old, new) in enumerate(zip(source.blocks, target.blocks, strict=False)):
            part = slice(min(BLOCK, count - at * BLOCK))
            self.keys[:, new, :, part] = self.keys[:, old, :, part]
            self.values[:, new, :, part] = self.values[:, old, :, part]
        target.filled = count
        if is_idle:
            self._idle[source] = None

    def _take(self, row: CacheRow, length: int) -> None:
        while len(row.blocks) < _blocks_of(length):
            while not self._free:
                self._evict()
            block = heapq.heappop(self._free)
            self._clear_block(block, 0)
            row.blocks.append(block)

    def _trim(self, row: CacheRow, filled: int) -> None:
        """Forget the keys and values after the first `filled`, and free the blocks that held only those."""
        row.filled = filled
        whole, rest = divmod(filled, BLOCK)
        if rest:
            self._clear_block(row.blocks[whole], rest)
        for block in row.blocks[_blocks_of(filled) :]:
            heapq.heappush(self._free, block)
        del row.blocks[_blocks_of(filled) :]

    def _clear_block(self, block: int, start: int) -> None:
        """Masked positions are multiplied by probability 0, and 0 times garbage may be NaN."""
        self.keys[:, block, :, start:] = 0
        self.values[:, block, :, start:] = 0

    def _evict(self) -> None:
        oldest = next(iter(self._idle))
        del self._idle[oldest]
        self._trim(oldest, 0)

    def _longest_prefix(self, prompt: NDArray[np.int32]) -> tuple[CacheRow | None, int]:
        """The row that shares most tokens, idle before active, and how many."""
        best, shared = None, 0
        for row in (*self._idle, *self._active):
            n = _common_prefix(row.tokens[: row.filled], prompt)
            if n > shared:
                best, shared = row, n
        return best, shared


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
