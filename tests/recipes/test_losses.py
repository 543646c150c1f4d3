"""The losses and corrections against hand arithmetic, on CPU. Each line shows its sum."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentjet.recipes.clipping import (
    CispoLoss,
    ClipCovLoss,
    GmpoLoss,
    GspoLoss,
    GspoTokenLoss,
    HapoLoss,
    KlCovLoss,
    relative,
    standardised,
)
from agentjet.recipes.losses import (
    CLIP_FRACTION,
    KL_ESTIMATES,
    Clip,
    PolicyLoss,
    corrected,
    importance_ratio,
    kl_k3,
    token_weights,
    vetoed,
)
from agentjet.recipes.policy_gradient import PolicyGradient, facts_of, penalised
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
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
    columns = {"logprob": old, "sequence": torch.zeros(3, dtype=torch.int64)}  # (0.1 + 0.3 - 0.1) / 3
    positive, metrics = GspoLoss().batch_loss(logp, columns | {"advantage": torch.ones(3)})
    assert positive.tolist() == pytest.approx([-1.0004] * 3)
    assert metrics[CLIP_FRACTION].all(), "the sequence's ratio is above the bound, also for a token with one below 1"
    negative, metrics = GspoLoss().batch_loss(logp, columns | {"advantage": -torch.ones(3)})
    assert negative.tolist() == pytest.approx([1.105171] * 3) and not metrics[CLIP_FRACTION].any()
    negative.sum().backward()
    assert logp.grad.tolist() == pytest.approx([1.105171] * 3)


@pytest.mark.parametrize(
    ("loss", "advantages", "losses", "gradient"),
    [
        # log-ratios 0.1, 0.6, -0.5 in one sequence; the second and the third are beyond the bound of 0.4
        (GmpoLoss(), [1, 1, 1], [-1, -1, -1], [-1, 0, -1]),  # 0.1 + 0.4 - 0.5 = 0
        (GmpoLoss(), [-1, -1, -1], [1.105171] * 3, [1.105171, 1.105171, 0]),  # 0.1 + 0.6 - 0.4 = 0.3
        (GmpoLoss(clip=9), [1, 1, 1], [-1.068939] * 3, [-1.068939] * 3),  # 0.2 / 3
        # the ratio of the sequence, exp(0.2 / 3), is above the upper bound
        (GspoTokenLoss(), [-1, -2, -4], [1.068939, 2.137878, 4.275756], [1.068939, 2.137878, 4.275756]),
        (GspoLoss(), [-1, -2, -4], [1.068939, 2.137878, 4.275756], [2.494191] * 3),  # the mean of these
        (GspoTokenLoss(), [1, -1, 0], [-1.0004, 1.068939, 0], [0, 1.068939, 0]),
        (GspoTokenLoss(clip_high=0.1), [1, 1, 1], [-1.068939] * 3, [-1.068939] * 3),
    ],
)
def test_losses_of_sequences(
    loss: PolicyLoss, advantages: list[float], losses: list[float], gradient: list[float]
) -> None:
    logp = torch.tensor([-0.9, -0.4, -1.5], dtype=torch.float64, requires_grad=True)
    columns = {"logprob": torch.full((3,), -1.0), "sequence": torch.zeros(3, dtype=torch.int64)}
    found, _ = loss.batch_loss(logp, columns | {"advantage": torch.tensor(advantages, dtype=torch.float64)})
    found.sum().backward()
    assert found.tolist() == pytest.approx(losses, abs=1e-6)
    assert logp.grad.tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [
        # Advantages 3, 1, -1, -3, 0 with mean 0, and log-probabilities -1, -4, -3, -6, -1 with mean -3: covariances
        # 6, -1, 0, 9, 0. All log-ratios are 0.1, so the gradient is -1.105171 A.
        (ClipCovLoss(), [-3.315513, -1.105171, 1.105171, 3.315513, 0]),  # none is between 1 and 5
        (ClipCovLoss(highest=7), [0, -1.105171, 1.105171, 3.315513, 0]),
        (ClipCovLoss(highest=10, share=0.39), [0, -1.105171, 1.105171, 3.315513, 0]),  # one of two, the first
        (ClipCovLoss(highest=10, share=0.4), [0, -1.105171, 1.105171, 0, 0]),
        (ClipCovLoss(highest=10, clip_high=0.05), [0, 0, 1.105171, 0, 0]),  # the first is clipped, so it is the fourth
        (KlCovLoss(), [-3.315513, -1.105171, 1.105171, 4.315513, 0]),
        (KlCovLoss(share=0.4, coef=2), [-1.315513, -1.105171, 1.105171, 5.315513, 0]),
    ],
)
def test_tokens_of_high_covariance(loss: PolicyLoss, gradient: list[float]) -> None:
    logp = torch.tensor([-1.0, -4, -3, -6, -1], dtype=torch.float64, requires_grad=True)
    columns = {"logprob": logp.detach() - 0.1, "advantage": torch.tensor([3.0, 1, -1, -3, 0], dtype=torch.float64)}
    found, metrics = loss.batch_loss(logp, columns)
    found.sum().backward()
    assert logp.grad.tolist() == pytest.approx(gradient, abs=1e-6)
    if metrics:
        assert metrics[CLIP_FRACTION].tolist() == [slope == 0 for slope in gradient[:4]] + [False]


def test_an_entropy_bonus_is_a_term_of_any_loss() -> None:
    columns = {"logprob": torch.tensor([-1.0]), "advantage": torch.tensor([2.0])}
    entropy = torch.tensor([0.5], requires_grad=True)
    for loss, plain in (("clip", -2.0), ("rft", 2.0)):
        recipe = recipe_of("rloo", loss=loss, entropy_coef=0.1)
        found, metrics = recipe.token_loss(torch.tensor([-1.0]), columns | {"new_entropy": entropy})
        assert float(found.detach()) == pytest.approx(plain - 0.05) and "policy/present_entropy" in metrics
        assert "new_entropy" in recipe.reads and "new_entropy" not in recipe_of("rloo").reads
    batch = make_batch([[1, 1]])
    assert recipe.contributing(recipe.columns(batch, {})[0]).all(), "a token without advantage has an entropy"
    assert not recipe_of("rloo").contributing(recipe_of("rloo").columns(batch, {})[0]).any()


def test_the_adaptive_bonus_acts_below_its_target() -> None:
    recipe = recipe_of("adaptive_entropy", target=0.5, step=0.01, entropy_coef=0.02, max_coef=0.025)
    batch = make_batch([[1, 0]])
    states = []
    for logprob in (-0.4, -0.4, -0.6, -0.6, -0.6, -0.6):
        forest = batch.forest.with_columns(logprob=np.full(batch.forest.num_targets, logprob))
        made, metrics = recipe.columns(replace(batch, forest=forest, state=states[-1] if states else {}), {})
        now = (states[-1] if states else {"entropy_coef": 0.02})["entropy_coef"]
        assert made["entropy_coef"].tolist() == pytest.approx([now if logprob > -0.5 else 0.0] * made.num_targets)
        states.append(dict(recipe.next_state({}, metrics)))
    assert [state["entropy_coef"] for state in states] == pytest.approx([0.025, 0.025, 0.015, 0.005, 0.0, 0.0])


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
    columns = {"logprob": torch.zeros(2), "sequence": torch.arange(2), "advantage": torch.zeros(2)}
    recipe = make_recipe({"loss": loss})
    own_loss = recipe.batch_loss if recipe.takes_batch else recipe.token_loss
    assert not own_loss(ratios, columns)[1][CLIP_FRACTION].any()


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


# ---- losses whose recipes make further columns: OAPL, direct advantage, ETR and HAPO ---------------------------------


def summed(name: str, log_ratios: list[list[float]], advantages: list[float]) -> tuple[list[float], list[float]]:
    """The loss of each sequence of a recipe, and its gradient in each token's log-probability, as a mean over them."""
    recipe = recipe_of(name)
    tokens = [len(ratios) for ratios in log_ratios]
    sequence = torch.repeat_interleave(torch.tensor(tokens))
    ratios = torch.tensor([ratio for own in log_ratios for ratio in own], dtype=torch.float64)
    logp = (ratios - 1).requires_grad_()
    counts = torch.tensor(tokens, dtype=torch.float64)[sequence]
    columns = {
        "logprob": torch.full_like(ratios, -1),
        "sequence": sequence,
        "sequence_tokens": counts,
        "turn_tokens": counts,
        "advantage": torch.tensor(advantages, dtype=torch.float64)[sequence],
    }
    loss, _ = recipe.batch_loss(logp, columns)
    (loss / len(tokens)).sum().backward()
    sums = torch.zeros(len(tokens), dtype=torch.float64).index_add(0, sequence, loss.detach())
    assert logp.grad is not None
    return sums.tolist(), logp.grad.tolist()


