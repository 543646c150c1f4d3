"""DPO and supervised fine-tuning against numbers worked out by hand.

1. Pairs by margin, and best against worst; none among equal rewards.
2. The loss of log-ratios +2 and -1, and of 0 and 0.
3. The gradient equals autograd's of the loss over whole sequences.
4. Pairs without a shared prefix are left out and counted. A batch without pairs has no gradient.
5. Several optimiser steps a batch are refused.
6. KTO: losses of answers against a divergence, and the gradient of TRL's formula.
7. Demonstrations: their loss, their weights, and their job in a run of another recipe.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from agentjet.config import JobConfig
from agentjet.recipes.offline import Dpo, Kto
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Row, build_forest
from tests.recipes.batches import make_batch


def recipe_of(**parameters: object) -> Dpo:
    recipe = make_recipe({"name": "dpo", **parameters})
    assert isinstance(recipe, Dpo)
    return recipe


def shared_batch(rewards: list[float], prompts: list[int] | None = None, size: int = 2) -> TrainingBatch:
    """One group whose episodes answer one prompt with `size` tokens, or the given first tokens of prompts."""
    made = make_batch([rewards], calls=[[size]] * len(rewards))
    rows = [
        Row(
            np.array([prompt, 50 + e, *range(100, 99 + size)], np.int32),
            slice(1, 1 + size),
            {"logprob": -1.0, "version": 0, "sequence": e, "call": e, "temperature": 1.0},
        )
        for e, prompt in enumerate(prompts or [1] * len(rewards))
    ]
    return replace(made, forest=build_forest(rows))


def outputs(batch: TrainingBatch, ratios: list[float]) -> dict[str, np.ndarray]:
    """Log-probabilities whose sums over sequences differ from the reference's by `ratios`."""
    sequence = batch.forest["sequence"]
    each = np.array(ratios, np.float32)[sequence] / np.bincount(sequence)[sequence]
    reference = np.full(len(sequence), -2, np.float32)
    return {"reference": reference, "proximal": (reference + each).astype(np.float32)}


def test_pairs() -> None:
    rewards = np.array([1, 0.2, 0.9, 0.2])
    assert [*recipe_of(pairs="all", margin=0.5).pairs_of(rewards)] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    assert [*recipe_of().pairs_of(rewards)] == [(0, 1)]
    assert [*recipe_of(margin=0.9).pairs_of(rewards)] == [] == [*recipe_of(pairs="all").pairs_of(np.ones(3))]


@pytest.mark.parametrize(("ratios", "loss"), [([2, -1], 0.554355), ([0, 0], 0.693147)])
def test_the_loss_and_its_gradient(ratios: list[float], loss: float) -> None:
    recipe, batch = recipe_of(), shared_batch([1, 0])
    forest, metrics = recipe.columns(batch, outputs(batch, ratios))
    assert metrics["dpo/loss"] == pytest.approx(loss, abs=1e-6) and metrics["dpo/pairs"] == 1
    assert metrics["dpo/accuracy"] == (ratios[0] > ratios[1])
    assert metrics["dpo/margin"] == pytest.approx(0.1 * (ratios[0] - ratios[1]), abs=1e-6)
    slope = 0.1 * (1 - np.exp(-loss))  # beta * sigmoid(-margin)
    winner = forest["sequence"] == 0
    assert forest["advantage"] == pytest.approx(np.where(winner, slope, -slope), abs=1e-7)


def test_the_gradient_is_that_of_the_whole_loss() -> None:
    recipe, rewards, ratios = recipe_of(pairs="all", beta=0.5), [1.0, 0.2, 0.9, 0.2], [0.3, -0.4, 1.1, 0.2]
    batch = shared_batch(rewards, size=3)
    given = outputs(batch, ratios)
    forest, metrics = recipe.columns(batch, given)
    logp = torch.from_numpy(given["proximal"]).double().requires_grad_()
    reference, sequence = torch.from_numpy(given["reference"]).double(), torch.from_numpy(batch.forest["sequence"])
    sums = torch.zeros(4, dtype=torch.float64).index_add(0, sequence.long(), logp - reference)
    pairs = [(0, 1), (0, 2), (0, 3), (2, 1), (2, 3)]
    whole = torch.stack([-torch.nn.functional.logsigmoid(0.5 * (sums[w] - sums[x])) for w, x in pairs]).mean()
    whole.backward()  # type: ignore[no-untyped-call]
    assert metrics["dpo/loss"] == pytest.approx(float(whole.detach()), abs=1e-6)
    own = torch.from_numpy(given["proximal"]).requires_grad_()
    loss, _ = recipe.token_loss(own, {"advantage": torch.from_numpy(forest["advantage"])})
    (loss * torch.from_numpy(recipe.weights(forest))).sum().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None and logp.grad is not None
    assert own.grad.numpy() == pytest.approx(logp.grad.numpy(), abs=1e-7)


def test_pairs_need_a_shared_prefix() -> None:
    recipe, batch = recipe_of(pairs="all"), shared_batch([1, 0, 0.5], prompts=[1, 1, 9])
    forest, metrics = recipe.columns(batch, outputs(batch, [0, 0, 0]))
    assert (metrics["dpo/pairs"], metrics["dpo/pairs_unshared"]) == (1, 2)
    assert set(forest["sequence"].tolist()) == {0, 1}
    equal = shared_batch([1, 1])
    forest, metrics = recipe.columns(equal, outputs(equal, [0, 0]))
    assert forest.num_targets == 0 and metrics == {"dpo/pairs": 0, "dpo/pairs_unshared": 0}


