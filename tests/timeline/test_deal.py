"""Forests dealt to several parts. Pinned here:

1. every target is in exactly one part, in its own context;
2. whole trees stay whole while that is even enough; one tree with a shared prompt is cut at its branches;
3. more parts than branches leave parts empty.
"""

from __future__ import annotations

import numpy as np
import pytest

from agentjet.timeline.forest import Forest, Row, ancestors, build_forest, call_row, part_of


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


def contexts(forest: Forest) -> list[tuple[int, bytes]]:
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
    whole = contexts(forest)
    for part, own in parts:
        assert contexts(part) == [whole[target] for target in own.tolist()]
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
