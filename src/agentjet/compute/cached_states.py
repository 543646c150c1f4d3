"""The recurrent layers of sampling: the runs of a step read and write states in slots. `cache.py` allocates the slots.

A slot holds the state of one sequence after some of its tokens, in every recurrent layer. A run is a part of a
sequence's new tokens. It starts from the state in one slot and leaves its final state in another, or in the same.
So a prompt is cut into runs where its state is stored, and one pass computes them level by level.

Shapes: N tokens, R runs of a batch, L tokens of its longest run, C channels, W width of a convolution, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentjet.compute.recurrence import Step, batches

StateKey = tuple[int, str]
"""Layer and kind of a state: the last inputs of a convolution, or the state of a recurrence."""


class StateSize(NamedTuple):
    """Sizes of the state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


StateShape = Mapping[StateKey, StateSize]
"""Sizes by layer and kind. A layer without a state has none."""


class StateSlots:
    """A tensor [S and a spare slot, ...] for each layer and kind. The spare slot is 0: the state before any token."""

    def __init__(self, num_slots: int, device: torch.device, shape: StateShape | None = None) -> None:
        """A layer that is not in `shape` gets its tensor when its first state is written."""
        self.num_slots = num_slots
        self._device = device
        self._stored: dict[StateKey, Tensor] = {}
        for key, size in (shape or {}).items():
            self._allocate(key, size)

    @property
    def shape(self) -> StateShape:
        return {key: StateSize(tuple(x.shape[1:]), x.dtype) for key, x in self._stored.items()}

    def read(self, key: StateKey, slots: slice | Tensor) -> Tensor | None:
        """Returns states [R, ...]; None before the first one is written."""
        stored = self._stored.get(key)
        if stored is None or isinstance(slots, slice):
            return None if stored is None else stored[slots]
        return stored.index_select(0, slots)

    def write(self, key: StateKey, slots: slice | Tensor, states: Tensor) -> None:
        if key not in self._stored:
            self._allocate(key, StateSize(tuple(states.shape[1:]), states.dtype))
        if isinstance(slots, slice):
            self._stored[key][slots] = states
        else:
            self._stored[key].index_copy_(0, slots, states)

    def copy(self, source: int, target: int) -> None:
        for stored in self._stored.values():
            stored[target] = stored[source]

    def _allocate(self, key: StateKey, size: StateSize) -> None:
        # A CPU allocates memory at the first write.
        stored = torch.empty(self.num_slots + 1, *size.shape, dtype=size.dtype, device=self._device)
        stored[self.num_slots] = 0
        self._stored[key] = stored


class StateRun(NamedTuple):
    """Tokens `start:stop` of a step, the slot of the state before them, and the slot for the state after them."""

    start: int
    stop: int
    source: int
    target: int


class StepRecurrence:
    """The recurrent layers of one sampling step. Every layer reuses its tables."""

    def __init__(self, runs: Sequence[StateRun], slots: StateSlots, device: torch.device) -> None:
        """A run stands after the one that writes its source."""
        self._slots = slots
        self._num_tokens = runs[-1].stop
        writer = {run.target: at for at, run in enumerate(runs)}
        above = [writer.get(run.source, -1) for run in runs]
        above = [parent if parent < at else -1 for at, parent in enumerate(above)]  # A slot may be its own source.
        found = batches([(run.start, run.stop) for run in runs], above)
        self._batches = [_Batch([runs[at] for at in batch], device) for batch in found]

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Recurrence.convolve`."""
        key, width = (layer, "convolution"), weight.shape[1]
        # No run has the tokens of padding: garbage, which may be no number, must not go on to the next layer.
        out = inputs.new_zeros(inputs.shape, dtype=weight.dtype)
        for batch in self._batches:
            own = batch.gather(inputs)
            past = self._slots.read(key, batch.sources)
            past = own.new_zeros(len(own), width - 1, own.shape[2]) if past is None else past
            rows = torch.cat([past, own], 1)
            self._slots.write(key, batch.targets, batch.last(rows, width - 1))
            batch.scatter(out, (rows.to(weight.dtype).unfold(1, width, 1) * weight).sum(-1))
        return out if bias is None else out + bias

    def scan(self, layer: int, inputs: Sequence[Tensor], step: Step) -> Tensor:
        """See `Recurrence.scan`."""
        key, out = (layer, "state"), inputs[0]
        for number, batch in enumerate(self._batches):
            found, finals = step([batch.gather(x) for x in inputs], self._slots.read(key, batch.sources))
            self._slots.write(key, batch.targets, finals)
            if number == 0:
                out = found.new_zeros(self._num_tokens, *found.shape[2:])
            batch.scatter(out, found)
        return out


class _Batch:
    """Runs that are computed together: R rows of L tokens, those of padding last."""

    def __init__(self, runs: Sequence[StateRun], device: torch.device) -> None:
        starts, stops, sources, targets = (np.array(column) for column in zip(*runs, strict=True))
        self._sizes = len(runs), int((stops - starts).max())
        self.sources, self.targets = _places(sources, device), _places(targets, device)
        tokens = starts[:, None] + np.arange(self._sizes[1])
        inside = tokens < stops[:, None]
        own = tokens[inside]
        self._is_padded = not inside.all()
        self._own = _places(own, device)
        self._tokens = torch.from_numpy(np.where(inside, tokens, 0)).to(device)
        self._outside = torch.from_numpy(~inside).to(device)
        self._inside = torch.from_numpy(np.flatnonzero(inside)).to(device)
        self._lengths = torch.from_numpy(stops - starts).to(device)

    def gather(self, rows: Tensor) -> Tensor:
        """Returns [R, L, ...] of rows [N, ...]; 0 in padding."""
        if not self._is_padded:
            return rows[self._own].view(*self._sizes, *rows.shape[1:])
        found = rows[self._tokens]
        return found.masked_fill_(self._outside.view(*self._sizes, *[1] * (rows.dim() - 1)), 0)

    def scatter(self, rows: Tensor, found: Tensor) -> None:
        """Write [R, L, ...] to rows [N, ...], without padding."""
        flat = found.flatten(0, 1)
        rows[self._own] = flat[self._inside] if self._is_padded else flat

    def last(self, rows: Tensor, count: int) -> Tensor:
        """Returns the last rows [R, count, C] of each run, of [R, count + L, C] with `count` earlier ones first."""
        if not self._is_padded:
            return rows[:, self._sizes[1] :]
        at = self._lengths[:, None] + torch.arange(count, device=rows.device)
        return rows[torch.arange(len(rows), device=rows.device)[:, None], at]


def _places(places: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Returns places as an index; as a slice, which needs no copy, if each follows the one before it."""
    first = int(places[0])
    if (places == first + np.arange(len(places))).all():
        return slice(first, first + len(places))
    return torch.from_numpy(places).to(device)
