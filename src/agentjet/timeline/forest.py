"""Forests: many token sequences as prefix trees, every distinct token-in-context exactly once.

Nodes stand in depth-first order, so a node's descendants are the contiguous interval `i < j < end[i]`, and node i may
attend to node j exactly when `j <= i < end[j]`: one integer per node is the whole attention mask, `depth` the
position id. A target says "the policy sampled this node"; several targets may point at one node (two repeats that
sampled the same token in the same context), so nothing is computed twice and nothing is lost.

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


@dataclass(frozen=True, slots=True)
class Row:
    """One call as the policy saw it: the first `stop` of `tokens` [T] are prompt + completion, the last `len(logprobs)`
    of these sampled. Calls of one timeline share its array, so that a batch is linear in tokens.

    `advantage` is a number for the whole completion; `sequence` numbers the (episode, role) it belongs to within the
    batch.
    """

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    advantage: float
    temperature: float
    sequence: int
    support: tuple[bytes, ...] = ()
    """The set that each sampled token was chosen among (see `support`); empty when it was always the vocabulary."""
    stop: int | None = None
    """None: all of `tokens`."""

    @property
    def length(self) -> int:
        return len(self.tokens) if self.stop is None else self.stop


@dataclass(frozen=True, slots=True)
class Forest:
    """A batch as prefix trees. Node arrays are [N]; target arrays are [M]; `parent` is -1 at roots.

    `support` says which of `sets` a target was chosen among, -1 where it was the whole vocabulary.
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
        """Tokens of one row per call over the tokens held here."""
        return self.num_row_tokens / max(1, self.num_nodes)

    def run_stops(self) -> NDArray[np.int64]:
        """Where unbranched runs end, ascending: the first of these above a node is one past the last of its run.

        A node is the only child of the node before it exactly when both end at the same place.
        """
        return np.append(np.flatnonzero(self.end[1:] != self.end[:-1]) + 1, self.num_nodes)

    def to_wire(self) -> dict[str, Any]:
        """A dict of plain numbers and little-endian byte strings, for the worker's pipe."""
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
    """Merge rows into prefix trees, in O(total tokens), with the tokens of a shared array counted once.

    Sorting the timelines as big-endian byte strings puts them in depth-first order; each then adds the nodes after its
    longest common prefix with the one before. Without rows the forest is empty.
    """
    if not rows:
        none, nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return Forest(none, none, none, none, none, nothing, nothing, nothing, none, none, none, (), 0, 0)
    timelines = {id(row.tokens): row.tokens for row in rows}
    order = sorted(timelines, key=lambda key: timelines[key].astype(">i4").tobytes())
    tokens: list[IntArray] = []
    parents: list[IntArray] = []
    depths: list[IntArray] = []
    path = np.zeros(0, np.int32)  # node index of each token of the timeline before
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
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def subtree_ends(depth: IntArray) -> IntArray:
    """One past the last descendant of each node, from depths in depth-first order."""
    end = np.full(len(depth), len(depth), np.int32)
    # Only where a node is no child of the node before it does anything end.
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
    """Each distinct set of the rows once, and for each target the number of its set."""
    number = {EVERYTHING: -1}
    parts = [
        [number.setdefault(one, len(number) - 1) for one in row.support] or np.full(len(row.logprobs), -1)
        for row in rows
    ]
    return np.concatenate(parts).astype(np.int32), tuple(number)[1:]


def select(forest: Forest, keep: NDArray[np.bool_]) -> Forest:
    """The forest of the targets in `keep` [M]: their nodes and ancestors, nothing else."""
    before = np.concatenate([[0], np.cumsum(np.bincount(forest.node[keep], minlength=forest.num_nodes))])
    needed = before[forest.end] > before[:-1]  # its subtree, which is an interval, holds a target
    return restrict(forest, np.flatnonzero(needed), keep)


def split(forest: Forest, max_nodes: int) -> list[tuple[Forest, NDArray[np.int64]]]:
    """Cut a forest into pieces of at most `max_nodes` nodes, each with the indices of its targets.

    Where one root-to-leaf path alone is longer, its piece exceeds the budget by that path.

    The depth-first order is cut into intervals; a piece repeats only the path to its first node. Each cut looks back
    over a quarter of the budget for the shallowest node to cut at, so that little is repeated.
    """
    pieces: list[tuple[Forest, NDArray[np.int64]]] = []
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
    """Indices of the nodes above `node`, root first."""
    path: list[int] = []
    while (node := int(forest.parent[node])) >= 0:
        path.append(node)
    return np.array(path[::-1], np.int64)


def restrict(forest: Forest, nodes: NDArray[np.int64], keep: NDArray[np.bool_]) -> Forest:
    """A forest of `nodes`, ascending, with the targets in `keep`; nodes whose parent is not among them become roots."""
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
