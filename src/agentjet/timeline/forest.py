"""Forests: token sequences as prefix trees, with every distinct token-in-context exactly once.

Nodes stand in depth-first order, so the descendants of node i are the interval `i < j < end[i]`. Node i may attend to
node j exactly when `j <= i < end[j]`. So one integer per node is the whole attention mask; `depth` is the position id.

A target is a node whose prediction is learned or measured. Several targets may point at one node: two repeats may
sample the same token in the same context. So the node is computed once, and every target is kept. Named columns hold
the facts about targets: the log-probability at sampling, the advantage, and so on.

A forest is cut to bound the memory of a pass. `split` makes forests that stand alone and repeat the path above them.
`chunk_forest` makes chunks without repeating that path: prefix keys and values stay cached until the last chunk that
uses them.

A support set has the tokens that a target was chosen from, if a grammar, `top_p` or `top_k` excluded others. The
learner must normalise over the same set as the sampler. So the set stays with the token from the sampler to the journal
and the forest. It is never computed again.

`part_of` is the part of a forest that one of several processes computes. Whole trees are distributed, longest first,
each to the part with the fewest nodes. If that is uneven, trees are cut at their branches, because the calls of most
batches share a system prompt and are one tree. The parts below a cut compute the nodes above it again, each once. Every
target is in exactly one part. Equal forests have equal parts.

NumPy only. Shapes: N nodes, M targets, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from agentjet.timeline.routes import Choices, fill

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Column = NDArray[Any]
"""One value per target, or a row of K values."""

INTEGER_COLUMNS = frozenset({"version", "sequence", "support", "call", "target", "top_ids"})
"""Columns of type int32. All others are float32."""
SAMPLED_COLUMNS = ("advantage", "call", "logprob", "sequence", "support", "temperature", "version")
"""The columns of sampled targets with an advantage."""


def column_type(name: str) -> type[np.int32] | type[np.float32]:
    return np.int32 if name in INTEGER_COLUMNS else np.float32


TargetIndices = NDArray[np.int64]

EVERYTHING = b""
"""The support set of a token that was chosen from the whole vocabulary."""
_KINDS = {0: (False, "<u2"), 1: (True, "<u2"), 2: (False, "<u4"), 3: (True, "<u4")}
"""By the first byte of an encoded set: True if the ids are those of excluded tokens, and the type of a gap."""


def encode_set(members: NDArray[np.bool_]) -> bytes:
    """Returns the encoding of a support set from its members [V]. Raises `ValueError` for an empty set.

    The first byte is the kind of encoding (see `_KINDS`). Then follow the gaps between the ids of the members, or of
    the excluded tokens if they are fewer. No bytes are the whole vocabulary.
    """
    count = int(np.count_nonzero(members))
    if count == len(members):
        return EVERYTHING
    if not count:
        raise ValueError("an empty support set")
    excludes = 2 * count > len(members)
    return _encoded(np.flatnonzero(~members if excludes else members), excludes)


def encode_ids(ids: NDArray[np.int64], vocabulary: int) -> bytes:
    """Returns the encoding of a support set from the ids of its members, ascending. See `encode_set`."""
    if 0 < 2 * len(ids) <= vocabulary:
        return _encoded(ids, excludes=False)
    members = np.zeros(vocabulary, bool)
    members[ids] = True
    return encode_set(members)


def _encoded(ids: NDArray[np.int64], excludes: bool) -> bytes:
    gaps = np.diff(ids, prepend=0)
    kind = excludes + 2 * bool(gaps.max() > 0xFFFF)
    return bytes([kind]) + gaps.astype(_KINDS[kind][1]).tobytes()


def num_members(encoded: bytes) -> int | None:
    """Returns the size of a set that has at most half of the vocabulary, else None."""
    if encoded == EVERYTHING or _KINDS[encoded[0]][0]:
        return None
    return (len(encoded) - 1) // np.dtype(_KINDS[encoded[0]][1]).itemsize


def decode_set(encoded: bytes, vocabulary: int) -> NDArray[np.bool_]:
    """Returns the members [V] of a set."""
    if encoded == EVERYTHING:
        return np.ones(vocabulary, bool)
    excludes, gap = _KINDS[encoded[0]]
    members = np.full(vocabulary, excludes)
    members[np.frombuffer(encoded, gap, offset=1).cumsum(dtype=np.int64)] = not excludes
    return members


@dataclass(frozen=True, slots=True)
class Row:
    """A token sequence as the policy saw it, with its targets: positions whose prediction is learned or measured.

    A target need not have been sampled. `columns` holds one value per target [K], or one value for all of them. Without
    a column `temperature` it is 1, and without `sequence` the row is a separate sequence.
    """

    tokens: IntArray
    at: slice | NDArray[np.integer[Any]]
    """Positions of the K targets in `tokens`, in the order of `columns`."""
    columns: Mapping[str, Column | float | int]
    support: tuple[bytes, ...] = ()
    """The set from which each target was chosen (see `encode_set`); empty if all were from the whole vocabulary."""
    routes: Choices | None = None
    """The routes of all of `tokens`. Rows that share tokens share them, too."""

    def __getitem__(self, name: str) -> Any:
        """The values of a column."""
        return self.columns[name]

    def with_columns(self, **columns: Column | float | int) -> Self:
        """The same row with further or other columns."""
        return replace(self, columns={**self.columns, **columns})

    @property
    def num_targets(self) -> int:
        return len(range(*self.at.indices(len(self.tokens)))) if isinstance(self.at, slice) else len(self.at)


def call_row(
    tokens: IntArray,
    logprobs: FloatArray,
    versions: IntArray,
    advantage: float | None,
    temperature: float,
    sequence: int,
    support: tuple[bytes, ...] = (),
    call: int = 0,
    stop: int | None = None,
    routes: Choices | None = None,
) -> Row:
    """The row of one call: the first `stop` of `tokens` (default: all) are prompt + completion, and the last
    `len(logprobs)` of these are the targets. Calls of one timeline share its array, so that a batch is linear in
    tokens.

    `sequence` numbers the (episode, role) and `call` the call within the batch. Without an `advantage` the recipe
    computes it.
    """
    columns: dict[str, Column | float | int] = {
        "logprob": logprobs,
        "version": versions,
        "temperature": temperature,
        "sequence": sequence,
        "call": call,
    }
    if advantage is not None:
        columns["advantage"] = advantage
    stop = len(tokens) if stop is None else stop
    return Row(tokens, slice(stop - len(logprobs), stop), columns, support, routes)


@dataclass(frozen=True, slots=True)
class Forest:
    """A batch as prefix trees. Node arrays are [N], `node` and the arrays of `targets` are [M].

    `parent` is -1 at roots; `node` is the node of each target; `column_type` gives the type of a column. The column
    `support` is the index in `sets` of the set from which a target was chosen, -1 for the whole vocabulary.
    """

    tokens: IntArray
    parent: IntArray
    end: IntArray
    depth: IntArray
    node: IntArray
    targets: Mapping[str, Column]
    sets: tuple[bytes, ...]
    num_sequences: int
    num_row_tokens: int
    routes: Choices | None = field(default=None, kw_only=True)
    """The experts that computed each node when it was sampled; None if none are known."""
    route_conflicts: float = field(default=0.0, kw_only=True)
    """Share of choices that differ where rows with other routes share a node. The first row's route holds."""

    def __getitem__(self, name: str) -> Column:
        """A column of the targets [M]. Raises `KeyError` with the existing columns if the column is missing."""
        if name not in self.targets:
            raise KeyError(f"the targets have no column {name!r}; they have {', '.join(sorted(self.targets))}")
        return self.targets[name]

    def with_columns(self, **columns: NDArray[Any]) -> Self:
        """The same forest with further or other columns [M] or [M, K]."""
        typed = {name: np.asarray(values, column_type(name)) for name, values in columns.items()}
        return replace(self, targets={**self.targets, **typed})

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


