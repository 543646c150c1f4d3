"""The attention plan of a forest on CUDA: `flex_attention` with the interval mask, one fused kernel a layer.

The mask is `kv <= q < end[kv]`, one integer a node. Which 128 x 128 tiles it leaves empty, full or mixed follows from
the smallest and largest `end` of a tile's keys, so the tile table is built without an N x N mask.

Tested on a CPU against `ForestPlan`: the tile table, and the forward pass, eager and compiled. Never run: the backward
pass, which `flex_attention` does not have on a CPU, and anything on CUDA. `branching.py` tries the forward pass when a
model is loaded, so a kernel that cannot run, or computes something else, shows there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentjet.timeline.forest import Forest

TILE = 128
"""Edge of a tile of the mask; passes are padded to a multiple of it."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexPlan:
    """The attention plan of one forward pass over a forest; the tile table serves every layer."""

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self._num_nodes = forest.num_nodes
        self._padding = -forest.num_nodes % TILE
        # A padded node ends right after itself: it sees itself only, and nobody sees it.
        padding = np.arange(forest.num_nodes, forest.num_nodes + self._padding, dtype=np.int32) + 1
        self._tiles = tile_mask(np.concatenate([forest.end, padding]), device)
        self._flex: Callable[..., Any] = compiled_flex() if device.type == "cuda" else cast(Any, flex_attention)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        out = cast(
            Tensor,
            self._flex(
                self._heads_first(query),
                self._heads_first(key),
                self._heads_first(value),
                block_mask=self._tiles,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            ),
        )
        return out[0].transpose(0, 1)[: self._num_nodes]

    def _heads_first(self, tensor: Tensor) -> Tensor:
        """[N, H, D] to [1, H, padded N, D]."""
        return F.pad(tensor, (0, 0, 0, 0, 0, self._padding)).transpose(0, 1)[None]


def interval_mask(end: Tensor) -> MaskMod:
    """`flex_attention`'s mask function of a forest: a node sees itself and its ancestors."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return sees


def tile_mask(end: NDArray[np.int32], device: torch.device) -> BlockMask:
    """The tile table of a forest with a multiple of `TILE` nodes."""
    tiles = end.reshape(-1, TILE)
    number = np.arange(len(tiles))
    start, before = number * TILE, number[None, :] < number[:, None]  # [query tile, key tile]
    touched = before & (tiles.max(1)[None, :] > start[:, None])
    full = before & (tiles.min(1)[None, :] >= start[:, None] + TILE)
    mixed = (touched & ~full) | np.eye(len(tiles), dtype=bool)
    return BlockMask.from_kv_blocks(
        *_table(mixed, device),
        *_table(full, device),
        BLOCK_SIZE=TILE,
        mask_mod=interval_mask(torch.from_numpy(end).to(device)),
    )


def _table(chosen: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile has, and which, the chosen ones first."""
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    count = chosen.sum(1).astype(np.int32)
    return torch.from_numpy(count)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """`flex_attention`, compiled once a process; shapes are dynamic, since no two forests have the same size."""
    return torch.compile(flex_attention, dynamic=True)
