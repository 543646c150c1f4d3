"""The sampler's key-value cache: rows in arenas of fixed capacity, reused by longest common prefix.

An arena holds rows of one capacity (256, 1024, 4096, ... tokens), so that long and short sequences never pad each
other and a decode step reads keys in place, without gathering. A finished row stays behind as a prefix that later
requests may continue or copy, until its room is needed. `clear` forgets every key: the weights changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIRST_CAPACITY = 256
GROWTH = 4


@dataclass(slots=True)
class Row:
    """One sequence's place. `tokens[:filled]` have their keys and values stored; `users` completions share it."""

    arena: Arena
    index: int
    tokens: NDArray[np.int32]
    length: int = 0
    filled: int = 0
    active: bool = True
    last_used: int = 0
    users: int = 0

    def set_tokens(self, tokens: NDArray[np.int32]) -> None:
        self.tokens[: len(tokens)] = tokens
        self.length = len(tokens)

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1


@dataclass(slots=True)
class Arena:
    """Rows of one capacity: `keys` and `values` are [layers, rows, kv heads, capacity, head dim]."""

    capacity: int
    keys: Tensor
    values: Tensor
    rows: list[Row | None] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return int(self.keys.shape[1])


class Cache:
    """Hands out rows within a budget of `max_tokens` positions over all arenas."""

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
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self._context, self._max_tokens = context, max_tokens
        self._dtype, self._device = dtype, device
        self._arenas: dict[int, Arena] = {}
        self._clock = 0

    def fits(self, length: int) -> bool:
        """Whether a sequence of this many tokens could ever be held."""
        return length <= self._context and self._capacity_for(length) <= self._max_tokens

    def acquire(self, prompt: NDArray[np.int32], length: int) -> Row | None:
        """A row for `prompt` with room for `length` tokens, filled with the longest stored prefix; None: wait.

        At least the last prompt token is left to compute, since its hidden state is what samples.
        """
        self._clock += 1
        source, shared = self._longest_prefix(prompt[:-1])
        if self._is_about_to_share_more(prompt[:-1], shared):
            return None
        capacity = self._capacity_for(length)
        if source is not None and not source.active and source.filled == shared and source.arena.capacity >= length:
            row = source
        else:
            taken = self._take_row(capacity, keep=source)
            if taken is None:
                return None
            row = taken
            if source is not None and shared:
                self._copy_keys(source, row, shared)
        row.set_tokens(prompt)
        row.filled = shared
        row.active = True
        row.last_used = self._clock
        return row

    def branch(self, row: Row) -> Row | None:
        """Another row with the same tokens and keys, for a completion that goes on differently; None: no room now."""
        twin = self._take_row(row.arena.capacity, keep=row)
        if twin is None:
            return None
        self._copy_keys(row, twin, row.filled)
        twin.set_tokens(row.tokens[: row.length])
        twin.filled = row.filled
        twin.last_used = self._clock
        return twin

    def release(self, row: Row) -> None:
        """The sequence ended; its keys stay as a prefix until the room is needed."""
        row.active = False
        row.length = row.filled
        row.last_used = self._clock

    def clear(self) -> None:
        """Forget every key and value: idle rows go, active rows must be computed again from their tokens."""
        for arena in self._arenas.values():
            for i, row in enumerate(arena.rows):
                if row is not None and not row.active:
                    arena.rows[i] = None
                elif row is not None:
                    row.filled = 0

    def _copy_keys(self, source: Row, target: Row, count: int) -> None:
        target.arena.keys[:, target.index, :, :count] = source.arena.keys[:, source.index, :, :count]
        target.arena.values[:, target.index, :, :count] = source.arena.values[:, source.index, :, :count]

    def _capacity_for(self, length: int) -> int:
        capacity = FIRST_CAPACITY
        while capacity < length:
            capacity *= GROWTH
        return min(capacity, max(self._context, length))

    def _all_rows(self) -> list[Row]:
        return [row for arena in self._arenas.values() for row in arena.rows if row is not None]

    def _longest_prefix(self, prompt: NDArray[np.int32]) -> tuple[Row | None, int]:
        best, shared = None, 0
        for row in self._all_rows():
            n = _common_prefix(row.tokens[: row.filled], prompt)
            if n > shared or (n == shared and n and best is not None and best.active and not row.active):
                best, shared = row, n
        return best, shared

    def _is_about_to_share_more(self, prompt: NDArray[np.int32], shared: int) -> bool:
        """Whether a row still being filled will soon hold a longer prefix: cheaper to wait for it than to compute it
        twice.
        """
        return any(
            row.active
            and row.filled < row.length - 1
            and _common_prefix(row.tokens[: row.length - 1], prompt) >= shared + FIRST_SHARE
            for row in self._all_rows()
        )

    def _take_row(self, capacity: int, keep: Row | None) -> Row | None:
        arena = self._arenas.get(capacity)
        if arena is None:
            arena = self._arenas[capacity] = Arena(capacity, *self._storage(0, capacity))
        for i, row in enumerate(arena.rows):
            if row is None:
                return self._place(arena, i)
        if self._grow(arena):
            return self._place(arena, next(i for i, row in enumerate(arena.rows) if row is None))
        idle = [row for row in arena.rows if row is not None and not row.active and row is not keep]
        if idle:
            return self._place(arena, min(idle, key=lambda row: row.last_used).index)
        return None

    def _place(self, arena: Arena, index: int) -> Row:
        row = Row(arena, index, np.zeros(arena.capacity, np.int32))
        arena.rows[index] = row
        return row

    def _grow(self, arena: Arena) -> bool:
        """Double the arena within the budget, dropping other arenas that hold nothing active if that makes room."""
        wanted = max(1, min(arena.num_rows, 64)) * arena.capacity
        if self._free_tokens() < arena.capacity:
            for other in [a for a in self._arenas.values() if a is not arena and not _has_active(a)]:
                del self._arenas[other.capacity]
        rows = min(wanted, self._free_tokens()) // arena.capacity
        if rows <= 0:
            return False
        keys, values = self._storage(arena.num_rows + rows, arena.capacity)
        keys[:, : arena.num_rows], values[:, : arena.num_rows] = arena.keys, arena.values
        arena.keys, arena.values = keys, values
        arena.rows.extend([None] * rows)
        return True

    def _free_tokens(self) -> int:
        return self._max_tokens - sum(a.num_rows * a.capacity for a in self._arenas.values())

    def _storage(self, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        shape = (self._layers, rows, self._kv_heads, capacity, self._head_dim)
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 times garbage may be NaN.
        return (
            torch.zeros(shape, dtype=self._dtype, device=self._device),
            torch.zeros(shape, dtype=self._dtype, device=self._device),
        )


FIRST_SHARE = 8
"""Fewest further tokens worth waiting for."""


def _has_active(arena: Arena) -> bool:
    return any(row is not None and row.active for row in arena.rows)


def _common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    if n == 0 or a[0] != b[0]:
        return 0
    differ = a[:n] != b[:n]
    first = int(differ.argmax())
    return first if differ[first] else n
