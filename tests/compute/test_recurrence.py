"""Trees for layers with a window or a state, on random forests. Pinned here:

1. micro-batches of any size, with kept pieces of any depth, have the hidden states and gradients of one pass per row;
2. an exception within a pass leaves nothing behind: the next pass and the sampler's rows are exact;
3. a layer that is computed again in the backward pass belongs to the pass that computed it first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.model import recompute_activations
from agentjet.compute.passes import pass_of
from agentjet.compute.policy import Policy
from agentjet.compute.recurrence import install
from agentjet.timeline.forest import Forest, Row, build_forest, call_row
from tests.compute.baseline import Double
from tests.compute.conftest import make_policy

KINDS = ("mistral", "gemma3_window", "lfm2", "qwen3_next", "bamba", "falcon_h1", "mamba", "llama4")


def random_rows(seed: int) -> list[Row]:
    """Calls on random trees: several roots, roots of one token, runs of 1 to 40 tokens, branches at any depth."""
    rng = np.random.default_rng(seed)
    paths: list[np.ndarray] = []
    rows = []
    for number in range(int(rng.integers(4, 14))):
        stem = paths[int(rng.integers(len(paths)))] if paths and rng.random() < 0.85 else np.zeros(0, np.int32)
        stem = stem[: int(rng.integers(len(stem) + 1))]
        path = np.concatenate([stem, rng.integers(5, 60, int(rng.choice([2, 3, 9, 40]))).astype(np.int32)])
        paths.append(path)
        count = int(rng.integers(1, len(path)))
        rows.append(call_row(path, np.zeros(count, np.float32), np.zeros(count, np.int32), 1.0, 1.0, number))
    return rows


def gradients(policy: Policy, forest: Forest, budget: int) -> tuple[Tensor, list[Tensor]]:
    """Returns the sum over all targets of one function of their hidden states, and its gradients."""
    way = pass_of(policy)
    policy.model.zero_grad()
    total = torch.zeros(())
    for piece, _ in way.pieces(forest, budget):
        hidden, rows = way.hidden(piece)
        cut = hidden.detach().requires_grad_()
        (value := torch.tanh(cut[rows]).sum()).backward()
        total = total + value.detach()
        way.backward(hidden, cut.grad)
    way.finish()
    return total, [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]


def by_row(policy: Policy, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
    """Returns the same by the model itself, one row per call."""
    policy.model.zero_grad()
    total = torch.zeros(())
    with policy.attention(policy.own_attention):
        for row in rows:
            tokens = np.asarray(row.tokens)
            hidden = cast(Any, policy.decoder)(input_ids=torch.from_numpy(tokens)[None].long(), use_cache=False)
            total = total + torch.tanh(hidden.last_hidden_state[0, row.at.start - 1 : len(tokens) - 1]).sum()
    total.backward()
    return total.detach(), [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_any_micro_batches_have_the_gradients_of_rows(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_policy(folder_of(kind))
    policy.model.double()
    policy.config._experts_implementation = "eager"
    assert policy.learns_forests
    with Double():
        for seed in range(4):
            rows = random_rows(seed)
            expected, wanted = by_row(policy, rows)
            for budget in (8, 20, 70, 10_000):
                total, found = gradients(policy, build_forest(rows), budget)
                assert torch.allclose(total, expected, rtol=1e-12)
                norm = sum(float((g**2).sum()) for g in wanted) ** 0.5
                error = sum(float(((a - b) ** 2).sum()) for a, b in zip(found, wanted, strict=True)) ** 0.5
                assert error <= 1e-12 * norm, (seed, budget)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
def test_a_failed_pass_leaves_nothing_behind(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_policy(folder_of(kind))
    rows = random_rows(1)
    forest = build_forest(rows)
    before, way = gradients(policy, forest, 20), pass_of(policy)
    pieces = way.pieces(forest, 20)
    way.hidden(pieces[0][0])
    hook = policy.decoder.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        way.hidden(pieces[1][0])
    hook.remove()
    way.forget()
    ids = torch.from_numpy(np.asarray(rows[0].tokens))[None].long()
    with torch.no_grad(), policy.attention(policy.own_attention):
        row = cast(Any, policy.decoder)(input_ids=ids, use_cache=False).last_hidden_state
        fresh = cast(Any, make_policy(folder_of(kind)).decoder)
        fresh.config._attn_implementation = policy.own_attention
        assert torch.equal(row, fresh(input_ids=ids, use_cache=False).last_hidden_state)
    after = gradients(policy, forest, 20)
    assert torch.equal(before[0], after[0]) and all(map(torch.equal, before[1], after[1]))


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba", "lfm2"])
def test_recomputed_layers_belong_to_their_pass(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_policy(folder_of(kind))
    forest = build_forest(random_rows(2))
    plain = gradients(policy, forest, 20)
    policy.model.train()
    recompute_activations(policy)
    again = gradients(policy, forest, 20)
    assert torch.equal(plain[0], again[0]) and all(map(torch.equal, plain[1], again[1]))


def test_a_layer_that_inherits_its_functions_computes_forests(folder_of: Callable[[str], Path]) -> None:
    """A class may stand in another module than the functions that its inherited methods call."""
    policy = make_policy(folder_of("qwen3_next"))
    layer = cast(Any, policy.decoder).layers[0].linear_attn
    layer.__class__ = type("Inheriting", (type(layer),), {})
    assert type(layer).__module__ == __name__ and install(policy.decoder) == 1
