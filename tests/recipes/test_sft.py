"""Supervised fine-tuning against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentjet.config import JobConfig
from agentjet.recipes.registry import make_recipe
from tests.recipes.batches import make_batch


def test_the_loss_is_the_mean_of_negative_log_probabilities() -> None:
    recipe = make_recipe("sft")
    batch = make_batch([[0.0], [0.0]], calls=[[1], [3]])
    forest, metrics = recipe.columns(batch, {})
    assert forest is batch.forest and metrics == {}
    logp = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.5])).requires_grad_()
    loss, reported = recipe.token_loss(logp, {})
    weights = torch.from_numpy(recipe.weights(forest))
    (loss * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert float((loss * weights).sum().detach()) == pytest.approx(7 * np.log(2) / 4)  # (1 + 2 + 3 + 1) log 2 / 4
    assert logp.grad is not None and logp.grad.tolist() == [-0.25] * 4
    assert reported["policy/cross_entropy"].tolist() == loss.tolist()


def test_the_mean_over_demonstrations_counts_each_of_them_once() -> None:
    recipe = make_recipe({"name": "sft", "aggregation": "sequence_mean"})
    forest = make_batch([[0.0], [0.0]], calls=[[1], [3]]).forest
    assert recipe.weights(forest).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


def test_a_run_with_another_recipe_learns_demonstrations_with_this_one() -> None:
    job = JobConfig.model_validate({"optimizer": {"lr": 1e-3, "schedule": "linear", "total_steps": 9}})
    assert job.for_demonstrations().recipe.name == "sft" and job.for_demonstrations().optimizer == job.optimizer
    constant = job.for_demonstrations(1e-5).optimizer_of("policy")
    assert constant.lr == 1e-5 and constant.schedule == "constant"
    own = JobConfig.model_validate({"recipe": {"name": "sft", "aggregation": "sequence_mean"}})
    assert own.for_demonstrations().recipe == own.recipe
    assert JobConfig.model_validate(own.for_demonstrations(1e-5).model_dump()) == own.for_demonstrations(1e-5)


def test_the_learning_rate_of_demonstrations_is_that_of_their_policy_only() -> None:
    job = JobConfig.model_validate({"optimizer": {"lr": 1e-3}, "optimizers": {"coder": {"lr": 1e-4}}})
    rates = {
        policy: [job.for_demonstrations(1e-5, policy).optimizer_of(name).lr for name in ("planner", "coder", "critic")]
        for policy in ("planner", "coder")
    }
    assert rates == {"planner": [1e-5, 1e-4, 1e-3], "coder": [1e-3, 1e-5, 1e-3]}