def test_oapl() -> None:
    """Log-ratios of 10, -5, 0 and 20 over a sequence, the first one over two tokens."""
    losses, gradient = summed("oapl", [[7.0, 3.0], [-5.0], [0.0], [20.0]], [0.379885, -0.620115, -0.620115, 0.379885])
    assert sum(losses) / 4 == pytest.approx(0.257310, abs=1e-6)
    assert gradient == pytest.approx([-0.000185, -0.000185, 0.000308, 0.00031, -0.00018], abs=1e-6)
    at_start, _ = summed("oapl", [[0.0]] * 4, [0.379885, -0.620115, -0.620115, 0.379885])
    assert sum(at_start) / 4 == pytest.approx(0.264427, abs=1e-6)


def test_direct_advantage() -> None:
    """Advantage 0.3 and beta 0.1 want a log-ratio of 3; an advantage of 2 wants the largest one, 10."""
    losses, gradient = summed("direct_advantage", [[0.0], [1.0, 2.0], [9.0]], [0.3, 0.3, 2.0])
    assert losses == pytest.approx([4.5, 0.0, 0.5])
    assert gradient == pytest.approx([-1.0, 0.0, 0.0, -1 / 3])


def test_oapl_sums_over_sequences() -> None:
    batch = make_batch([[1, 0]], calls=[[2, 3], [1]])
    oapl = recipe_of("oapl")
    forest = oapl.columns(batch, {})[0]
    assert forest["sequence_tokens"].tolist() == [5.0] * 5 + [1.0]
    assert oapl.weights(forest).tolist() == [0.5] * 6 and oapl.contributing(forest).all()
    named = make_batch([[1, 0, 0.5]], named=[1, 0, np.nan])
    assert oapl.columns(named, {})[0].num_targets == 4, "without the episode that is not compared"