def build_forest(rows: Sequence[Row], *, num_row_tokens: int | None = None) -> Forest:
    """Merge rows into prefix trees, in O(total tokens), with an array that rows share counted once.

    `num_row_tokens` is the number of tokens of one row per call, if the rows hold several calls.

    Sorting the token sequences as big-endian byte strings puts them in depth-first order; each then adds the nodes
    after its longest common prefix with the one before. Without rows the forest is empty.
    """
    if not rows:
        none = np.zeros(0, np.int32)
        empty = {name: np.zeros(0, column_type(name)) for name in SAMPLED_COLUMNS}
        return Forest(none, none, none, none, none, empty, (), 0, 0)
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
    sets, support = _number_sets(rows)
    names = set.intersection(*(set(row.columns) for row in rows)) | {"sequence", "temperature"}
    targets = {name: _column(name, rows) for name in sorted(names)} | {"support": support}
    routes, conflicts = _node_routes({id(row.tokens): row.routes for row in rows}, paths, num_nodes)
    return Forest(
        tokens=np.concatenate(tokens),
        parent=np.concatenate(parents),
        end=subtree_ends(depth),
        depth=depth,
        node=np.concatenate([paths[id(row.tokens)][row.at] for row in rows]).astype(np.int32),
        targets=targets,
        sets=sets,
        num_sequences=_num_sequences(targets),
        num_row_tokens=sum(len(row.tokens) for row in rows) if num_row_tokens is None else num_row_tokens,
        routes=routes,
        route_conflicts=conflicts,
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


def _column(name: str, rows: Sequence[Row]) -> Column:
    kind = column_type(name)
    values = [row.columns.get(name, i if name == "sequence" else 1) for i, row in enumerate(rows)]
    parts = zip(values, rows, strict=True)
    return np.concatenate(
        [np.broadcast_to(np.asarray(value, kind), (row.num_targets, *np.shape(value)[1:])) for value, row in parts]
    )


def _node_routes(
    of_timelines: Mapping[int, Choices | None], paths: Mapping[int, IntArray], num_nodes: int
) -> tuple[Choices | None, float]:
    """Returns the routes of all nodes and the share of conflicting choices. Timelines are numbered as in `paths`."""
    known = {key: routes for key, routes in of_timelines.items() if routes is not None}
    if not known:
        return None, 0.0
    found = np.full((num_nodes, *next(iter(known.values())).shape[1:]), -1, np.result_type(*known.values()))
    num_differing = num_compared = 0
    for key, routes in known.items():
        of_path = found[paths[key]]
        differing, compared = fill(of_path, routes)
        found[paths[key]] = of_path
        num_differing, num_compared = num_differing + differing, num_compared + compared
    return found, num_differing / max(1, num_compared)


def _num_sequences(targets: Mapping[str, Column]) -> int:
    # `np.unique` sorts, and its first call imports `numpy.ma`: it would stop the gateway's event loop for 0.1 s.
    return int(np.count_nonzero(np.bincount(targets["sequence"]))) if "sequence" in targets else 0


def _number_sets(rows: Sequence[Row]) -> tuple[tuple[bytes, ...], IntArray]:
    """The distinct sets of the rows, and the number of each target's set."""
    number = {EVERYTHING: -1}
    parts = [
        [number.setdefault(one, len(number) - 1) for one in row.support] or np.full(row.num_targets, -1) for row in rows
    ]
    return tuple(number)[1:], np.concatenate(parts).astype(np.int32)


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
    """Returns the nodes above `node`, root first: those before it whose interval of descendants contains it."""
    return np.flatnonzero(forest.end[:node] > node)


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
        targets=(targets := {name: values[keep] for name, values in forest.targets.items()}),
        sets=forest.sets,
        num_sequences=_num_sequences(targets),
        num_row_tokens=forest.num_row_tokens,
        routes=None if forest.routes is None else forest.routes[nodes],
        route_conflicts=forest.route_conflicts,
    )


