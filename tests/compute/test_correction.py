"""Batches sampled by other weights: the correction scales each token's gradient, and the mismatch is reported.

The recorded log-probabilities are moved by known ratios, so what the corrected batch must do is known: the same as a
batch without mismatch whose advantages are scaled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.compute.learner import PolicyLearner
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import Forest, build_forest, select
from tests.compute.conftest import make_policy, sampled_rows
from tests.compute.direct import learn_directly

RHO = np.array([0.25, 0.9, 1.1, 3.0], np.float32)


def learned(folder: Path, forest: Forest, **recipe: object) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights after one step on `forest`, and its metrics."""
    policy = make_policy(folder)
    job = JobConfig(recipe=make_recipe(recipe), optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0))
    metrics = learn_directly(PolicyLearner(policy), forest, job, 0)
    return {name: p.detach() for name, p in policy.trainable().items()}, metrics


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> Forest:
    """A batch whose recorded log-probabilities are the learner's own."""
    policy = make_policy(tiny_folder)
    forest = build_forest(sampled_rows(policy))
    return forest.with_columns(logprob=PolicyLearner(policy).logprobs(forest).numpy())


@pytest.mark.parametrize("loss", ["clip", "cispo", "gspo"])
@pytest.mark.parametrize(
    ("correction", "scale"),
    [("tis", [0.25, 0.9, 1.1, 2.0]), ("icepop", [0, 0.9, 1.1, 3.0]), ("mis", [0, 0.9, 1.1, 0])],
)
def test_a_correction_scales_what_each_token_teaches(
    tiny_folder: Path, exact: Forest, loss: str, correction: str, scale: list[float]
) -> None:
    which = np.arange(exact.num_targets) % len(RHO)
    stale = exact.with_columns(logprob=exact["logprob"] - np.log(RHO[which]))
    scaled = exact.with_columns(advantage=exact["advantage"] * np.array(scale, np.float32)[which])
    if correction == "mis":
        scaled = select(scaled, np.array(scale)[which] > 0)
    ours, metrics = learned(tiny_folder, stale, loss=loss, correction=correction)
    expected, _ = learned(tiny_folder, scaled, loss=loss)
    # Adam's first step is a sign: what is compared is where it moved to, up to rounding of the recomputed ratios.
    moved = sum(float((ours[name] - expected[name]).abs().gt(1e-4).sum()) for name in ours)
    assert moved / sum(p.numel() for p in ours.values()) < 0.01
    assert metrics["policy/mismatch_kl"] > 0.01
    assert metrics["policy/correction_mean"] == pytest.approx(np.array(scale)[which].mean(), rel=1e-3)
    assert metrics["policy/correction_dropped"] == pytest.approx((np.array(scale)[which] == 0).mean())


def test_without_mismatch_nothing_is_corrected(tiny_folder: Path, exact: Forest) -> None:
    plain, _ = learned(tiny_folder, exact)
    corrected, metrics = learned(tiny_folder, exact, correction="tis")
    assert metrics["policy/mismatch_kl"] < 1e-9 and metrics["policy/correction_mean"] == pytest.approx(1)
    assert all(torch.allclose(plain[name], corrected[name], atol=1e-6) for name in plain)


def test_a_batch_without_targets_is_learned_as_nothing(tiny_folder: Path) -> None:
    before = {name: p.detach().clone() for name, p in make_policy(tiny_folder).trainable().items()}
    for correction in ("none", "mis"):
        after, metrics = learned(tiny_folder, build_forest([]), correction=correction)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert metrics["forest/tokens_computed"] == 0
