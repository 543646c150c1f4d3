"""Forests: token sequences as prefix trees, with every distinct token-in-context exactly once.

Nodes stand in depth-first order, so the descendants of node i are the interval `i < j < end[i]`. Node i may attend to
node j exactly when `j <= i < end[j]`. So one integer per node is the whole attention mask; `depth` is the position id.

A target marks a node as sampled by the policy. Several targets may point at one node: two repeats may sample the same
token in the same context. So the node is computed once, and every target is kept.

A forest is cut to bound the memory of a pass. `split` makes forests that stand alone and repeat the path above them.
`chunk_forest` makes chunks without repeating that path: prefix keys and values stay cached until the last chunk that
uses them.

NumPy only. Shapes: N nodes, M targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentjet.timeline.support import EVERYTHING, pack_sets, unpack_sets

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
TargetIndices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One call as the policy saw it: the first `stop` of `tokens` [T] are prompt + completion. The last `len(logprobs)`
    of these were sampled. Calls of one timeline share its array, so that a batch is linear in tokens.

    `advantage` applies to the whole completion. `sequence` is the number of its (episode, role) within the batch.
    """

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    advantage: float
    temperature: float
    sequence: int
    support: tuple[bytes, ...] = ()
    """The support set of each sampled token (see `support`); empty if all are the whole vocabulary."""
    stop: int | None = None
    """None: all of `tokens`."""

    @property
    def length(self) -> int:
        return len(self.tokens) if self.stop is None else self.stop


@dataclass(frozen=True, slots=True)
class Forest:
    """A batch as prefix trees. Node arrays are [N]; target arrays are [M]; `parent` is -1 at roots.

    `support` is the index of a target's support set in `sets`, or -1 for the whole vocabulary.
    """

    tokens: IntArray
    parent: IntArray
    end: IntArray
    depth: IntArray
    node: IntArray
    advantage: FloatArray
    logprob: FloatArray
    temperature: FloatArray
    version: IntArray
    sequence: IntArray
    support: IntArray
    sets: tuple[bytes, ...]
    num_sequences: int
    num_row_tokens: int

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return len(self.node)

    @property
    def tree_token_ratio(self) -> float:
        """Number of tokens of one row per call, divided by the number of nodes."""
        return self.num_row_tokens / max(1, self.num_nodes)

    def run_stops(self) -> NDArray[np.int64]:
        """Returns the ends of unbranched runs, ascending. The first one above a node is one past the node's run.

        A node is the only child of the node before it exactly when both have the same `end`.
        """
        return np.append(np.flatnonzero(self.end[1:] != self.end[:-1]) + 1, self.num_nodes)

    def to_wire(self) -> dict[str, Any]:
        """Returns a dict of plain numbers and little-endian byte strings, for the worker's pipe."""
        wire: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            wire[f.name] = value.tobytes() if isinstance(value, np.ndarray) else value
        return {**wire, "sets": pack_sets(self.sets), "num_sets": len(self.sets)}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Forest:
        wire = dict(wire)
        arrays: dict[str, Any] = {"sets": unpack_sets(wire.pop("sets"), wire.pop("num_sets"))}
        for name, value in wire.items():
            kind = np.float32 if name in {"advantage", "logprob", "temperature"} else np.int32
            arrays[name] = np.frombuffer(value, kind) if isinstance(value, bytes) else value
        return cls(**arrays)


