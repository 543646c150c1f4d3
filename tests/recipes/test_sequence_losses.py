"""Losses whose recipes make further columns, against hand arithmetic: OAPL, direct advantage, ETR and HAPO."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentjet.recipes.clipping import HapoLoss, relative, standardised
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from tests.recipes.batches import make_batch, recipe_of


def summed(name: str, log_ratios: list[list[float]], advantages: list[float]) -> tuple[list[float], list[float]]:
    """The loss of each sequence of a recipe, and its gradient in each token's log-probability, as a mean over them."""
    recipe = recipe_of(name)
    tokens = [len(ratios) for ratios in log_ratios]
    sequence = torch.repeat_interleave(torch.tensor(tokens))
    ratios = torch.tensor([ratio for own in log_ratios for ratio in own], dtype=torch.float64)
    logp = (ratios - 1).requires_grad_()
    means = torch.tensor([sum(own) / len(own) for own in log_ratios], dtype=torch.float64)
    counts = torch.tensor(tokens, dtype=torch.float64)[sequence]
    columns = {
        "sequence_log_ratio": means[sequence],
        "sequence_tokens": counts,
        "turn_tokens": counts,
        "advantage": torch.tensor(advantages, dtype=torch.float64)[sequence],
    }
    loss, _ = recipe.token_loss(logp, columns)
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
