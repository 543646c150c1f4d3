"""Dealing: the part of a forest that each of several processes computes. NumPy only.

Whole trees are dealt, longest first, each to the part with the fewest nodes. If that is uneven, trees are cut at their
branches, because the calls of most batches share a system prompt and are one tree. The parts below a cut compute the
nodes above it again, each once. Every target is in exactly one part. Equal forests are dealt equally.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentjet.timeline.forest import Forest, TargetIndices, restrict

EVEN = 1.1
"""A deal is even if the largest part has at most this many times the nodes of a perfect one."""
CUTS = (1, 2, 4, 8)
"""Finer and finer: a subtree larger than a perfect part divided by this is cut, if it branches."""

Run = tuple[int, int]
"""Nodes `start:stop` without a branch."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """Nodes `start:stop` that are computed together, and the runs above them."""

    start: int
    stop: int
    above: tuple[Run, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


def part_of(forest: Forest, part: int, num_parts: int) -> tuple[Forest, TargetIndices]:
    """Returns one of `num_parts` parts of a forest, with the indices of its targets. It may be empty."""
    nodes = np.zeros(forest.num_nodes, bool)
    own = np.zeros(forest.num_nodes, bool)
    for unit in _even_deal(forest, num_parts)[part]:
        own[unit.start : unit.stop] = True
        for start, stop in (*unit.above, (unit.start, unit.stop)):
            nodes[start:stop] = True
    inside = own[forest.node]
    return restrict(forest, np.flatnonzero(nodes), inside), np.flatnonzero(inside)


def _even_deal(forest: Forest, num_parts: int) -> list[list[_Unit]]:
    """Returns the units of each part: of the first even deal, or of the most even one."""
    perfect = forest.num_nodes / num_parts
    limits = [forest.num_nodes, *(max(1, int(perfect / cut)) for cut in CUTS)]
    best, largest = _deal(forest, num_parts, limits[0])
    for limit in limits[1:]:
        if largest <= EVEN * perfect:
            break
        parts, load = _deal(forest, num_parts, limit)
        if load < largest:
            best, largest = parts, load
    return best


def _deal(forest: Forest, num_parts: int, limit: int) -> tuple[list[list[_Unit]], int]:
    """Returns the units of each part, and the number of nodes of the largest part."""
    parts: list[list[_Unit]] = [[] for _ in range(num_parts)]
    loads = np.zeros(num_parts, np.int64)
    computed: list[set[Run]] = [set() for _ in range(num_parts)]
    for unit in sorted(_units(forest, limit), key=lambda unit: (-unit.size, unit.start)):
        runs = [*unit.above, (unit.start, unit.stop)]
        costs = [sum(stop - start for start, stop in runs if (start, stop) not in done) for done in computed]
        part = int(np.argmin(loads + costs))
        parts[part].append(unit)
        loads[part] += costs[part]
        computed[part].update(runs)
    return parts, int(loads.max())


def _units(forest: Forest, limit: int) -> Iterator[_Unit]:
    """Yields disjoint units of at most `limit` nodes, or without a branch, that hold all targets."""
    targets = np.concatenate([[0], np.cumsum(np.bincount(forest.node, minlength=forest.num_nodes))])
    run_stops = forest.run_stops()
    pending: list[_Unit] = [_Unit(0, forest.num_nodes, ())]
    while pending:
        siblings = pending.pop()
        start = siblings.start
        while start < siblings.stop:
            end = int(forest.end[start])
            stop = min(int(run_stops[np.searchsorted(run_stops, start, side="right")]), end)
            if end - start <= limit or stop == end:
                if targets[end] > targets[start]:
                    yield _Unit(start, end, siblings.above)
            else:
                if targets[stop] > targets[start]:
                    yield _Unit(start, stop, siblings.above)
                pending.append(_Unit(stop, end, (*siblings.above, (start, stop))))
            start = end
