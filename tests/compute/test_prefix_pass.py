"""The pass in pieces. Pinned here:

1. for every budget, gradient and log-probabilities equal those of the forest in one piece, in float64;
2. only the last given node and short runs are computed twice;
3. a pass without gradients does not affect the next one;
4. a pass with gradients keeps no tensor alive: the memory of a batch is freed without the garbage collector;
5. activation checkpointing gives the same gradients bit by bit, also row by row, and keeps a fraction of the
   activations (with ranks: `tests/cluster/test_ranks.py`);
6. each layer of a forward and of a backward pass is a step of progress where layers are counted, and no bit changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.attention import ForestPlan
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import count_layers
from agentjet.compute.passes import PrefixPass
from agentjet.compute.policy import Policy
from agentjet.processes.progress import PROGRESS
from agentjet.timeline.forest import Forest, ForestChunk, Row, build_forest, call_row
from tests.cluster.rank_cases import gradients, policy_of
from tests.compute.conftest import bytes_kept, make_policy, tokens
from tests.compute.test_locks import recorded_batch, training_batch

WHOLE = 10_000


def branching(seed: int = 0, depth: int = 3) -> Forest:
    """Two trees that branch a few times, with runs of 3 to 40 nodes; the last tokens of every branch are sampled."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []

    def grow(prefix: np.ndarray, levels: int) -> None:
        for _ in range(rng.integers(1, 4)):
            branch = np.concatenate([prefix, tokens(int(rng.integers(1_000_000)), int(rng.integers(3, 40)))])
            rows.append(call_row(branch, np.full(3, -5.0, np.float32), np.zeros(3, np.int32), 1.0, 1.0, len(rows)))
            if levels:
                grow(branch, levels - 1)

    for tree in range(2):
        grow(tokens(tree, 30), depth)
    return build_forest(rows)


def logprobs(policy: Policy, hidden: Tensor, rows: Tensor, piece: Forest) -> Tensor:
    wanted = torch.from_numpy(piece.tokens[piece.node].astype(np.int64))
    return policy.head(hidden[rows]).log_softmax(-1).gather(-1, wanted[:, None])[:, 0]


def walk(policy: Policy, way: PrefixPass, forest: Forest, budget: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [M] and the flat gradient of their weighted sum."""
    policy.model.zero_grad()
    found = torch.zeros(forest.num_targets, dtype=policy.dtype)
    for piece, targets in way.pieces(forest, budget):
        hidden, rows = way.hidden(piece)
        cut = hidden.detach().requires_grad_()
        values = logprobs(policy, cut, rows, piece)
        found[torch.from_numpy(targets)] = values.detach()
        if len(targets):
            (values * torch.from_numpy(targets + 1.0)).sum().backward()
        way.backward(hidden, cut.grad)
    way.finish()
    return found, torch.cat([p.grad.flatten() for p in policy.trainable().values() if p.grad is not None])


@pytest.fixture
def double(tiny_folder: Path) -> Policy:
    policy = make_policy(tiny_folder)
    policy.model.double()
    return policy


@pytest.mark.parametrize("budget", [700, 300, 64, 16])
def test_pieces_of_any_size_have_the_gradient_of_the_whole(double: Policy, budget: int) -> None:
    forest = branching()
    way = PrefixPass(double)
    whole = walk(double, way, forest, WHOLE)
    cut = walk(double, way, forest, budget)
    assert len(way.pieces(forest, budget)) > 3
    for ours, expected in zip(cut, whole, strict=True):
        assert float((ours - expected).norm() / expected.norm()) < 1e-6  # the library's norms are float32


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}, {"rank": 2}])
def test_layers_are_steps_of_progress(tiny_folder: Path, changes: dict[str, Any]) -> None:
    forest, policy = branching(), make_policy(tiny_folder, **changes)
    expected = walk(policy, PrefixPass(policy), forest, WHOLE)
    count_layers(policy)
    before = PROGRESS.num_steps
    found = walk(policy, PrefixPass(policy), forest, WHOLE)
    assert PROGRESS.num_steps - before == 2 * policy.config.num_hidden_layers
    assert all(map(torch.equal, found, expected))


def test_hardly_anything_is_computed_twice(double: Policy) -> None:
    forest = branching(depth=4)
    way = PrefixPass(double)
    pieces = way.pieces(forest, 128)
    computed = sum(way.num_computed(piece) for piece, _ in pieces)
    assert len(pieces) > 10
    assert forest.num_nodes <= computed <= forest.num_nodes + 3 * len(pieces)


@pytest.mark.parametrize("budget", [WHOLE, 64])
def test_no_tensor_outlives_its_walk(double: Policy, budget: int) -> None:
    way, forest = PrefixPass(double), branching()

    def alive() -> int:
        walk(double, way, forest, budget)
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    alive()
    assert alive() == alive()


def test_a_walk_without_gradients_leaves_nothing_behind(double: Policy) -> None:
    forest = branching()
    way = PrefixPass(double)
    expected, gradient = walk(double, way, forest, 64)
    found = torch.zeros_like(expected)
    with torch.no_grad():
        for piece, targets in way.pieces(forest, 64):
            found[torch.from_numpy(targets)] = logprobs(double, *way.hidden(piece), piece)
    assert torch.allclose(found, expected, atol=1e-6)
    again = walk(double, way, forest, 64)
    assert torch.equal(again[0], expected) and torch.equal(again[1], gradient)


def test_a_kept_piece_is_one_path_and_lives_until_the_last_piece_below_it(double: Policy) -> None:
    pieces = [piece for piece, _ in PrefixPass(double).pieces(branching(), 64)]
    stack: list[int] = []
    for piece in pieces:
        assert isinstance(piece, ForestChunk)
        assert piece.level <= len(stack)
        del stack[piece.level :]
        assert piece.num_cached <= (stack[-1] if stack else 0)
        if piece.is_kept:
            assert np.array_equal(piece.parent, np.arange(-1, piece.num_nodes - 1))
            stack.append(piece.num_cached + piece.num_nodes)


CHUNKED = 9
"""A batch of `test_locks` in several micro-batches, with a reference."""


@pytest.mark.parametrize("kind", ["full", "lora", "rows"])
def test_recomputed_activations_give_equal_gradients(kind: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("mamba" if kind == "rows" else "tiny")
    plain, recomputed = (
        gradients(PolicyLearner(policy_of(name, folder)), (CHUNKED,)) for name in (kind, f"{kind} recomputed")
    )
    assert plain[1] == recomputed[1]
    for step, gradient in plain[0].items():
        assert gradient.any() and np.array_equal(gradient, recomputed[0][step]), step
    assert not [one for one in gc.get_objects() if isinstance(one, ForestPlan)]


def test_activations_to_recompute_are_not_kept(tiny_folder: Path) -> None:
    forest = training_batch(recorded_batch(0), 0).forest
    recomputed, kept = (
        bytes_kept(PolicyLearner(policy_of(kind, tiny_folder)), [forest]) for kind in ("full recomputed", "full")
    )
    assert recomputed < 0.2 * kept
