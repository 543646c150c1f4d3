"""The losses against hand arithmetic, on CPU. Each line says its sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentjet.algorithms.losses import cispo_loss, clip_loss, gspo_loss, kl_k3, weights
from agentjet.config import AlgorithmConfig


def loss_of(ratio: float, advantage: float, **settings: float) -> tuple[float, float]:
    """Clipped loss and its gradient in logp, at old = -1."""
    logp = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    value = clip_loss(logp, torch.tensor([-1.0]), torch.tensor([advantage]), AlgorithmConfig.model_validate(settings))
    value.sum().backward()
    return float(value.detach()), float(logp.grad)


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
    got, slope = loss_of(ratio, advantage, **settings)
    assert got == pytest.approx(value, abs=1e-6)
    assert slope == pytest.approx(gradient, abs=1e-6)


def test_gspo_uses_the_sequences_mean_ratio() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0])
    logp = (old + torch.tensor([0.1, 0.3, -0.1])).requires_grad_()
    mean = torch.full((3,), 0.1)  # (0.1 + 0.3 - 0.1) / 3
    algorithm = AlgorithmConfig(loss="gspo", clip_low=3e-4, clip_high=4e-4)
    assert gspo_loss(logp, mean, torch.ones(3), algorithm).tolist() == pytest.approx([-1.0004] * 3)
    negative = gspo_loss(logp, mean, -torch.ones(3), algorithm)
    assert negative.tolist() == pytest.approx([1.105171] * 3)
    negative.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1.105171] * 3)


def test_cispo_keeps_a_gradient_outside_the_clip() -> None:
    algorithm = AlgorithmConfig(loss="cispo", clip_low=10, clip_high=0.2)
    for ratio, advantage, value in ((1.5, 1.0, 0.48), (0.5, -1.0, -0.20)):
        logp = torch.tensor([-0.4], requires_grad=True)
        loss = cispo_loss(logp, torch.tensor([-0.4 - math.log(ratio)]), torch.tensor([advantage]), algorithm)
        assert float(loss.detach()) == pytest.approx(value, abs=1e-6)
        loss.sum().backward()
        assert float(logp.grad) == pytest.approx(value / -0.4, abs=1e-5)


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
    assert float((losses * weights(np.array([0, 0, 0, 0, 1], np.int32), 2, algorithm)).sum()) == pytest.approx(expected)