def observations(forest: Forest) -> dict[int, bytes]:
    """Returns the observation before each call: the tokens between the last target above the call and its first one.

    Before the first call these are all tokens of the prompt.
    """
    nodes = np.arange(forest.num_nodes)
    is_target = np.zeros(forest.num_nodes + 1, bool)
    is_target[forest.node] = True
    # A run is a path of nodes that are no targets, each the parent of the next.
    starts = np.maximum.accumulate(np.where((forest.parent != nodes - 1) | is_target[nodes - 1], nodes, 0))
    order = np.lexsort((forest.depth[forest.node], forest["call"]))
    calls, first = np.unique(forest["call"][order], return_index=True)
    found = {}
    for call, target in zip(calls.tolist(), order[first].tolist(), strict=True):
        pieces, node = [], int(forest.parent[forest.node[target]])
        while node >= 0 and not is_target[node]:
            start = int(starts[node])
            pieces.append(forest.tokens[start : node + 1].tobytes())
            node = int(forest.parent[start])
        found[call] = b"".join(pieces[::-1])
    return found


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


# ---- parts for several processes -------------------------------------------------------------------------------------

EVEN = 1.1
"""Parts are even if the largest part has at most this many times the nodes of a perfect one."""
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
    for unit in _even_parts(forest, num_parts)[part]:
        own[unit.start : unit.stop] = True
        for start, stop in (*unit.above, (unit.start, unit.stop)):
            nodes[start:stop] = True
    inside = own[forest.node]
    return restrict(forest, np.flatnonzero(nodes), inside), np.flatnonzero(inside)


def _even_parts(forest: Forest, num_parts: int) -> list[list[_Unit]]:
    """Returns the units of each part: of the first even distribution, or of the most even one."""
    perfect = forest.num_nodes / num_parts
    limits = [forest.num_nodes, *(max(1, int(perfect / cut)) for cut in CUTS)]
    best, largest = _distribute(forest, num_parts, limits[0])
    for limit in limits[1:]:
        if largest <= EVEN * perfect:
            break
        parts, load = _distribute(forest, num_parts, limit)
        if load < largest:
            best, largest = parts, load
    return best


def _distribute(forest: Forest, num_parts: int, limit: int) -> tuple[list[list[_Unit]], int]:
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
