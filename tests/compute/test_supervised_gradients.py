"""Gradients of the recipes `sft` and `dpo` on a real model equal those of one row per call, for any micro-batches.

The independent way uses the model's own attention, and autograd over the whole loss at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Row, build_forest, call_row
from tests.compute.baseline import Double, Weights, another_reference, relative, row_logprobs
from tests.compute.conftest import make_policy, tokens
from tests.recipes.batches import make_batch

GROUPS = [[1.0, 0.2, 0.9], [0.0, 1.0]]
SIZE = 4
PAIRS = {"best_worst": [(0, 1), (4, 3)], "all": [(0, 1), (0, 2), (2, 1), (4, 3)]}


def made_rows() -> list[Row]:
    """An answer to its group's prompt for each episode, without log-probabilities, as demonstrations have it."""
    groups = [group for group, rewards in enumerate(GROUPS) for _ in rewards]
    unknown, versions = np.full(SIZE, np.nan, np.float32), np.zeros(SIZE, np.int32)
    return [
        call_row(np.concatenate([tokens(group, 6), tokens(10 + e, SIZE)]), unknown, versions, None, 1.0, e, call=e)
        for e, group in enumerate(groups)
    ]


def flat(gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([one.detach().flatten() for one in gradients if one is not None])


def learned(
    policy: Policy, rows: Sequence[Row], recipe: dict[str, object], reference: Weights, budget: int
) -> tuple[Tensor, dict[str, float]]:
    """Gradient and metrics of the learner."""
    facts = make_batch(GROUPS, calls=[[SIZE]] * len(rows)).facts
    learner = PolicyLearner(policy)
    learner._reference = reference
    spec = LossSpec(make_recipe(recipe), budget, 0)
    outputs = learner.forward_backward(TrainingBatch(0, build_forest(rows), facts), spec)
    gradient = flat([master.grad for master in learner.masters()])
    learner._optimizer.zero_grad()
    return gradient, dict(outputs.metrics)


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Policy:
    policy = make_policy(tiny_folder)
    policy.model.double()
    return policy


@pytest.mark.parametrize("budget", [100_000, 16])
def test_sft(policy: Policy, budget: int) -> None:
    rows = made_rows()
    with Double():
        ours, metrics = learned(policy, rows, {"name": "sft"}, {}, budget)
        loss = -torch.cat([row_logprobs(policy, row) for row in rows]).mean()
        expected = flat(torch.autograd.grad(loss, list(policy.trainable().values())))
    assert relative(ours, expected) <= 1e-7  # the weight of a token is stored in float32
    assert metrics["policy/cross_entropy"] == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("budget", [100_000, 16])
@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_dpo(policy: Policy, pairs: str, budget: int) -> None:
    rows, reference = made_rows(), another_reference(policy)
    with Double():
        ours, metrics = learned(policy, rows, {"name": "dpo", "pairs": pairs, "beta": 0.5}, reference, budget)
        sums = [row_logprobs(policy, row).sum() for row in rows]
        with torch.no_grad():
            others = [row_logprobs(policy, row, reference).sum() for row in rows]
        ratios = [own - other for own, other in zip(sums, others, strict=True)]
        losses = [-torch.nn.functional.logsigmoid(0.5 * (ratios[w] - ratios[x])) for w, x in PAIRS[pairs]]
        loss = torch.stack(losses).mean()
        expected = flat(torch.autograd.grad(loss, list(policy.trainable().values())))
    assert relative(ours, expected) <= 1e-6  # log-probabilities of a batch are stored in float32
    assert metrics["dpo/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["dpo/pairs"] == len(PAIRS[pairs])
