"""The losses against hand arithmetic, on CPU. Each line shows its sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentjet.config import AlgorithmConfig
from agentjet.recipes.losses import AGGREGATIONS, cispo_loss, clip_loss, gspo_loss, kl_k3
from agentjet.recipes.recipe import Recipe


def loss_of(ratio: float, advantage: float, **settings: float) -> tuple[float, float, bool]:
    """Clipped loss, its gradient in logp, and whether the clip acted, at old = -1."""
    logp = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    algorithm = AlgorithmConfig.model_validate(settings)
    value, clipped = clip_loss(logp, torch.tensor([-1.0]), torch.tensor([advantage]), algorithm)
    value.sum().backward()
    return float(value.detach()), float(logp.grad), bool(clipped)


@pytest.mark.parametrize(
    "advantage, ratio, settings, value, gradient",
    [
        (1, 1.5, {}, -1.2, 0.0),  # above the clip: min(1.5, 1.2), no gradient
        (1, 0.5, {}, -0.5, -0.5),
        (-1, 1.5, {}, 1.5, 1.5),
        (-1, 0.5, {}, 0.8, 0.0),
        (-1, 5.0, {"dual_clip": 3.0}, 3.0, 0.0),
        (1, 1.5, {"clip_high": 0.28}, -1.28, 0.0),
    ],
)
def test_clip(advantage: float, ratio: float, settings: dict[str, float], value: float, gradient: float) -> None:
    got, slope, clipped = loss_of(ratio, advantage, **settings)
    assert got == pytest.approx(value, abs=1e-6)
    assert slope == pytest.approx(gradient, abs=1e-6)
    assert clipped == (gradient == 0), "the clip acts where it takes the gradient away"


def test_gspo_uses_the_sequences_mean_ratio() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0])
    logp = (old + torch.tensor([0.1, 0.3, -0.1])).requires_grad_()
    mean = torch.full((3,), 0.1)  # (0.1 + 0.3 - 0.1) / 3
    algorithm = AlgorithmConfig(loss="gspo")
    positive, clipped = gspo_loss(logp, mean, torch.ones(3), algorithm)
    assert positive.tolist() == pytest.approx([-1.0004] * 3)
    assert clipped.all(), "the sequence's ratio is above the bound, also for the token whose own ratio is below 1"
    negative, clipped = gspo_loss(logp, mean, -torch.ones(3), algorithm)
    assert negative.tolist() == pytest.approx([1.105171] * 3) and not clipped.any()
    negative.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1.105171] * 3)


def test_cispo_keeps_a_gradient_outside_the_clip() -> None:
    algorithm = AlgorithmConfig(loss="cispo", clip_low=0.4, clip_high=0.2)
    for ratio, advantage, weight in ((1.5, 1.0, 1.2), (0.7, -1.0, 0.7), (0.5, 1.0, 0.6)):
        logp = torch.tensor([-0.4], requires_grad=True)
        old = torch.tensor([-0.4 - math.log(ratio)])
        loss, clipped = cispo_loss(logp, old, torch.tensor([advantage]), algorithm)
        assert float(loss.detach()) == pytest.approx(0.4 * advantage * weight, abs=1e-6)
        assert bool(clipped) == (weight != ratio), "the weight is clipped, whatever the sign of the advantage"
        loss.sum().backward()
        assert float(logp.grad) == pytest.approx(-advantage * weight, abs=1e-5)


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_a_token_without_advantage_is_not_clipped(loss: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"loss": loss})
    ratios = torch.tensor([2.0, -2.0])
    columns = {"logprob": torch.zeros(2), "sequence_log_ratio": ratios, "advantage": torch.zeros(2)}
    assert not Recipe(algorithm).token_loss(ratios, columns)[1]["policy/clip_fraction"].any()


def test_a_loss_has_the_defaults_it_was_published_with() -> None:
    assert AlgorithmConfig().clip_bounds == (0.2, 0.2) and AlgorithmConfig().loss_aggregation == "token_mean"
    gspo = AlgorithmConfig(loss="gspo")
    assert gspo.clip_bounds == (3e-4, 4e-4) and gspo.loss_aggregation == "sequence_mean"
    chosen = AlgorithmConfig(loss="gspo", clip_high=0.1, aggregation="token_mean")
    assert chosen.clip_bounds == (3e-4, 0.1) and chosen.loss_aggregation == "token_mean"
    assert gspo.with_defaults() == AlgorithmConfig(
        loss="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"
    )


def test_k3() -> None:
    assert float(kl_k3(torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(0.1065307, abs=1e-6)
    assert float(kl_k3(torch.tensor(-1.0), torch.tensor(-1.0))) == 0.0


@pytest.mark.parametrize(
    "aggregation, expected", [("token_mean", 1.4), ("sequence_mean", 2.0), ("constant", 7 / 4 / 2)]
)
def test_aggregation(aggregation: str, expected: float) -> None:
    """Losses [[1, 1, 1, 1], [3]]: 7 / 5; (1 + 3) / 2; 7 / constant 4 / 2 sequences."""
    losses = np.array([1, 1, 1, 1, 3.0])
    algorithm = AlgorithmConfig.model_validate({"aggregation": aggregation, "constant": 4})
    weights = AGGREGATIONS[aggregation](np.array([0, 0, 0, 0, 1], np.int32), 2, algorithm)
    assert float((losses * weights).sum()) == pytest.approx(expected)
