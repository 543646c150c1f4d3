"""The losses against hand arithmetic, on CPU. Each line shows its sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentjet.recipes.losses import AGGREGATIONS, CLIP_FRACTION, Clip, kl_k3
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe
from agentjet.recipes.shelf.cispo import CispoLoss
from agentjet.recipes.shelf.gspo import GspoLoss


def loss_of(ratio: float, advantage: float, **settings: float) -> tuple[float, float, bool]:
    """Clipped loss, its gradient in logp, and whether the clip acted, at old = -1."""
    logp = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    columns = {"logprob": torch.tensor([-1.0]), "advantage": torch.tensor([advantage])}
    value, metrics = Clip.model_validate(settings).token_loss(logp, columns)
    value.sum().backward()
    return float(value.detach()), float(logp.grad), bool(metrics[CLIP_FRACTION])


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
    columns = {"sequence_log_ratio": torch.full((3,), 0.1)}  # (0.1 + 0.3 - 0.1) / 3
    positive, metrics = GspoLoss().token_loss(logp, columns | {"advantage": torch.ones(3)})
    assert positive.tolist() == pytest.approx([-1.0004] * 3)
    assert metrics[CLIP_FRACTION].all(), "the sequence's ratio is above the bound, also for a token with one below 1"
    negative, metrics = GspoLoss().token_loss(logp, columns | {"advantage": -torch.ones(3)})
    assert negative.tolist() == pytest.approx([1.105171] * 3) and not metrics[CLIP_FRACTION].any()
    negative.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1.105171] * 3)


def test_cispo_keeps_a_gradient_outside_the_clip() -> None:
    for ratio, advantage, weight in ((1.5, 1.0, 1.2), (0.7, -1.0, 0.7), (0.5, 1.0, 0.6)):
        logp = torch.tensor([-0.4], requires_grad=True)
        columns = {"logprob": torch.tensor([-0.4 - math.log(ratio)]), "advantage": torch.tensor([advantage])}
        loss, metrics = CispoLoss(clip_low=0.4, clip_high=0.2).token_loss(logp, columns)
        assert float(loss.detach()) == pytest.approx(0.4 * advantage * weight, abs=1e-6)
        assert bool(metrics[CLIP_FRACTION]) == (weight != ratio), "the weight is clipped, whatever the advantage's sign"
        loss.sum().backward()
        assert float(logp.grad) == pytest.approx(-advantage * weight, abs=1e-5)


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_a_token_without_advantage_is_not_clipped(loss: str) -> None:
    ratios = torch.tensor([2.0, -2.0])
    columns = {"logprob": torch.zeros(2), "sequence_log_ratio": ratios, "advantage": torch.zeros(2)}
    assert not make_recipe({"loss": loss}).token_loss(ratios, columns)[1][CLIP_FRACTION].any()


def test_a_loss_has_the_defaults_it_was_published_with() -> None:
    gspo = make_recipe("gspo")
    assert isinstance(gspo, PolicyGradient) and gspo.loss == GspoLoss(clip_low=3e-4, clip_high=4e-4)
    sequence = np.array([0, 0, 0, 1], np.int32)
    assert gspo.loss.aggregation == "sequence_mean" != Clip.aggregation
    combined = make_recipe({"name": "rloo", "loss": {"name": "gspo", "clip_high": 0.1}})
    assert isinstance(combined, PolicyGradient) and combined.loss == GspoLoss(clip_low=3e-4, clip_high=0.1)
    assert AGGREGATIONS[combined.loss.aggregation](sequence, 2, 0).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])


def test_k3() -> None:
    assert float(kl_k3(torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(0.1065307, abs=1e-6)
    assert float(kl_k3(torch.tensor(-1.0), torch.tensor(-1.0))) == 0.0


@pytest.mark.parametrize(
    "aggregation, expected", [("token_mean", 1.4), ("sequence_mean", 2.0), ("constant", 7 / 4 / 2)]
)
def test_aggregation(aggregation: str, expected: float) -> None:
    """Losses [[1, 1, 1, 1], [3]]: 7 / 5; (1 + 3) / 2; 7 / constant 4 / 2 sequences."""
    losses = np.array([1, 1, 1, 1, 3.0])
    weights = AGGREGATIONS[aggregation](np.array([0, 0, 0, 0, 1], np.int32), 2, 4)
    assert float((losses * weights).sum()) == pytest.approx(expected)
