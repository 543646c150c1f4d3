"""The fingerprints of weights. Pinned here:

1. any changed bit changes the fingerprint; equal bits give equal numbers;
2. a step that learns changes both sides, any other step changes neither, and loading is not a step;
3. a sampler whose weights differ from the learner's is detected; so are bfloat16 weights that rounding left unchanged;
4. a model's info identifies its weights, for every type and every adapter.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from agentjet.compute import checkpoint
from agentjet.compute.group import RankGroup
from agentjet.compute.group import fingerprint as fingerprint_of
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy, summed
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.timeline.forest import Forest, build_forest, call_row
from tests.compute.conftest import make_policy, sampled_rows
from tests.compute.direct import learn_directly
from tests.tiny import make_model

BOTH, NEITHER = {"weights/learner": 1.0, "weights/sampler": 1.0}, {"weights/learner": 0.0, "weights/sampler": 0.0}


def fingerprint(weights: list[torch.Tensor]) -> int:
    return fingerprint_of(weights, RankGroup(), {})


def job(lr: float = 1e-3) -> JobConfig:
    return JobConfig(optimizer=OptimizerConfig(lr=lr, weight_decay=0.0))


def batch(policy: Policy, advantage: float | None = None) -> Forest:
    rows = sampled_rows(policy)
    if advantage is not None:
        rows = [call_row(row.tokens, row["logprob"], row["version"], advantage, 1.0, row["sequence"]) for row in rows]
    return build_forest(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (3, 5), (2, 3, 4)])
def test_a_bit_that_changes_shows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    other = torch.ones(7, 2)
    weights = torch.randn(shape).to(dtype)
    before = fingerprint([other, weights])
    assert fingerprint([other.clone(), weights.clone()]) == before
    if weights.dim() == 2:
        assert fingerprint([weights.t()]) == fingerprint([weights.t().contiguous()]) != before
    bits = weights.view({4: torch.int32, 2: torch.int16}[weights.element_size()]).reshape(-1)
    for place in range(len(bits)):
        for bit in (0, 7, 14):
            bits[place] ^= 1 << bit
            assert fingerprint([other, weights]) != before, (place, bit)
            bits[place] ^= 1 << bit
    assert fingerprint([other, weights]) == before


def test_the_sums_of_parts_add_up_with_an_empty_one() -> None:
    """A rank holds no row of a matrix with fewer rows than ranks."""
    weights = torch.randn(2, 6)
    parts = [summed(weights[:1]), summed(weights[1:], 1), summed(weights[2:], 2)]
    assert torch.equal(torch.stack(parts).sum(), summed(weights)) and int(parts[2]) == 0


def test_opposite_changes_of_two_rows_or_two_tensors_do_not_cancel() -> None:
    one, two = torch.zeros(2, 4), torch.zeros(2, 4)
    bits = [tensor.view(torch.int32) for tensor in (one, two)]
    before = fingerprint([one, two])
    bits[0][0, 0], bits[0][1, 0] = 5, -5
    assert fingerprint([one, two]) != before
    bits[0][1, 0], bits[1][0, 0] = 0, -5
    assert fingerprint([one, two]) != before


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_step_changed(tiny_folder: Path, tmp_path: Path, dtype: str, rank: int) -> None:
    policy = make_policy(tiny_folder, dtype=dtype, rank=rank)
    learner = PolicyLearner(policy)
    assert learner.weights_changed() == NEITHER
    learn_directly(learner, batch(policy, math.inf), job(), 0)
    assert learner.weights_changed() == NEITHER, "a gradient that is no number changes nothing"
    learn_directly(learner, batch(policy), job(), 1)
    assert learner.weights_changed() == BOTH
    checkpoint.save(tmp_path / "step_000002", learner, {"policy_version": 2})
    learn_directly(learner, batch(policy), job(), 2)
    checkpoint.load(tmp_path / "step_000002", learner)
    assert learner.weights_changed() == NEITHER


def test_a_sampler_that_does_not_take_the_weights_up_is_told_apart(policy: Policy) -> None:
    learner = PolicyLearner(policy)
    for module in policy.model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(weight.detach().clone()))
    learner.weights_changed()
    with torch.no_grad():
        for master in learner.masters():
            master.add_(1e-3)
    assert learner.weights_changed() == {"weights/learner": 1.0, "weights/sampler": 0.0}


def test_a_step_below_the_rounding_of_bfloat16(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder, dtype="bfloat16")
    with torch.no_grad():
        for weight in policy.trainable().values():
            weight[weight.abs() < 1e-3] = 1e-3  # what is nearly 0 rounds finer
    learner = PolicyLearner(policy)
    learn_directly(learner, batch(policy), job(lr=1e-8), 0)
    assert learner.weights_changed() == {"weights/learner": 1.0, "weights/sampler": 0.0}


def test_a_card_tells_the_weights_of_models_apart(tiny_folder: Path, tmp_path: Path) -> None:
    loaded = [make_policy(tiny_folder), make_policy(tiny_folder, dtype="bfloat16"), make_policy(tiny_folder, rank=4)]
    [known] = {policy.info.weights for policy in loaded}
    other = make_policy(make_model(tmp_path / tiny_folder.name, seed=1)).info
    assert (other.name == str(tmp_path / tiny_folder.name)) and other.weights and other.weights != known
