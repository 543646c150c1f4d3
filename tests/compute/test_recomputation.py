"""Activation checkpointing (`model.activation_checkpointing`). Pinned here:

1. the gradients are those without it, bit by bit: of all weights and of an adapter, with prefixes that several
   micro-batches share, and row by row;
2. the forward pass keeps a fraction of the activations;
3. nothing of a pass stays in memory after it.
With ranks: `tests/cluster/test_ranks.py`.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.embedded.attention import ForestPlan
from agentjet.compute.embedded.learner import PolicyLearner
from tests.cluster.rank_cases import gradients, policy_of
from tests.compute.architectures import make_architecture
from tests.compute.test_locks import recorded_batch, training_batch

CHUNKED = 9
"""A batch of `test_locks` in several micro-batches, with a reference."""


@pytest.mark.parametrize("kind", ["full", "lora", "rows"])
def test_the_gradients_are_equal(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    folder = make_architecture(tmp_path / "rows", "mamba") if kind == "rows" else tiny_folder
    plain, recomputed = (
        gradients(PolicyLearner(policy_of(name, folder)), (CHUNKED,)) for name in (kind, f"{kind} recomputed")
    )
    assert plain[1] == recomputed[1]
    for step, gradient in plain[0].items():
        assert gradient.any() and np.array_equal(gradient, recomputed[0][step]), step
    assert not [one for one in gc.get_objects() if isinstance(one, ForestPlan)]


def test_the_activations_are_not_kept(tiny_folder: Path) -> None:
    def kept(kind: str) -> int:
        learner, found = PolicyLearner(policy_of(kind, tiny_folder)), dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden, _ = learner._pass.hidden(training_batch(recorded_batch(0), 0).forest)
        assert hidden.requires_grad
        weights = {p.untyped_storage().data_ptr() for p in learner.policy.model.parameters()}
        return sum(size for pointer, size in found.items() if pointer not in weights)

    assert kept("full recomputed") < 0.2 * kept("full")