@pytest.mark.parametrize("key", ["epochs", "mini_batches"])
def test_several_steps_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} = 2: dpo does one optimiser step"):
        recipe_of(**{key: 2})


# ---- KTO -------------------------------------------------------------------------------------------------------------

NONE = float("nan")


def answers(rewards: list[float], size: int = 2) -> TrainingBatch:
    """Given answers, each by itself. Those without a reward are mismatched."""
    return make_batch([[reward] for reward in rewards], calls=[[size]] * len(rewards))


@pytest.mark.parametrize(
    ("ratios", "parameters", "loss", "kl", "accuracy"),
    [
        ([2, -1, 0.5], {}, 0.462570, 0.5, 1),  # 1 - sigmoid(0.15), twice
        ([0, 0, 0], {}, 0.5, 0, 0),
        ([1, 1, -3], {}, 0.5, 0, 0.5),  # a divergence is not negative: sigmoid(-0.1) and sigmoid(0.1)
        ([0, 0, 0], {"good_weight": 2, "bad_weight": 0.5}, 0.625, 0, 0),
    ],
)
def test_labelled_answers(
    ratios: list[float], parameters: dict[str, float], loss: float, kl: float, accuracy: float
) -> None:
    recipe, batch = make_recipe({"name": "kto", **parameters}), answers([1, 0, NONE])
    forest, metrics = recipe.columns(batch, outputs(batch, ratios))
    assert [metrics[f"kto/{name}"] for name in ("loss", "kl", "accuracy", "margin", "answers")] == pytest.approx(
        [loss, kl, accuracy, 0.1 * (ratios[0] - ratios[1]), 2], abs=1e-6
    )
    assert {*forest["sequence"].tolist()} == {0, 1}, "mismatched answers are not learned"
    assert (forest["advantage"][forest["sequence"] == 0] > 0).all() and (forest["advantage"][-1:] < 0).all()


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_gradient_is_that_of_the_formula_of_trl(beta: float) -> None:
    rewards, ratios = [1, NONE, 0, NONE, 1, NONE], [0.3, 0.9, -0.4, -0.2, 1.5, 0.4]
    recipe, batch = make_recipe({"name": "kto", "beta": beta, "bad_weight": 1.5}), answers(rewards, size=3)
    assert isinstance(recipe, Kto)
    given = outputs(batch, ratios)
    logp = torch.from_numpy(given["proximal"]).double().requires_grad_()
    reference, sequence = torch.from_numpy(given["reference"]).double(), torch.from_numpy(batch.forest["sequence"])
    sums = torch.zeros(6, dtype=torch.float64).index_add(0, sequence.long(), logp - reference)
    kl = sums[[1, 3, 5]].mean().detach().clamp(min=0)
    chosen = 1 - torch.sigmoid(beta * (sums[[0, 4]] - kl))
    rejected = 1 - torch.sigmoid(beta * (kl - sums[[2]]))
    whole = torch.cat((1.0 * chosen, 1.5 * rejected)).mean()
    whole.backward()  # type: ignore[no-untyped-call]
    forest, metrics = recipe.columns(batch, given)
    assert metrics["kto/loss"] == pytest.approx(float(whole.detach()), abs=1e-6)
    assert logp.grad is not None
    ours = np.zeros(18)
    ours[np.isin(batch.forest["sequence"], [0, 2, 4])] = -forest["advantage"]
    assert ours == pytest.approx(logp.grad.numpy(), abs=1e-7)


def test_a_batch_of_mismatched_answers_has_no_gradient() -> None:
    batch = answers([NONE, NONE])
    forest, metrics = make_recipe("kto").columns(batch, outputs(batch, [1, 1]))
    assert forest.num_targets == 0 and metrics == {"kto/kl": 1, "kto/answers": 0}


# ---- demonstrations --------------------------------------------------------------------------------------------------


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


def test_a_request_names_the_recipe_of_demonstrations() -> None:
    job, of_dpo = JobConfig(), JobConfig.model_validate({"recipe": {"name": "dpo", "beta": 0.5}})
    assert job.for_demonstrations(recipe="dpo").recipe == make_recipe("dpo")
    assert of_dpo.for_demonstrations().recipe.name == "sft" and of_dpo.for_demonstrations(recipe="dpo") == of_dpo
    table = {"name": "kto", "beta": 0.2}
    assert of_dpo.for_demonstrations(recipe=table).recipe == make_recipe(table)
    mistyped = {"name": "dpo", "bet": 1}
    for wrong, why in (("grpo", "use sft, dpo or kto"), ("dp", "did you mean 'dpo'"), (mistyped, "bet")):
        with pytest.raises(ValueError, match=why):
            job.for_demonstrations(recipe=wrong)


def test_the_learning_rate_of_demonstrations_is_that_of_their_policy_only() -> None:
    job = JobConfig.model_validate({"optimizer": {"lr": 1e-3}, "optimizers": {"coder": {"lr": 1e-4}}})
    rates = {
        policy: [job.for_demonstrations(1e-5, policy).optimizer_of(name).lr for name in ("planner", "coder", "critic")]
        for policy in ("planner", "coder")
    }
    assert rates == {"planner": [1e-5, 1e-4, 1e-3], "coder": [1e-3, 1e-5, 1e-3]}