def test_direct_advantage_is_about_turns_and_the_reference() -> None:
    batch = make_batch([[1]], calls=[[2, 1, 3]], turn_rewards=[[0.3, 0.04, -0.2]])
    recipe = recipe_of("direct_advantage")
    assert recipe.needs == {"reference"}
    reference = np.arange(6, dtype=np.float32)
    forest, metrics = recipe.columns(batch, {"reference": reference})
    assert forest["sequence"].tolist() == [0, 0, 2, 2, 2] and forest.num_sequences == 2
    assert forest["logprob"].tolist() == [0, 1, 3, 4, 5] and forest["turn_tokens"].tolist() == [2, 2, 3, 3, 3]
    assert recipe.weights(forest).tolist() == [0.5] * 5 and metrics["policy/entropy"] == 1.0
    with pytest.raises(ValueError, match="the recipe 'direct_advantage' is its loss; leave loss out"):
        recipe_of("direct_advantage", loss="clip")


def bounds(batch: TrainingBatch, advantage: list[float], **parameters: float) -> list[float]:
    columns = recipe_of("etr", **parameters).loss_columns(batch, np.array(advantage, np.float32))
    return [float(bound) for bound in columns["bound"]]


def test_etr_bounds() -> None:
    half, eighth = make_batch([[1, 0]], calls=[[2], [1]]), make_batch([[0.5**0.5, 0]], calls=[[1], [1]])
    assert bounds(half, [0, 1, 2]) == pytest.approx([0.154801, 0.25, 0.275304], abs=1e-6)
    assert bounds(eighth, [1, 1]) == pytest.approx([0.2, 0.2])  # variance 0.125
    assert bounds(half, [0, 1, 2], micro=0, macro=0) == pytest.approx([0.2] * 3)
    assert bounds(half, [0, 1, 2], bound=0.35) == pytest.approx([0.270902, 0.4, 0.4], abs=1e-6)
    with pytest.raises(ValueError, match=r"bound = 0\.5 must lie between smallest = 0\.05 and largest = 0\.4"):
        recipe_of("etr", bound=0.5)
    loss, _ = recipe_of("etr").token_loss(
        torch.tensor([1.5, 1.5]).log(),
        {"logprob": torch.zeros(2), "advantage": torch.ones(2), "bound": torch.tensor([0.25, 0.6])},
    )
    assert loss.tolist() == pytest.approx([-1.25, -1.5])


