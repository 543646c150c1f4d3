"""The losses against hand arithmetic, on CPU. Each line shows its sum."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.recipes.clipping import CispoLoss, GspoLoss
from agentjet.recipes.losses import CLIP_FRACTION, KL_ESTIMATES, Clip, kl_k3, token_weights
from agentjet.recipes.policy_gradient import PolicyGradient, facts_of, penalised
from agentjet.recipes.registry import make_recipe
from tests.recipes.batches import make_batch, recipe_of

ROOT = Path(__file__).parents[2]


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
    assert token_weights(combined.loss.aggregation, sequence, 2).tolist() == pytest.approx([1 / 6] * 3 + [1 / 2])


def test_k3() -> None:
    assert float(kl_k3(torch.tensor(-1.0), torch.tensor(-1.5))) == pytest.approx(0.1065307, abs=1e-6)
    assert float(kl_k3(torch.tensor(-1.0), torch.tensor(-1.0))) == 0.0


@pytest.mark.parametrize(
    "aggregation, expected",
    [("token_mean", 1.4), ("sequence_mean", 2.0), ("sequence_sum", 3.5), ("constant", 7 / 4 / 2)],
)
def test_aggregation(aggregation: str, expected: float) -> None:
    """Losses [[1, 1, 1, 1], [3]]: 7 / 5; (1 + 3) / 2; 7 / 2; 7 / constant 4 / 2 sequences."""
    losses = np.array([1, 1, 1, 1, 3.0])
    weights = token_weights(aggregation, np.array([0, 0, 0, 0, 1], np.int32), 2, 4)
    assert float((losses * weights).sum()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "value", "gradient"), [("k1", 0.5, 1), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.393469)]
)
def test_estimates_of_the_kl_divergence(name: str, value: float, gradient: float) -> None:
    """Log-ratio 0.5: 0.5; 0.5^2 / 2; e^-0.5 + 0.5 - 1."""
    logp = torch.tensor(-1.0, requires_grad=True)
    kl = KL_ESTIMATES[name](logp, torch.tensor(-1.5))
    kl.backward()
    assert float(kl.detach()) == pytest.approx(value, abs=1e-6)
    assert logp.grad is not None and float(logp.grad) == pytest.approx(gradient, abs=1e-6)


def test_kl_in_the_loss() -> None:
    columns = {"logprob": torch.tensor([-1.0]), "advantage": torch.tensor([1.0]), "reference": torch.tensor([-1.5])}
    for estimator, kl in (("auto", 0.1065307), ("k2", 0.125)):
        recipe = recipe_of("grpo", kl_coef=2.0, kl_estimator=estimator)
        loss, metrics = recipe.token_loss(torch.tensor([-1.0]), columns)
        assert float(loss) == pytest.approx(-1 + 2 * kl) and float(metrics["policy/kl"]) == pytest.approx(kl)
        assert recipe.reads == ("logprob", "advantage", "reference") and recipe.needs == set()


def test_kl_in_the_reward() -> None:
    """Rewards 1 - 0.1 x 2 x 0.5 and 0 - 0.1 x 1 x 0.5, and their differences."""
    batch = make_batch([[1, 0]], calls=[[2], [1]])
    rloo = recipe_of("rloo", kl_coef=0.1, kl_in="reward")
    assert rloo.needs == {"reference"} and "reference" not in rloo.reads
    forest, metrics = rloo.columns(batch, {"reference": np.full(3, -1.5, np.float32)})
    assert forest["advantage"].tolist() == pytest.approx([0.95, 0.95, -0.95]) and metrics["policy/kl"] == 0.5
    squared = recipe_of("rloo", kl_coef=0.1, kl_in="reward", kl_estimator="k2")
    forest, _ = squared.columns(batch, {"reference": np.full(3, -1.5, np.float32)})
    assert forest["advantage"].tolist() == pytest.approx([0.9875, 0.9875, -0.9875])
    assert rloo.contributing(forest).all()


def test_rewards_that_are_named_for_a_role_have_the_penalty_too() -> None:
    batch = make_batch([[1, 0, 5], [1, 0]], named=[2, 3, np.nan, np.nan, np.nan])
    found = facts_of(penalised(batch, np.full((5, 1), 0.5)))
    assert found.role_rewards[:, 0].tolist() == pytest.approx([1.5, 2.5, math.nan, 0.5, -0.5], nan_ok=True)


def test_kl_that_would_teach_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_estimator = 'k1' in the loss has a gradient that is 0 on average"):
        make_recipe({"kl_estimator": "k1"})


def test_the_loss_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "recipes.md").read_text(), re.DOTALL)
    (tmp_path / "my_losses.py").write_text(next(block for block in blocks if "PulledLoss" in block))
    monkeypatch.syspath_prepend(tmp_path)
    recipe = make_recipe({"name": "rloo", "loss": {"name": "my_losses:PulledLoss", "pull": 0.5}})
    columns = {"logprob": torch.tensor([-1.0]), "advantage": torch.tensor([2.0])}
    loss, metrics = recipe.token_loss(torch.tensor([-3.0]), columns)
    assert (float(loss), float(metrics["policy/gap"])) == (6.0 + 0.25 * 4, -2.0)