def build_forest(rows: Sequence[Row]) -> Forest:
    """Merges rows into prefix trees, in O(total tokens), with a shared array counted once.

    Sorting the timelines as big-endian byte strings puts them in depth-first order. Each then adds the nodes after its
    longest common prefix with the timeline before. Without rows the forest is empty.
    """
    if not rows:
        none, nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Forest(none, none, none, none, none, nothing, nothing, nothing, none, none, none, (), 0, 0)
    timelines = {id(row.tokens): row.tokens for row in rows}
    order = sorted(timelines, key=lambda key: timelines[key].astype(">i4").tobytes())
    tokens: list[IntArray] = []
    parents: list[IntArray] = []
    depths: list[IntArray] = []
    path = np.zeros(0, np.int32)  # node index of each token of the previous timeline
    previous = np.zeros(0, np.int32)
    num_nodes = 0
    paths: dict[int, IntArray] = {}
    for key in order:
        timeline = timelines[key]
        shared = common_prefix(previous, timeline)
        fresh = len(timeline) - shared
        new = np.arange(num_nodes, num_nodes + fresh, dtype=np.int32)
        path = np.concatenate([path[:shared], new])
        if fresh:
            tokens.append(timeline[shared:].astype(np.int32))
            parents.append(np.concatenate([[path[shared - 1] if shared else -1], new[:-1]]).astype(np.int32))
            depths.append(np.arange(shared, len(timeline), dtype=np.int32))
        num_nodes += fresh
        paths[key] = path
        previous = timeline
    depth = np.concatenate(depths)
    support, sets = _number_sets(rows)
    sampled = [paths[id(row.tokens)][row.length - len(row.logprobs) : row.length] for row in rows]
    return Forest(
        tokens=np.concatenate(tokens),
        parent=np.concatenate(parents),
        end=subtree_ends(depth),
        depth=depth,
        node=np.concatenate(sampled).astype(np.int32),
        advantage=_repeat([row.advantage for row in rows], rows),
        logprob=np.concatenate([row.logprobs for row in rows]).astype(np.float32),
        temperature=_repeat([row.temperature for row in rows], rows),
        version=np.concatenate([row.versions for row in rows]).astype(np.int32),
        sequence=np.repeat([row.sequence for row in rows], [len(row.logprobs) for row in rows]).astype(np.int32),
        support=support,
        sets=sets,
        num_sequences=len({row.sequence for row in rows}),
        num_row_tokens=sum(row.length for row in rows),
    )


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Returns the length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def subtree_ends(depth: IntArray) -> IntArray:
    """Returns one past the last descendant of each node, from depths in depth-first order."""
    end = np.full(len(depth), len(depth), np.int32)
    # Subtrees end only before a node that is not a child of the node before it.
    starts = np.flatnonzero(np.diff(depth) != 1) + 1
    path = np.zeros(int(depth.max(initial=-1)) + 1, np.int32)
    top = 0
    for start, stop in zip([0, *starts.tolist()], [*starts.tolist(), len(depth)], strict=True):
        if start == stop:
            break
        level = int(depth[start])
        end[path[level:top]] = start
        top = level + stop - start
        path[level:top] = np.arange(start, stop, dtype=np.int32)
    return end


def _repeat(values: Sequence[float], rows: Sequence[Row]) -> FloatArray:
    return np.repeat(np.asarray(values, np.float32), [len(row.logprobs) for row in rows])


def _number_sets(rows: Sequence[Row]) -> tuple[IntArray, tuple[bytes, ...]]:
    """Returns the number of each target's support set, and each distinct set once."""
    number = {EVERYTHING: -1}
    parts = [
        [number.setdefault(one, len(number) - 1) for one in row.support] or np.full(len(row.logprobs), -1)
        for row in rows
    ]
    return np.concatenate(parts).astype(np.int32), tuple(number)[1:]


def select(forest: Forest, keep: NDArray[np.bool_]) -> Forest:
    """Returns the forest of the targets in `keep` [M]: their nodes and ancestors only."""
    before = np.concatenate([[0], np.cumsum(np.bincount(forest.node[keep], minlength=forest.num_nodes))])
    needed = before[forest.end] > before[:-1]  # its subtree, which is an interval, has a target
    return restrict(forest, np.flatnonzero(needed), keep)