def test_hapo() -> None:
    h = relative(np.array([0.01, 0.1, 0.5, 1, 2]))
    assert h.tolist() == pytest.approx([-1, -0.5, -0.150515, 0, 1], abs=1e-6)
    assert relative(np.full(4, 0.3)).tolist() == [0.0] * 4
    assert np.isfinite(relative(np.array([0.0, 0.0, 1.0]))).all()
    ratio, one = torch.tensor([1, 1, 1.3, 1, 1.4], dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    columns = {"logprob": 0 * one, "advantage": one, "relative_entropy": torch.from_numpy(h)}
    loss, _ = HapoLoss().token_loss(ratio.log(), columns)  # advantages 0 0.5 1 1 2; the third ratio is clipped at 1.2
    assert loss.tolist() == pytest.approx([0, -0.5, -1.2, -1, -2.8])
    far = columns | {"advantage": -one}
    low, _ = HapoLoss(adv_beta=0).token_loss((0.1 * one).log(), far)  # bounds 0.4 0.3 0.230103 0.2 0.2 below 1
    assert low.tolist() == pytest.approx([0.6, 0.7, 0.769897, 0.8, 0.8], abs=1e-6)
    high, _ = HapoLoss(adv_beta=0).token_loss((9 * one).log(), columns)
    assert high.tolist() == pytest.approx([-1.2, -1.2, -1.2, -1.2, -1.4])
    plain = columns | {"relative_entropy": 0 * one}
    assert torch.equal(
        HapoLoss().token_loss(ratio.log(), plain)[0], make_recipe("grpo").token_loss(ratio.log(), plain)[0]
    )


def test_aepo_standardises_entropies() -> None:
    z = standardised(np.array([0.1, 0.3, 0.5, 1.1]))
    assert (1 + 0.2 * z).tolist() == pytest.approx([0.814836, 0.907418, 1, 1.277746], abs=1e-6)
    assert standardised(np.full(3, 0.7)).tolist() == [0.0] * 3 and standardised(np.ones(1)).tolist() == [0.0]
    assert standardised(np.append(np.ones(99), 0.0)).min() == -5.0


@pytest.mark.parametrize("loss", ["oapl", "direct_advantage", "etr", "hapo"])
def test_a_loss_whose_columns_are_not_made_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match=f"loss = '{loss}': the recipe 'rloo' does not make the column"):
        recipe_of("rloo", loss=loss)


# ---- corrections, on ratios of 0.4, 0.9, 1.1 and 3 -------------------------------------------------------------------


RHO = np.array([0.4, 0.9, 1.1, 3.0])
BEHAVIOUR = np.array([-1.0, -2.0, -0.5, -3.0], np.float32)
PROXIMAL = (BEHAVIOUR + np.log(RHO)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "low", "high", "weight", "counts"),
    [
        ("tis", 0.5, 2.0, [0.4, 0.9, 1.1, 2.0], [1, 1, 1, 1]),
        ("icepop", 0.5, 5.0, [0, 0.9, 1.1, 3], [1, 1, 1, 1]),
        ("mis", 0.5, 2.0, [0, 0.9, 1.1, 0], [0, 1, 1, 0]),
    ],
)
def test_corrections(name: str, low: float, high: float, weight: list[float], counts: list[int]) -> None:
    found, counted = corrected(name, importance_ratio(PROXIMAL, BEHAVIOUR), low, high)
    assert found.tolist() == pytest.approx(weight, rel=1e-5)
    assert counted.tolist() == [bool(c) for c in counts]


