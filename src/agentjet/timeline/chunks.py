"""A forest in pieces that compute every node once: what several pieces have above them is kept while they last.

`forest.split` makes pieces that stand alone and therefore repeat the path above them. Here that path is *given*: an
earlier piece computed it and is kept until the last piece below it is done, so the walk is a stack. Invariants:

* pieces come in depth-first order, and a piece's path is given by the kept pieces still on the stack (`level` many);
* every target is in exactly one piece, in its own context;
* a piece repeats the last given node, from which its first targets are predicted, and no run longer than a 64th of the
  budget.

NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from agentjet.timeline.forest import Forest, ancestors, restrict

MAX_REPEATED_SHARE = 64
"""Runs of fewer nodes than the budget over this are repeated: keeping them would cost a pass of their own."""

TargetIndices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForestChunk(Forest):
    """Nodes to compute below `num_cached` others, which they all attend to. `depth` counts from the tree's root."""

    num_cached: int
    level: int
    """Kept pieces that this one needs; later ones on the stack are done."""
    is_kept: bool
    """Whether the pieces after it need this one's nodes, which are then one unbranched path."""


def chunk_forest(forest: Forest, max_nodes: int) -> list[tuple[ForestChunk, TargetIndices]]:
    """Pieces that hold, with what is kept above them, at most `max_nodes` nodes, and the indices of their targets.

    Where one root-to-leaf path alone is longer, the budget is exceeded by that path.
    """
    unfolding = _Chunking(forest, max_nodes)
    pending = [_Siblings(0, forest.num_nodes, 0, 0)]
    while pending:
        pending += unfolding.cut(pending.pop())
    return unfolding.pieces


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Subtrees side by side, `start:stop`, below a path of which the first `given` nodes are kept in `level` pieces."""

    start: int
    stop: int
    given: int
    level: int


class _Chunking:
    """The pieces found so far."""

    def __init__(self, forest: Forest, max_nodes: int) -> None:
        self._forest = forest
        self._max_nodes = max_nodes
        self._run_stops = forest.run_stops()
        self.pieces: list[tuple[ForestChunk, TargetIndices]] = []

    def cut(self, group: _Siblings) -> list[_Siblings]:
        """Pieces of the group up to the first that is kept; returns what is left to cut, the next to be done last."""
        first = at = group.start
        while at < group.stop:
            end = int(self._forest.end[at])
            if end - first <= max(self._max_nodes - int(self._forest.depth[first]), self._max_nodes // 4):
                at = end
                continue
            if first < at:  # what was gathered is full; the subtree begins the next piece
                self._add(group, first, at)
                first = at
                continue
            stop = int(self._run_stops[np.searchsorted(self._run_stops, at, side="right")])
            if stop == end:
                self._add(group, at, end)
                first = at = end
            elif int(self._forest.depth[stop - 1]) - group.given < max(1, self._max_nodes // MAX_REPEATED_SHARE):
                at = stop
            else:
                self._add(group, at, stop, is_kept=True)
                below = _Siblings(stop, end, int(self._forest.depth[stop - 1]), group.level + 1)
                return [_Siblings(end, group.stop, group.given, group.level), below]
        self._add(group, first, group.stop)
        return []

    def _add(self, group: _Siblings, start: int, stop: int, *, is_kept: bool = False) -> None:
        inside = (self._forest.node >= start) & (self._forest.node < stop)
        if start == stop or not (is_kept or inside.any()):
            return
        path = ancestors(self._forest, start)[group.given :]
        part = restrict(self._forest, np.concatenate([path, np.arange(start, stop)]), inside)
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        piece = ForestChunk(**values, num_cached=group.given, level=group.level, is_kept=is_kept)
        self.pieces.append((piece, np.flatnonzero(inside)))
