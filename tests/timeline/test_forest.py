"""Pinned here:

1. a forest is exactly the set of distinct prefixes of its rows, in depth-first order;
2. `parent`, `depth` and `end` agree with each other, and `end` alone is the attention mask;
3. every sampled token of every row has its own target, on the node of its context, with its row's numbers;
4. `split` and `select` keep the context of every target; every target is in one piece; the wire changes nothing;
5. dealt to several parts: every target is in exactly one part, in its own context; whole trees stay whole while that is
   even enough; one tree with a shared prompt is cut at its branches; more parts than branches leave parts empty;
6. any support set is decoded unchanged; repeated sets are stored once; the whole vocabulary takes no byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.compute.protocol import body_digest
from agentjet.swarm.journal import pack_sets, unpack_sets
from agentjet.timeline.forest import (
    EVERYTHING,
    Forest,
    Row,
    ancestors,
    build_forest,
    call_row,
    chunk_forest,
    decode_set,
    encode_set,
    observations,
    part_of,
    select,
    split,
)

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


def test_a_column_may_have_several_numbers_for_each_target() -> None:
    """Likely tokens: 20 of the first target, 30 of the second, and so on, wherever a forest is cut."""
    tokens = [np.array([1, 2, 3 + number, 4], np.int32) for number in range(3)]
    ids = [np.array([[20, 21], [30, 31]]) + 100 * number for number in range(3)]
    rows = [
        Row(own, slice(2, 4), {"top_ids": likely, "teacher_top": -likely / 2, "call": number})
        for number, (own, likely) in enumerate(zip(tokens, ids, strict=True))
    ]
    forest = build_forest(rows)
    assert forest["top_ids"].dtype == np.int32 and forest["top_ids"].tolist() == np.concatenate(ids).tolist()
    pieces = [
        piece for piece, _ in (*split(forest, 3), *chunk_forest(forest, 3), *(part_of(forest, n, 2) for n in (0, 1)))
    ]
    for piece in (*pieces, select(forest, forest["call"] == 1)):
        assert piece["top_ids"].shape == (piece.num_targets, 2)
        place = piece.depth[piece.node][:, None] - 2
        assert (piece["top_ids"] == 100 * piece["call"][:, None] + 20 + 10 * place + [0, 1]).all()
        assert (piece["teacher_top"] == -piece["top_ids"] / 2).all()


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


# ---- parts -----------------------------------------------------------------------------------------------------------


def rows(groups: int, repeats: int, shared: int, lengths: tuple[int, int], seed: int = 0) -> list[Row]:
    """Calls of `groups` prompts that begin with `shared` equal tokens."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 1000, shared)
    found = []
    for _ in range(groups):
        prompt = np.concatenate([system, rng.integers(0, 1000, rng.integers(*lengths))])
        for _ in range(repeats):
            count = int(rng.integers(*lengths))
            tokens = np.concatenate([prompt, rng.integers(0, 1000, count)]).astype(np.int32)
            zeros = np.zeros(count, np.float32)
            found.append(call_row(tokens, zeros, zeros.astype(np.int32), 1.0, 1.0, len(found), call=len(found)))
            prompt = tokens if rng.random() < 0.3 else prompt  # Some calls continue others, so prefixes have targets.
    return found


def contexts_of_targets(forest: Forest) -> list[tuple[int, bytes]]:
    """The sequence of each target, and the tokens up to it."""
    paths = [forest.tokens[[*ancestors(forest, node), node]].tobytes() for node in forest.node.tolist()]
    return list(zip(forest["sequence"].tolist(), paths, strict=True))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("shared", [0, 40])
def test_every_target_is_in_one_part_in_its_own_context(num_parts: int, shared: int) -> None:
    forest = build_forest(rows(4, 3, shared, (3, 30)))
    parts = [part_of(forest, part, num_parts) for part in range(num_parts)]
    targets = np.concatenate([targets for _, targets in parts])
    assert np.sort(targets).tolist() == list(range(forest.num_targets))
    whole = contexts_of_targets(forest)
    for part, own in parts:
        assert contexts_of_targets(part) == [whole[target] for target in own.tolist()]
        assert bool(part.num_nodes) == bool(part.num_targets)


def test_trees_stay_whole_where_that_is_even() -> None:
    forest = build_forest(rows(32, 4, 0, (20, 40)))
    parts = [part_of(forest, part, 2)[0] for part in range(2)]
    assert sum(part.num_nodes for part in parts) == forest.num_nodes, "nothing is computed twice"
    assert max(part.num_nodes for part in parts) < 0.52 * forest.num_nodes


def test_one_tree_is_dealt_at_its_branches() -> None:
    forest = build_forest(rows(16, 4, 50, (20, 40)))
    assert (forest.parent < 0).sum() == 1
    parts = [part_of(forest, part, 4)[0] for part in range(4)]
    assert sum(part.num_nodes for part in parts) < 1.15 * forest.num_nodes
    assert max(part.num_nodes for part in parts) < 0.3 * forest.num_nodes


def test_a_path_without_branches_has_one_owner() -> None:
    tokens = np.arange(100, dtype=np.int32)
    forest = build_forest([call_row(tokens, np.zeros(40, np.float32), np.zeros(40, np.int32), 1.0, 1.0, 0)])
    parts = [part_of(forest, part, 3)[0] for part in range(3)]
    assert sorted(part.num_targets for part in parts) == [0, 0, 40]


def test_a_forest_without_targets_is_dealt() -> None:
    forest, targets = part_of(build_forest([]), 1, 2)
    assert forest.num_nodes == len(targets) == 0


# ---- support sets ----------------------------------------------------------------------------------------------------


VOCABULARIES = st.sampled_from([1, 2, 300, 49_152, 200_000])


@given(VOCABULARIES, st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_a_set_comes_back(vocabulary: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    members = rng.random(vocabulary) < share**4
    members[rng.integers(vocabulary)] = True
    for one in (members, ~members) if not members.all() else (members,):
        encoded = encode_set(one)
        assert (encoded == EVERYTHING) == bool(one.all())
        assert (decode_set(encoded, vocabulary) == one).all()


def test_gaps_wider_than_two_bytes() -> None:
    members = np.zeros(200_000, bool)
    members[[0, 70_000, 199_999]] = True
    for one in (members, ~members):
        assert (decode_set(encode_set(one), 200_000) == one).all()


def test_nothing_can_be_sampled_from_nothing() -> None:
    with pytest.raises(ValueError, match="an empty support set"):
        encode_set(np.zeros(3, bool))


@given(st.lists(st.sampled_from([EVERYTHING, b"\0\1\0", b"\1\5\0\6\0", b"\0"])))
def test_sets_come_back_in_their_order(sets: list[bytes]) -> None:
    packed = pack_sets(sets)
    assert unpack_sets(packed, len(sets)) == tuple(sets)
    assert bool(packed) == any(sets)


def test_what_repeats_is_stored_once() -> None:
    rng = np.random.default_rng(0)
    sets = [encode_set(rng.random(49_152) < 0.1) for _ in range(2)]
    once, often = pack_sets(sets), pack_sets(sets * 200)
    assert len(once) > 5000 and len(often) < len(once) + 200
