"""The gradient of every built-in policy loss equals that of one row per call in float64, to 1e-9.

The recipe makes its columns from the facts of a batch. The baseline takes these as numbers, and computes
log-probabilities, losses, weights and gradients without code of `recipes/` and of the learner. `test_gradients` has
more of three losses: architectures, aggregations, float32. `sft` and `dpo` are compared with their losses over whole
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import Recipe
from agentjet.recipes.registry import built_in, find, make_recipe
from agentjet.timeline.batch import Facts, TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, call_row
from tests.compute.architectures import make_architecture
from tests.compute.baseline import Double, Weights, another_reference, episodes, relative, row_entropies, row_logprobs
from tests.compute.conftest import make_policy, tokens
from tests.compute.formulas import FORMULAS, of_sequence
from tests.recipes.batches import make_batch

EPISODES, ROLES = 6, 2
PLAIN = {
    name: recipe.loss.name
    for name in built_in()
    if issubclass(find(name), PolicyGradient)
    and isinstance(recipe := make_recipe(name), PolicyGradient)
    and "reference" not in recipe.reads
    and not {"new_entropy", "new_top", "teacher"} & {*recipe.reads}
    and not recipe.value_heads
}
"""The loss of each recipe that adds nothing to it."""
LOSSES = {loss: loss if PLAIN.get(loss) == loss else name for name, loss in reversed(PLAIN.items())}
"""A recipe with each loss: that of the same name, or the first."""


@dataclass(frozen=True)
class Case:
    """A policy and a batch with facts; log-probabilities and entropies [M], with gradient; those of the reference."""

    policy: Policy
    batch: TrainingBatch
    reference: Weights
    logp: Tensor
    entropy: Tensor
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
        with torch.no_grad():
            of_reference = torch.cat([row_logprobs(policy, row, reference) for row in rows])
        logp = torch.cat([row_logprobs(policy, row) for row in rows])
        entropy = torch.cat([row_entropies(policy, row) for row in rows])
        yield Case(policy, TrainingBatch(0, forest, facts_of()), reference, logp, entropy, of_reference)


def facts_of() -> Facts:
    """Rewards of two groups of three episodes of two roles, in the order of the calls of `episodes`."""
    rng = np.random.default_rng(1)
    made = make_batch(
        rng.normal(size=(2, 3)).tolist(), calls=[[1, 1, 1]] * EPISODES, turn_rewards=rng.normal(size=(6, 3))
    )
    return replace(
        made.facts,
        roles=("", "other"),
        role_rewards=np.full((EPISODES, ROLES), np.nan),
        spoke=np.ones((EPISODES, ROLES), bool),
        call_role=np.array([0, 0, 1] * EPISODES, np.int32),
        call_turn=np.array([0, 1, 0] * EPISODES, np.int32),
        tasks=tuple(("", f"t{episode // 3}") for episode in range(EPISODES)),
    )


def learner_gradient(
    policy: Policy, batch: TrainingBatch, recipe: Recipe, reference: Weights, micro_batch_tokens: int
) -> tuple[Forest, Tensor, dict[str, float]]:
    """The forest with the recipe's columns, the flat gradient of the learner, and its metrics."""
    learner = PolicyLearner(policy)
    learner._reference = reference
    loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=micro_batch_tokens))
    forest = learner._prepare(batch, loss).forest
    metrics = dict(learner.forward_backward(batch, loss).metrics)
    gradient = flat(master.grad for master in learner.masters())
    for master in learner.masters():
        master.grad = None
    return forest, gradient, metrics