def split(forest: Forest, max_nodes: int) -> list[tuple[Forest, TargetIndices]]:
    """Cuts a forest into pieces of at most `max_nodes` nodes, each with the indices of its targets.

    If one root-to-leaf path alone is longer, its piece exceeds the budget by that path.

    The depth-first order is cut into intervals. A piece repeats only the path to its first node. Each cut searches a
    quarter of the budget backwards for the shallowest node, so that little is repeated.
    """
    pieces: list[tuple[Forest, TargetIndices]] = []
    start = 0
    while start < forest.num_nodes:
        path = ancestors(forest, start)
        room = max(max_nodes - len(path), 1)
        stop = min(start + room, forest.num_nodes)
        if stop < forest.num_nodes:
            lowest = max(start + 1, stop - max(1, room // 4))
            stop = lowest + int(np.argmin(forest.depth[lowest : stop + 1]))
        inside = (forest.node >= start) & (forest.node < stop)
        if inside.any():
            piece = restrict(forest, np.concatenate([path, np.arange(start, stop)]), inside)
            pieces.append((piece, np.flatnonzero(inside)))
        start = stop
    return pieces


def ancestors(forest: Forest, node: int) -> NDArray[np.int64]:
    """Returns the indices of the nodes above `node`, root first."""
    path: list[int] = []
    while (node := int(forest.parent[node])) >= 0:
        path.append(node)
    return np.array(path[::-1], np.int64)


def restrict(forest: Forest, nodes: NDArray[np.int64], keep: NDArray[np.bool_]) -> Forest:
    """Returns the forest of `nodes`, ascending, with the targets in `keep`. Nodes without their parent become roots."""
    index = np.full(forest.num_nodes + 1, -1, np.int32)  # the extra last entry maps "no parent" to itself
    index[nodes] = np.arange(len(nodes), dtype=np.int32)
    before = np.zeros(forest.num_nodes + 1, np.int32)
    before[nodes + 1] = 1
    return Forest(
        tokens=forest.tokens[nodes],
        parent=index[forest.parent[nodes]],
        end=np.cumsum(before, dtype=np.int32)[forest.end[nodes]],
        depth=forest.depth[nodes],
        node=index[forest.node[keep]],
        advantage=forest.advantage[keep],
        logprob=forest.logprob[keep],
        temperature=forest.temperature[keep],
        version=forest.version[keep],
        sequence=forest.sequence[keep],
        support=forest.support[keep],
        sets=forest.sets,
        num_sequences=len(np.unique(forest.sequence[keep])),
        num_row_tokens=forest.num_row_tokens,
    )


REPEATED_RUN_DIVISOR = 64
"""Runs of fewer nodes than the budget divided by this are repeated: a separate pass would cost more."""


@dataclass(frozen=True, slots=True)
class ForestChunk(Forest):
    """Nodes to compute below `num_cached` cached nodes, which all of them attend to. `depth` counts from the root."""

    num_cached: int
    level: int
    """Number of cached chunks that this one needs. Later ones on the stack are no longer needed."""
    is_kept: bool
    """True if later chunks need the nodes of this one, which are then one unbranched path."""


def chunk_forest(forest: Forest, max_nodes: int) -> list[tuple[ForestChunk, TargetIndices]]:
    """Cuts a forest into chunks without recomputing shared prefixes, each with the indices of its targets.

    A chunk and its cached nodes have at most `max_nodes` nodes. If one root-to-leaf path alone is longer, it exceeds
    the budget. Invariants:

    * chunks come in depth-first order, so the cached chunks above a chunk are the first `level` of a stack;
    * every target is in exactly one chunk, in its own context;
    * a chunk repeats the last cached node, which predicts its first targets, and short runs (`REPEATED_RUN_DIVISOR`).
    """
    chunking = _Chunking(forest, max_nodes)
    pending = [_Siblings(0, forest.num_nodes, 0, 0)]
    while pending:
        pending += chunking.cut(pending.pop())
    return chunking.chunks


@dataclass(frozen=True, slots=True)
class _Siblings:
    """Adjacent subtrees, `start:stop`, below a path whose first `num_cached` nodes are cached in `level` chunks."""

    start: int
    stop: int
    num_cached: int
    level: int


class _Chunking:
    """Collects the chunks of a forest."""

    def __init__(self, forest: Forest, max_nodes: int) -> None:
        self._forest = forest
        self._max_nodes = max_nodes
        self._run_stops = forest.run_stops()
        self.chunks: list[tuple[ForestChunk, TargetIndices]] = []

    def cut(self, group: _Siblings) -> list[_Siblings]:
        """Adds the chunks of a group up to the first that is kept. Returns the rest; its last item is cut next."""
        first = at = group.start
        while at < group.stop:
            end = int(self._forest.end[at])
            if end - first <= max(self._max_nodes - int(self._forest.depth[first]), self._max_nodes // 4):
                at = end
                continue
            if first < at:  # The chunk is full; the subtree begins the next one.
                self._add(group, first, at)
                first = at
                continue
            stop = int(self._run_stops[np.searchsorted(self._run_stops, at, side="right")])
            if stop == end:
                self._add(group, at, end)
                first = at = end
            elif int(self._forest.depth[stop - 1]) - group.num_cached < max(1, self._max_nodes // REPEATED_RUN_DIVISOR):
                at = stop
            else:
                self._add(group, at, stop, is_kept=True)
                below = _Siblings(stop, end, int(self._forest.depth[stop - 1]), group.level + 1)
                return [_Siblings(end, group.stop, group.num_cached, group.level), below]
        self._add(group, first, group.stop)
        return []

    def _add(self, group: _Siblings, start: int, stop: int, *, is_kept: bool = False) -> None:
        inside = (self._forest.node >= start) & (self._forest.node < stop)
        if start == stop or not (is_kept or inside.any()):
            return
        path = ancestors(self._forest, start)[group.num_cached :]
        part = restrict(self._forest, np.concatenate([path, np.arange(start, stop)]), inside)
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        chunk = ForestChunk(**values, num_cached=group.num_cached, level=group.level, is_kept=is_kept)
        self.chunks.append((chunk, np.flatnonzero(inside)))
