"""The gradient of every built-in policy loss equals that of one row per call in float64, to 1e-9.

The recipe makes its columns from the facts of a batch. The baseline takes these as numbers, and computes
log-probabilities, losses, weights and gradients without code of `recipes/` and of the learner. `test_gradients` has
more of three losses: architectures, aggregations, float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import built_in, find, make_recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, build_forest
from tests.compute.architectures import make_architecture
from tests.compute.baseline import Double, Weights, another_reference, episodes, relative, row_logprobs
from tests.compute.conftest import make_policy
from tests.compute.formulas import FORMULAS

EPISODES, ROLES = 6, 2
PLAIN = {
    name: recipe.loss.name
    for name in built_in()
    if issubclass(find(name), PolicyGradient)
    and isinstance(recipe := make_recipe(name), PolicyGradient)
    and type(recipe).token_loss is PolicyGradient.token_loss
}
"""The loss of each recipe that adds nothing to it."""
LOSSES = {loss: loss if PLAIN.get(loss) == loss else name for name, loss in reversed(PLAIN.items())}
"""A recipe with each loss: that of the same name, or the first."""


@dataclass(frozen=True)
class Case:
    """A policy and a batch with facts; log-probabilities [M], with gradient, and those of the reference."""

    policy: Policy
    batch: TrainingBatch
    reference: Weights
    logp: Tensor
    of_reference: Tensor


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    policy = make_policy(make_architecture(tmp_path_factory.mktemp("llama") / "double", "llama"))
    policy.model.double()
    reference = {name: value.double() for name, value in another_reference(policy).items()}
    with Double():
        rows = [row.with_columns(call=number) for number, row in enumerate(episodes(policy))]
        forest = build_forest(rows)
        forest = forest.with_columns(number=np.arange(forest.num_targets))
        sequence_C = [row["sequence"] for row in rows]
        facts = facts_of(np.array(sequence_C))
        with torch.no_grad():
            of_reference = torch.cat([row_logprobs(policy, row, reference) for row in rows])
        logp = torch.cat([row_logprobs(policy, row) for row in rows])
        yield Case(policy, TrainingBatch(0, forest, facts), reference, logp, of_reference)


def facts_of(sequence_C: np.ndarray) -> Facts:
    """Rewards of two groups of three episodes of two roles, as `episodes` numbers its sequences."""
    rng = np.random.default_rng(1)
    turns = [int(np.sum(sequence_C[:call] == sequence)) for call, sequence in enumerate(sequence_C)]
    return Facts(
        groups=(np.arange(EPISODES) // 3).astype(np.int32),
        rewards=rng.normal(size=EPISODES),
        roles=("", "other"),
        role_rewards=np.full((EPISODES, ROLES), np.nan),
        spoke=np.ones((EPISODES, ROLES), bool),
        call_episode=(sequence_C % EPISODES).astype(np.int32),
        call_role=(sequence_C // EPISODES).astype(np.int32),
        call_turn=np.array(turns, np.int32),
        call_rewards=rng.normal(size=len(sequence_C)),
        call_truncated=np.zeros(len(sequence_C), bool),
        tasks=tuple(("", f"t{episode // 3}") for episode in range(EPISODES)),
        seconds=np.ones(EPISODES),
        metrics={},
        code_versions=("",) * EPISODES,
    )


def learner_gradient(case: Case, recipe: PolicyGradient, micro_batch_tokens: int) -> tuple[Forest, Tensor]:
    """The forest with the recipe's columns, and the flat gradient of the learner."""
    learner = PolicyLearner(case.policy)
    learner._reference = case.reference
    loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=micro_batch_tokens))
    forest = learner._prepare(case.batch, loss).forest
    learner.forward_backward(case.batch, loss)
    gradient = torch.cat([master.grad.flatten() for master in learner.masters()])
    learner._optimizer.zero_grad()
    return forest, gradient


def baseline_gradient(case: Case, recipe: PolicyGradient, forest: Forest) -> Tensor:
    """The flat gradient of the whole loss, from the columns as numbers."""
    kept = torch.from_numpy(forest["number"].astype(np.int64))
    logp = case.logp[kept]
    columns = {name: torch.from_numpy(forest[name]).double() for name in forest.targets}
    sequence = torch.from_numpy(forest["sequence"].astype(np.int64))
    columns["sequence"] = sequence
    ratios = logp.detach() - columns["logprob"]
    columns["mean_log_ratio"] = torch.stack([ratios[sequence == own].mean() for own in sequence])
    losses = FORMULAS[recipe.loss.name](logp, columns, recipe.loss)
    if recipe.kl_coef:
        gap = columns.get("reference", case.of_reference[kept]) - logp  # As a column it is rounded to float32.
        losses = losses + recipe.kl_coef * (gap.exp() - gap - 1)
    total = (losses * weights(recipe.loss.aggregation, sequence)).sum()
    gradients = torch.autograd.grad(total, list(case.policy.trainable().values()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def weights(aggregation: str, sequence: Tensor) -> Tensor:
    """The weight [M] of each token, rounded as weights are stored."""
    sizes = torch.stack([(sequence == own).sum() for own in sequence]).double()
    num_sequences = len(sequence.unique())
    found = {
        "token_mean": torch.full_like(sizes, 1 / len(sequence)),
        "sequence_mean": 1 / (sizes * num_sequences),
        "sequence_sum": torch.full_like(sizes, 1 / num_sequences),
    }[aggregation]
    return torch.from_numpy(found.numpy().astype(np.float32).astype(np.float64))


def test_every_loss_has_a_formula() -> None:
    assert set(LOSSES) == set(FORMULAS)


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients(case: Case, loss: str, kl: float) -> None:
    own = {"rft": {"threshold": 0.0}}.get(loss, {})
    recipe = make_recipe({"name": LOSSES[loss], "epochs": 1, "mini_batches": 1, "kl_coef": kl, **own})
    assert isinstance(recipe, PolicyGradient) and recipe.loss.name == loss
    with Double():
        forest, ours = learner_gradient(case, recipe, 100_000)
        truth = baseline_gradient(case, recipe, forest)
        _, cut = learner_gradient(case, recipe, 50)
        assert float(truth.norm()) > 0 and truth.dtype == torch.float64
        assert max(relative(ours, truth), relative(cut, truth)) <= 1e-9