def flat(gradients: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([one.detach().flatten() for one in gradients if one is not None])


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
    if recipe.entropy_coef:
        losses = losses - recipe.entropy_coef * case.entropy[kept]
    total = (losses * weights(recipe.loss.aggregation, sequence)).sum()
    return flat(torch.autograd.grad(total, list(case.policy.trainable().values()), retain_graph=True))


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


OF_LOSSES: Mapping[str, Mapping[str, Any]] = {
    "clip_cov": {"loss": {"lowest": 0.0, "share": 0.2}},
    "dppo": {"loss": {"clip_low": 1e-4, "clip_high": 1e-4}},
    "kl_cov": {"loss": {"share": 0.2}},
    "rft": {"threshold": 0.0},
}
"""Parameters with which some tokens are in each case of the formula."""


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients(case: Case, loss: str, kl: float) -> None:
    own = OF_LOSSES.get(loss, {})
    recipe = make_recipe({"name": LOSSES[loss], "epochs": 1, "mini_batches": 1, "kl_coef": kl, **own})
    assert isinstance(recipe, PolicyGradient) and recipe.loss.name == loss
    with Double():
        forest, ours, _ = learner_gradient(case.policy, case.batch, recipe, case.reference, 100_000)
        truth = baseline_gradient(case, recipe, forest)
        _, cut, _ = learner_gradient(case.policy, case.batch, recipe, case.reference, 50)
        assert float(truth.norm()) > 0 and truth.dtype == torch.float64
        assert max(relative(ours, truth), relative(cut, truth)) <= 1e-9


class Sums(PolicyLoss):
    """Any function of all tokens: the sum of the squared sums of sequences, and the entropy of the batch squared."""

    name: str = "sums"
    reads: ClassVar[tuple[str, ...]] = ("logprob", "advantage", "sequence", "new_entropy")
    reports: ClassVar[tuple[str, ...]] = ()

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = of_sequence(logp - columns["logprob"], columns)
        return ratio.square() * columns["advantage"] + columns["new_entropy"].mean().square(), {}


@pytest.mark.parametrize("micro_batch_tokens", [50, 100_000])
@pytest.mark.parametrize("parameters", [{"entropy_coef": 0.3}, {"loss": "gspo", "entropy_coef": -0.3}, {}], ids=str)
def test_entropies_have_a_gradient(case: Case, parameters: dict[str, Any], micro_batch_tokens: int) -> None:
    recipe = Grpo(**parameters) if parameters else Grpo(loss=Sums())
    with Double():
        forest, ours, _ = learner_gradient(case.policy, case.batch, recipe, case.reference, micro_batch_tokens)
        if parameters:
            truth = baseline_gradient(case, recipe, forest)
        else:
            columns = {name: torch.from_numpy(forest[name]).double() for name in ("logprob", "advantage")}
            columns |= {"sequence": torch.from_numpy(forest["sequence"].astype(np.int64)), "new_entropy": case.entropy}
            loss = (Sums().batch_loss(case.logp, columns)[0] * weights("token_mean", columns["sequence"])).sum()
            truth = flat(torch.autograd.grad(loss, list(case.policy.trainable().values()), retain_graph=True))
        assert relative(ours, truth) <= 1e-9


@pytest.mark.parametrize(
    "parameters",
    [
        {"name": "stepwise_grpo", "keep": 0.5},
        {"name": "gigpo"},
        {"name": "graph_gpo"},
        {"name": "dense_turn_credit"},
        {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "correction": "tis", "correction_level": "sequence"},
    ],
    ids=lambda parameters: parameters["name"],
)
def test_recipes_whose_columns_need_facts_have_a_gradient(case: Case, parameters: dict[str, object]) -> None:
    recipe = make_recipe(parameters)
    with Double():
        _, gradient, metrics = learner_gradient(case.policy, case.batch, recipe, case.reference, 100_000)
    assert np.isfinite(list(metrics.values())).all() and float(gradient.norm()) > 0


GROUPS = [[1.0, 0.2, 0.9], [0.0, 1.0]]
SIZE = 4
PAIRS = {"best_worst": [(0, 1), (4, 3)], "all": [(0, 1), (0, 2), (2, 1), (4, 3)]}


def made_rows() -> list[Row]:
    """An answer to its group's prompt for each episode, without log-probabilities, as demonstrations have it."""
    groups = [group for group, rewards in enumerate(GROUPS) for _ in rewards]
    unknown, versions = np.full(SIZE, np.nan, np.float32), np.zeros(SIZE, np.int32)
    return [
        call_row(np.concatenate([tokens(group, 6), tokens(10 + e, SIZE)]), unknown, versions, None, 1.0, e, call=e)
        for e, group in enumerate(groups)
    ]


def demonstrated(rows: Sequence[Row]) -> TrainingBatch:
    return TrainingBatch(0, build_forest(rows), make_batch(GROUPS, calls=[[SIZE]] * len(rows)).facts)


@pytest.mark.parametrize("budget", [100_000, 16])
def test_sft(case: Case, budget: int) -> None:
    policy, rows = case.policy, made_rows()
    with Double():
        _, ours, metrics = learner_gradient(policy, demonstrated(rows), make_recipe("sft"), {}, budget)
        loss = -torch.cat([row_logprobs(policy, row) for row in rows]).mean()
        expected = flat(torch.autograd.grad(loss, list(policy.trainable().values())))
    assert relative(ours, expected) <= 1e-7  # the weight of a token is stored in float32
    assert metrics["policy/cross_entropy"] == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("budget", [100_000, 16])
@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_dpo(case: Case, pairs: str, budget: int) -> None:
    policy, rows, reference = case.policy, made_rows(), case.reference
    recipe = make_recipe({"name": "dpo", "pairs": pairs, "beta": 0.5})
    with Double():
        _, ours, metrics = learner_gradient(policy, demonstrated(rows), recipe, reference, budget)
        sums = [row_logprobs(policy, row).sum() for row in rows]
        with torch.no_grad():
            others = [row_logprobs(policy, row, reference).sum() for row in rows]
        ratios = [own - other for own, other in zip(sums, others, strict=True)]
        losses = [-torch.nn.functional.logsigmoid(0.5 * (ratios[w] - ratios[x])) for w, x in PAIRS[pairs]]
        loss = torch.stack(losses).mean()
        expected = flat(torch.autograd.grad(loss, list(policy.trainable().values())))
    assert relative(ours, expected) <= 1e-6  # log-probabilities of a batch are stored in float32
    assert metrics["dpo/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["dpo/pairs"] == len(PAIRS[pairs])
