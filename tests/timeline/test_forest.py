"""Pinned here:

1. a forest is exactly the set of distinct prefixes of its rows, in depth-first order;
2. `parent`, `depth` and `end` agree with each other, and `end` alone is the attention mask;
3. every sampled token of every row has its own target, on the node of its context, with its row's numbers;
4. `split` and `select` keep the context of every target; every target is in one piece; the wire changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentjet.compute.operations import body_digest
from agentjet.timeline import Forest, Row, build_forest, call_row
from agentjet.timeline.forest import observations, select, split

SETS = ((), (b"", b"\0\1\0", b"\1\0\0") * 2, (b"\0\1\0",) * 6)
"""Support sets of rows by their sequence modulo 3: none, a mixture, always the same."""


def row(tokens: Sequence[int], num_sampled: int, *, sequence: int = 0) -> Row:
    """Returns a row whose numbers identify its sampled tokens."""
    sampled = np.arange(num_sampled)
    return call_row(
        tokens=np.array(tokens, np.int32),
        logprobs=(-1.0 * sequence - sampled / 64).astype(np.float32),
        versions=(10 * sequence + sampled).astype(np.int32),
        advantage=sequence + 0.5,
        temperature=1.0 + sequence,
        sequence=sequence,
        support=SETS[sequence % 3][:num_sampled] if num_sampled <= 6 else (),
    )


@st.composite
def row_lists(draw: st.DrawFn) -> list[Row]:
    """Rows over few tokens, so that they share prefixes, repeat and contain each other."""
    token = st.sampled_from([0, 1, 255, 256, 49_151])
    rows: list[Row] = []
    for sequence in range(draw(st.integers(1, 7))):
        head: list[int] = []
        if rows and draw(st.booleans()):
            other = rows[draw(st.integers(0, len(rows) - 1))].tokens.tolist()
            head = other[: draw(st.integers(0, len(other)))]
        tokens = head + draw(st.lists(token, min_size=0 if head else 1, max_size=6))
        rows.append(row(tokens, draw(st.integers(0, len(tokens))), sequence=sequence))
    return rows


def contexts(forest: Forest) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, itself included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(forest.tokens.tolist(), forest.parent.tolist(), strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    return paths


def chosen_among(forest: Forest) -> np.ndarray:
    """Returns the support set of each target."""
    return np.array([*forest.sets, b""], object)[forest["support"]]


def targets(forest: Forest) -> list[tuple[object, ...]]:
    """Every target with its context and numbers, comparable between forests."""
    paths = contexts(forest)
    columns = (
        forest["advantage"],
        forest["logprob"],
        forest["temperature"],
        forest["version"],
        forest["sequence"],
        chosen_among(forest),
    )
    numbers = zip(*(column.tolist() for column in columns), strict=True)
    return [(paths[node], *line) for node, line in zip(forest.node.tolist(), numbers, strict=True)]


@given(row_lists())
def test_nodes_are_the_distinct_prefixes_in_depth_first_order(rows: list[Row]) -> None:
    forest = build_forest(rows)
    prefixes = {tuple(r.tokens[:n].tolist()) for r in rows for n in range(1, len(r.tokens) + 1)}
    paths = contexts(forest)
    assert len(paths) == len(prefixes)
    assert set(paths) == prefixes
    assert paths == sorted(paths)
    assert forest.num_row_tokens == sum(len(r.tokens) for r in rows)
    assert forest.tree_token_ratio == forest.num_row_tokens / forest.num_nodes


def check_structure(forest: Forest) -> None:
    """One integer per node is the mask: i sees j exactly when `j <= i < end[j]`, and that is j's being on i's path."""
    parent, end, depth = forest.parent.tolist(), forest.end.tolist(), forest.depth.tolist()
    for i in range(forest.num_nodes):
        path = {i}
        while (above := parent[min(path)]) >= 0:
            path.add(above)
        assert depth[i] == len(path) - 1
        assert {j for j in range(forest.num_nodes) if j <= i < end[j]} == path


@given(row_lists())
def test_parent_depth_and_end_agree(rows: list[Row]) -> None:
    check_structure(build_forest(rows))


@given(row_lists())
def test_each_sampled_token_is_a_target_in_its_own_context(rows: list[Row]) -> None:
    forest = build_forest(rows)
    expected = [
        (
            tuple(r.tokens[: at + 1].tolist()),
            r["advantage"],
            float(r["logprob"][k]),
            r["temperature"],
            int(r["version"][k]),
            r["sequence"],
            r.support[k] if r.support else b"",
        )
        for r in rows
        for k, at in enumerate(range(len(r.tokens) - len(r["logprob"]), len(r.tokens)))
    ]
    assert targets(forest) == expected
    assert forest.num_sequences == sum(r.num_targets > 0 for r in rows)


@given(row_lists(), st.integers(1, 12))
def test_pieces_share_out_the_targets_and_keep_their_contexts(rows: list[Row], max_nodes: int) -> None:
    forest = build_forest(rows)
    pieces = split(forest, max_nodes)
    whole = targets(forest)
    assert sorted(int(i) for _, indices in pieces for i in indices) == list(range(forest.num_targets))
    for piece, indices in pieces:
        check_structure(piece)
        assert targets(piece) == [whole[i] for i in indices]
        assert piece.num_nodes <= max(max_nodes, int(piece.depth.max()) + 1)


@given(row_lists(), st.randoms(use_true_random=False))
def test_a_selection_keeps_its_targets_and_their_ancestors_only(rows: list[Row], random: object) -> None:
    forest = build_forest(rows)
    keep = np.array([random.random() < 0.5 for _ in range(forest.num_targets)], bool)  # type: ignore[attr-defined]
    part = select(forest, keep)
    assert targets(part) == [target for target, kept in zip(targets(forest), keep, strict=True) if kept]
    needed = {path[:n] for path, *_ in targets(part) for n in range(1, len(path) + 1)}
    assert set(contexts(part)) == needed
    if part.num_nodes:
        check_structure(part)


def test_repeats_that_sampled_the_same_token_share_a_node() -> None:
    forest = build_forest([row([7, 8, 9], 1, sequence=0), row([7, 8, 9], 1, sequence=1), row([7, 8, 5], 1, sequence=2)])
    assert forest.tokens.tolist() == [7, 8, 5, 9]
    assert forest.parent.tolist() == [-1, 0, 1, 1]
    assert forest.end.tolist() == [4, 4, 3, 4]
    assert forest.node.tolist() == [3, 3, 2]
    assert forest.tree_token_ratio == 9 / 4


def test_no_rows_are_an_empty_forest() -> None:
    assert (build_forest([]).num_nodes, build_forest([]).num_targets) == (0, 0)


@given(rows=row_lists())
def test_calls_that_share_the_array_of_their_timeline_give_the_same_forest(rows: list[Row]) -> None:
    timelines: list[np.ndarray] = []
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if not any(np.array_equal(row.tokens, timeline[: len(row.tokens)]) for timeline in timelines):
            timelines.append(row.tokens)
    shared = []
    for row in rows:
        timeline = next(t for t in timelines if np.array_equal(row.tokens, t[: len(row.tokens)]))
        shared.append(replace(row, tokens=timeline))
    num_row_tokens = sum(len(row.tokens) for row in rows)
    assert body_digest(build_forest(shared, num_row_tokens=num_row_tokens)) == body_digest(build_forest(rows))


def test_observations_are_the_tokens_between_two_answers() -> None:
    """Two calls of one timeline; a fork with the same observation; a rewritten history; a prompt of nothing."""

    def row(call: int, tokens: list[int], size: int) -> Row:
        return Row(np.array(tokens, np.int32), slice(len(tokens) - size, len(tokens)), {"call": call, "logprob": -1.0})

    rows = [
        row(0, [1, 2, 70, 71], 2),
        row(1, [1, 2, 70, 71, 5, 6, 72], 1),
        row(2, [1, 2, 80], 1),
        row(3, [1, 2, 80, 5, 6, 73], 1),
        row(4, [1, 9, 80, 5, 6, 73], 1),
        row(5, [74], 1),
    ]
    found = {call: np.frombuffer(seen, np.int32).tolist() for call, seen in observations(build_forest(rows)).items()}
    assert found == {0: [1, 2], 1: [5, 6], 2: [1, 2], 3: [5, 6], 4: [1, 9, 80, 5, 6], 5: []}