def test_far_apart_is_finite() -> None:
    far = np.array([-1000.0, 0.0], np.float32)
    rho = importance_ratio(far, far[::-1].copy())
    weight, _ = corrected("mis", rho, 0.5, 2.0)
    assert np.isfinite(weight).all() and weight.tolist() == [0, 0]


def test_bounds_that_exclude_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"correction_low = 1\.5 and correction_high = 2\.0 must lie"):
        make_recipe({"correction": "mis", "correction_low": 1.5})


@pytest.mark.parametrize(
    ("parameters", "bounds"),
    [
        ({"correction": "icepop"}, (0.5, 5.0)),  # arXiv 2510.18855
        ({"correction": "icepop", "correction_high": 2.0}, (0.5, 2.0)),
        ({"correction": "mis"}, (0.5, 2.0)),
        ({"correction": "tis"}, (0.5, 2.0)),
    ],
)
def test_bounds_are_as_published(parameters: dict[str, Any], bounds: tuple[float, float]) -> None:
    recipe = make_recipe(parameters)
    again = make_recipe(recipe.model_dump())
    for one in (recipe, again):
        assert (one.correction_low, one.correction_high) == bounds  # type: ignore[attr-defined]


@pytest.mark.parametrize(("level", "expected"), [("sequence", 1.188), ("geometric", 1.044009)])
def test_levels_above_tokens(level: Any, expected: float) -> None:
    """The product 0.4 x 0.9 x 1.1 x 3, and its fourth root; the other sequence has one token of ratio 3."""
    behaviour, proximal = np.append(BEHAVIOUR, BEHAVIOUR[3]), np.append(PROXIMAL, PROXIMAL[3])
    rho = importance_ratio(proximal, behaviour, np.array([0, 0, 0, 0, 1], np.int32), level)
    assert rho.tolist() == pytest.approx([expected] * 4 + [3.0], rel=1e-5)
    far = np.full(3, 15.0, np.float32)
    assert np.isfinite(importance_ratio(far, -far, np.zeros(3, np.int32), level)).all()


def test_a_veto_is_about_sequences() -> None:
    assert vetoed(RHO, np.array([0, 0, 1, 1], np.int32), 0.5).tolist() == [True, True, False, False]


def of_batch(**parameters: object) -> tuple[list[float], dict[str, float]]:
    """The advantages of two episodes of two tokens, whose ratios are 0.4, 0.9 and 1.1, 3."""
    batch = make_batch([[1, 0]])
    proximal = (batch.forest["logprob"] + np.log(RHO)).astype(np.float32)
    forest, metrics = recipe_of("rloo", **parameters).columns(batch, {"proximal": proximal})
    return forest["advantage"].tolist(), metrics


def test_corrections_of_a_batch() -> None:
    """Products 0.36 and 3.3, geometric means 0.6 and 1.816590."""
    found, _ = of_batch(correction="tis", correction_level="sequence")
    assert found == pytest.approx([0.36, 0.36, -2, -2])
    found, _ = of_batch(correction="icepop", correction_level="sequence", correction_high=4.0)
    assert found == pytest.approx([0, 0, -3.3, -3.3])
    found, _ = of_batch(correction="mis", correction_level="geometric", correction_low=0.7)
    assert found == pytest.approx([-1.816590] * 2)
    found, metrics = of_batch(correction="tis", correction_veto=0.5)
    assert found == pytest.approx([-1.1, -2.0]) and metrics["policy/correction_dropped"] == 0.5
    found, _ = of_batch(correction="tis", correction_high=1.0)  # DART
    assert found == pytest.approx([0.4, 0.9, -1, -1])


def test_a_veto_needs_a_correction() -> None:
    with pytest.raises(ValueError, match=r"correction_veto = 0\.1 needs a correction"):
        make_recipe({"correction_veto": 0.1})
    with pytest.raises(ValueError, match=r"correction_high = 1\.0 must lie"):
        make_recipe({"correction": "mis", "correction_high": 1.0})
