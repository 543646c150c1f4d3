"""The sampler's cache: keys and values in blocks of `BLOCK` tokens, and states of recurrent layers in slots.

A sequence takes a block when it grows into it. Its blocks are reserved when it starts, so a running sequence never
waits for a block. A finished sequence stays as an idle row: a prefix that later requests continue or copy. When blocks
are needed, idle rows are evicted, least recently used first. No policy continues or copies the row of another, its
owner.

A state cannot be cut. So an active row of a model with recurrent layers has the state after its last token in a slot, a
branch copies the slot, and a prefix ends where a state is stored: at the end of a prompt and of a sequence, where two
sequences part, and every `STATE_TOKENS` of a prompt. Stored states are evicted when slots are needed.

A model that does not share prefixes has no keys and values here: each row holds a cache of `transformers`, its `state`.
Only blocks are counted, idle rows are dropped, and a branched row copies the state.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.cached_states import StateRun, StateSlots
from agentjet.compute.policy import CacheShape
from agentjet.timeline.forest import common_prefix
from agentjet.timeline.routes import Choices

BLOCK = 128
"""Tokens of a block. Smaller blocks cost more merges of attention; larger ones waste more of each last block."""
MIN_PREFIX_TO_AWAIT = 8
"""Minimum number of additional shared tokens for which a request waits until another row has computed them."""
FIRST_PLACES = 64
"""Rows of the table of blocks before it grows."""
STATE_TOKENS = 512
"""Tokens of a prompt between two states that are stored in any case. They are evicted before all others."""
TAIL_TOKENS = 32
"""Tokens between the end of a prompt and one more stored state. Many templates rewrite the last tokens of a prompt in
the next turn, such as those that open the reasoning."""


@dataclass(slots=True, eq=False)
class CacheRow:
    """The cache of one sequence. `tokens[:filled]` have keys and values in `blocks`, or a `state`."""

    tokens: NDArray[np.int32]
    """Allocated at the sequence's maximum length."""
    owner: Any = None
    length: int = 0
    filled: int = 0
    blocks: list[int] = field(default_factory=list)
    place: int = -1
    """Row of `KeyValueCache.table` that lists `blocks`. An idle row has none."""
    state: Any = None
    slot: int = -1
    """Slot of the state after `filled` tokens. Only an active row has one."""
    states: dict[int, int] = field(default_factory=dict)
    """Slots of stored states, by the number of tokens before."""
    stops: dict[int, bool] = field(default_factory=dict)
    """Numbers of tokens after which the state is stored; True if a later sequence is likely to start there."""
    routes: Choices | None = None
    """Experts [filled, routers, choices] of the tokens, if they are recorded."""

    @property
    def capacity(self) -> int:
        return len(self.tokens)

    @property
    def num_missing(self) -> int:
        return self.length - self.filled

    def last_state(self, most: int) -> int:
        """Returns the largest number of tokens up to `most` after which a state exists; 0 without any."""
        own = [self.filled] if self.slot >= 0 else []
        return max((at for at in (*self.states, *own) if at <= most), default=0)

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
    """Allocates rows. All layers use the same blocks: a row's block 3 has its tokens in each layer.

    Invariant: free and idle blocks suffice for all blocks that active rows have reserved but not taken.
    """

    def __init__(
        self,
        shape: CacheShape | None,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: StateSlots | None = None,
    ) -> None:
        """`shape` is None for a model that does not share prefixes. `slots` are None without recurrent layers.

        There must be more slots than active rows.
        """
        self._shares_prefixes = shape is not None
        self._num_blocks = max_tokens // BLOCK
        self.dtype, self.device = dtype, device
        self.spare = self._num_blocks
        """A block that no row takes. A step on CUDA writes the keys of its padding there."""
        self.stored: list[Tensor] = []
        """Keys, then values, of each group of layers of equal sizes: [layers, blocks, kv heads, BLOCK, width]."""
        self._places: dict[int, tuple[int, int]] = {}
        for sizes in dict.fromkeys((shape or {}).values()):
            layers = [layer for layer, other in (shape or {}).items() if other == sizes]
            self._places |= {layer: (len(self.stored), place) for place, layer in enumerate(layers)}
            widths = sizes.key_dim, sizes.value_dim
            if device.type != "cuda":  # The fused kernels of a CPU take one width: zeros follow the narrower ones.
                widths = max(widths), max(widths)
            self.stored += [self._allocated(len(layers), sizes.kv_heads, width) for width in widths]
        self._clear_block(self.spare, 0)
        self._free = list(range(self._num_blocks))  # a heap: low blocks first, so that rows lie close together
        self.table = np.zeros((FIRST_PLACES, self._num_blocks), np.int32)
        """Blocks of the active rows, by `CacheRow.place`: a step reads those of all rows at once."""
        self._free_places = list(range(FIRST_PLACES))  # a heap
        self._active: dict[CacheRow, None] = {}
        self._idle: dict[CacheRow, None] = {}  # least recently used first
        self.slots = slots
        self._free_slots = list(range(slots.num_slots)) if slots else []
        self._stored: dict[bool, dict[tuple[CacheRow, int], None]] = {False: {}, True: {}}
        """Stored states by row and number of tokens, least recently used first: likely to be used, or not."""

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a layer, [blocks and the spare one, kv heads, BLOCK, width] each."""
        group, place = self._places[layer]
        return self.stored[group][place], self.stored[group + 1][place]

    def _allocated(self, layers: int, heads: int, width: int) -> Tensor:
        blocks = self._num_blocks + 1
        # A CPU allocates memory at the first write; blocks are zeroed when they are taken.
        if self.device.type == "cuda":  # The blocks of a head lie one after the other: see `PagedPlan`.
            sizes = layers, heads, blocks, BLOCK, width
            return torch.empty(sizes, dtype=self.dtype, device=self.device).transpose(1, 2)
        return torch.empty(layers, blocks, heads, BLOCK, width, dtype=self.dtype, device=self.device)

    @property
    def max_tokens(self) -> int:
        """Length of the longest sequence that the cache can hold when it is otherwise empty."""
        return self._num_blocks * BLOCK

    @property
    def num_blocks(self) -> int:
        """Number of stored blocks, with the spare one."""
        return self._num_blocks + 1

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
        source, shared, known = self._longest_prefix(prompt[:-1], owner)
        if source in self._idle and (source.filled == shared or len(source.blocks) > spare):
            del self._idle[source]
            row = source
            self._take_state(row, source, shared)
            self._trim(row, shared)
            self.extend(row, shared)
        else:
            row = CacheRow(prompt, owner)
            if not self._take_state(row, source, shared):
                return None
            self._copy(source, row, shared)
        if self.slots:
            row.stops = _stops(len(prompt) - 1, shared, known)
        row.tokens, row.length = np.zeros(length, np.int32), len(prompt)
        row.tokens[: row.length] = prompt
        self._active[row] = None
        return row

    def awaits_prefix(self, prompt: NDArray[np.int32], owner: Any = None) -> bool:
        """True if a row that is being filled will hold a longer prefix of `prompt` than any row holds now.

        Waiting for that row is cheaper than computing the prefix twice.
        """
        awaited, soon = None, 0
        for row in self._active:
            if not (self._shares_prefixes and row.num_missing > 1 and row.owner is owner):
                continue
            if _may_share(row.tokens[: row.length - 1], prompt[:-1], soon):
                shared = common_prefix(row.tokens[: row.length - 1], prompt[:-1])
                if self.slots and shared <= row.filled:
                    shared = row.last_state(shared)
                if shared > soon:
                    awaited, soon = row, shared
        if awaited is None or soon < self._longest_prefix(prompt[:-1], owner)[1] + MIN_PREFIX_TO_AWAIT:
            return False
        if self.slots:
            awaited.stops[soon] = True
        return True

    def branch(self, row: CacheRow) -> CacheRow | None:
        """Returns a copy of a row, for a completion that continues differently; None if blocks lack."""
        if _blocks_of(row.capacity) > self.num_unreserved:
            return None
        twin = CacheRow(row.tokens.copy(), row.owner, row.length)
        if not self._take_state(twin, row, row.filled):
            return None
        self._copy(row, twin, row.filled)
        self._active[twin] = None
        return twin

    def release(self, row: CacheRow) -> None:
        """Make a row idle: its sequence ended. Its keys stay as a prefix until their blocks are needed."""
        del self._active[row]
        row.length = row.filled
        if row.place >= 0:
            heapq.heappush(self._free_places, row.place)
            row.place = -1
        if self.slots:
            if row.filled and row.filled not in row.states:
                row.states[row.filled] = row.slot
                self._stored[True][row, row.filled] = None
            else:
                heapq.heappush(self._free_slots, row.slot)
            row.slot, row.stops = -1, {}
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

    def runs(self, spans: Iterable[tuple[CacheRow, int]]) -> list[StateRun]:
        """Returns the runs of the next tokens of these rows, and takes slots for the states that are stored."""
        assert self.slots is not None
        runs, start = [], 0
        for row, count in spans:
            source, first = row.slot if row.filled else self.slots.num_slots, start - row.filled
            for at in sorted(at for at in row.stops if row.filled < at < row.filled + count and at not in row.states):
                slot = self._slot(row.stops[at])
                if slot is not None:
                    runs.append(StateRun(start, first + at, source, slot))
                    # A slot of this step is not evicted in it: `advance` lists the state.
                    row.states[at] = source = slot
                    start = first + at
            runs.append(StateRun(start, start := first + row.filled + count, source, row.slot))
        return runs

    def advance(self, spans: Iterable[tuple[CacheRow, int]]) -> None:
        """Count the next tokens of these rows as computed."""
        for row, count in spans:
            row.filled += count
            if row.stops:
                self._store(row)

    def _store(self, row: CacheRow) -> None:
        """Store the states of the stops that the row has reached."""
        for at in [at for at in row.stops if at <= row.filled]:
            likely = row.stops.pop(at)
            if at == row.filled and at not in row.states and self.slots and (slot := self._slot(likely)) is not None:
                self.slots.copy(row.slot, slot)
                row.states[at] = slot
            if at in row.states:
                self._stored[likely][row, at] = None

    def _take_state(self, row: CacheRow, source: CacheRow | None, count: int) -> bool:
        """Give a row a slot with the state of `source` after `count` tokens; False if slots lack."""
        if self.slots is None:
            return True
        if source is None:
            slot = self._slot(True)
        else:
            likely = (source, count) in self._stored[True]
            self._unlist(source, count)  # so that the copy does not evict its source
            known = source.states.get(count, source.slot)
            slot = self._slot(True) if self._free_slots or row is not source else None
            if slot is None and row is source:
                slot = source.states.pop(count)
            elif slot is not None:
                self.slots.copy(known, slot)
            if count in source.states:  # A row that goes on from its end makes the end unlikely to be used again.
                self._stored[likely and row is not source][source, count] = None
        row.slot = -1 if slot is None else slot
        return slot is not None

    def _slot(self, likely: bool) -> int | None:
        """Returns a free slot, if necessary that of a stored state; None if slots lack.

        A state that is not likely to be used evicts no state that is.
        """
        if not self._free_slots:
            stored = self._stored[False] or (self._stored[True] if likely else {})
            if (oldest := next(iter(stored), None)) is not None:
                row, at = oldest
                self._drop_state(row, at)
                if row in self._idle:
                    self._trim(row, row.last_state(row.filled))
                    if not row.states:
                        del self._idle[row]
        return heapq.heappop(self._free_slots) if self._free_slots else None

    def _drop_state(self, row: CacheRow, at: int) -> None:
        self._unlist(row, at)
        heapq.heappush(self._free_slots, row.states.pop(at))

    def _unlist(self, row: CacheRow, at: int) -> None:
        for stored in self._stored.values():
            stored.pop((row, at), None)

    def _copy(self, source: CacheRow | None, target: CacheRow, count: int) -> None:
        """Copy the first `count` keys and values of `source` to `target`; marks `source` as recently used."""
        if source is None:
            return
        is_idle = source in self._idle
        self._idle.pop(source, None)  # so that the copy does not evict its source
        self.extend(target, count)
        for at, (old, new) in enumerate(zip(source.blocks, target.blocks, strict=False)):
            part = slice(min(BLOCK, count - at * BLOCK))
            for stored in self.stored:
                stored[:, new, :, part] = stored[:, old, :, part]
        target.filled, target.state = count, copy.deepcopy(source.state)
        target.routes = None if source.routes is None else source.routes[:count].copy()
        if is_idle:
            self._idle[source] = None

    def extend(self, row: CacheRow, length: int) -> None:
        """Take the blocks for the first `length` tokens of an active row, within its capacity."""
        if row.place < 0:
            self._enter(row)
        while len(row.blocks) < _blocks_of(length):
            while not self._free:
                oldest = next(iter(self._idle))
                del self._idle[oldest]
                self._trim(oldest, 0)
            block = heapq.heappop(self._free)
            self._clear_block(block, 0)
            self.table[row.place, len(row.blocks)] = block
            row.blocks.append(block)

    def listed(
        self, rows: Sequence[CacheRow], first: NDArray[np.int64] | int, stop: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the blocks `first:stop` of each row, one row after the other, the rows' numbers, and the ordinals.

        The ordinal of a block is its number in its row. The rows are active.
        """
        counts = stop - first
        owner = np.repeat(np.arange(len(rows)), counts)
        begin = np.cumsum(counts) - counts - first
        ordinal = np.arange(len(owner)) - begin[owner]
        return self.table[np.array([row.place for row in rows])[owner], ordinal], owner, ordinal

    def _enter(self, row: CacheRow) -> None:
        """Give a row a place in the table of blocks."""
        if not self._free_places:
            num_places = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._free_places = list(range(num_places, 2 * num_places))
        row.place = heapq.heappop(self._free_places)
        self.table[row.place, : len(row.blocks)] = row.blocks

    def _trim(self, row: CacheRow, filled: int) -> None:
        """Drop the keys and values after the first `filled`, and free the blocks that held only those."""
        row.filled, row.state = filled, None
        for at in [at for at in row.states if at > filled]:
            self._drop_state(row, at)
        whole, rest = divmod(filled, BLOCK)
        if rest:
            self._clear_block(row.blocks[whole], rest)
        for block in row.blocks[_blocks_of(filled) :]:
            heapq.heappush(self._free, block)
        del row.blocks[_blocks_of(filled) :]

    def _clear_block(self, block: int, start: int) -> None:
        """Zero the unused part: masked positions are multiplied by probability 0, and 0 times garbage may be NaN."""
        for stored in self.stored:
            stored[:, block, :, start:] = 0

    def _longest_prefix(self, prompt: NDArray[np.int32], owner: Any = None) -> tuple[CacheRow | None, int, int]:
        """Returns the owner's row with the longest prefix to start from (idle rows first), and the prefix's length.

        The last number is the most tokens that a row shares, with a state after them or not.
        """
        best, longest, most = None, 0, 0
        for row in (*self._idle, *self._active) if self._shares_prefixes else ():
            if row.owner is owner and _may_share(row.tokens[: row.filled], prompt, longest):
                shared = common_prefix(row.tokens[: row.filled], prompt)
                most = max(most, shared)
                if self.slots:
                    shared = row.last_state(shared)
                if shared > longest:
                    best, longest = row, shared
        return best, longest, most


def _stops(last: int, shared: int, known: int) -> dict[int, bool]:
    """Returns the numbers of tokens after which a prompt's state is stored: see `CacheRow.stops`.

    `last` are all tokens but one, `shared` are computed, and another sequence begins with the `known` ones.
    """
    regular = dict.fromkeys((*range(0, last, STATE_TOKENS), last - TAIL_TOKENS), False)
    likely = [last, known] if known >= shared + MIN_PREFIX_TO_AWAIT else [last]
    return {at: likely for at, likely in (regular | dict.fromkeys(likely, True)).items() if at > shared}


def _may_share(tokens: NDArray[np.int32], prompt: NDArray[np.int32], count: int) -> bool:
    """True if the common prefix may be longer than `count`. One comparison spares most rows the whole one."""
    return count < len(tokens) and count < len(prompt) and bool(tokens[count] == prompt[count])


def _blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)
