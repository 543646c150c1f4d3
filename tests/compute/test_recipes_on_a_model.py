"""Recipes whose losses read columns of the recipe or of the learner, on a real model: a step changes the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import Facts
from agentjet.timeline.forest import build_forest
from tests.compute.conftest import make_policy, sampled_rows


def facts_of(episodes: int, turns: int) -> Facts:
    """Groups of four episodes, whose calls come turn after turn, as in `sampled_rows`."""
    calls = np.arange(episodes * turns)
    return Facts(
        groups=(np.arange(episodes) // 4).astype(np.int32),
        rewards=(np.arange(episodes) % 3 == 0).astype(np.float64),
        roles=("",),
        role_rewards=np.full((episodes, 1), np.nan),
        spoke=np.ones((episodes, 1), bool),
        call_episode=(calls % episodes).astype(np.int32),
        call_role=np.zeros(len(calls), np.int32),
        call_turn=(calls // episodes).astype(np.int32),
        call_rewards=np.where(calls % 2, 0.5, -0.3),
        call_truncated=np.zeros(len(calls), bool),
        tasks=(("", "t"),) * episodes,
        seconds=np.ones(episodes),
        metrics={},
        code_versions=("",) * episodes,
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"name": "oapl", "mini_batches": 2, "loss": {"beta": 0.1}},
        {"name": "direct_advantage", "mini_batches": 2},
        {"name": "etr", "mini_batches": 2},
        {"name": "hapo"},
        {"name": "aepo"},
        {"name": "stepwise_grpo", "keep": 0.5},
        {"name": "gigpo"},
        {"name": "dense_turn_credit"},
        {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "correction": "tis", "correction_level": "sequence"},
    ],
    ids=lambda parameters: parameters["name"],
)
def test_a_step_changes_the_weights(tiny_folder: Path, parameters: dict[str, object]) -> None:
    policy = make_policy(tiny_folder)
    rows = [replace(row, columns={**row.columns, "call": number}) for number, row in enumerate(sampled_rows(policy))]
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    job = JobConfig(recipe=make_recipe(parameters), optimizer=OptimizerConfig(lr=1e-3))
    metrics = PolicyLearner(policy).learn(build_forest(rows), job, 0, facts_of(12, 2))
    assert np.isfinite(list(metrics.values())).all() and metrics["optim/grad_norm"] > 0
    assert any(not torch.equal(before[name], p) for name, p in policy.trainable().items())
