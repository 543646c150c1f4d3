"""The forest's gradient equals that of one row per call, for every loss, aggregation and architecture. Pinned here:

1. in float64 to 1e-9, against the model's own `eager` attention, row by row, with the loss written out by hand;
2. in float32 its error is at most three times that of the baseline, measured in two ways: against the float64
   gradient; and, except for the KL term, against a permutation of the baseline's rows, which hardly changes the
   reference's log-probabilities;
3. micro-batches, and skipped branches without advantage, change nothing;
4. the same for tokens that were chosen from sets; a token without an alternative has no gradient;
5. a forest keeps less for its backward pass than its rows keep.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import Row, build_forest, call_row, encode_set
from tests.compute.architectures import make_architecture
from tests.compute.baseline import (
    Baseline,
    Double,
    Weights,
    another_reference,
    episodes,
    learner_gradient,
    relative,
)
from tests.compute.conftest import bytes_kept, make_policy, tokens

LOSSES = ("clip", "gspo", "cispo")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
KL = (0.0, 0.1)
KINDS = ("llama", "qwen3", pytest.param("gemma", marks=pytest.mark.thorough), "gemma3")
"""Gemma 3 has all that Gemma changes."""
EVEN = [
    (loss, aggregation, KL[(i + j) % 2]) for i, loss in enumerate(LOSSES) for j, aggregation in enumerate(AGGREGATIONS)
]
"""Every pair of a loss and an aggregation, and every one of both with and without the KL term."""
COMBINATIONS = [
    combination if combination in EVEN else pytest.param(*combination, marks=pytest.mark.thorough)
    for combination in itertools.product(LOSSES, AGGREGATIONS, KL)
]
SETS = [("clip", 0.1), ("gspo", 0.0), ("cispo", 0.1)]
"""Each loss once, with or without the KL term, for tokens that were chosen from sets."""
COMBINATIONS_OF_SETS = [
    combination if combination in SETS else pytest.param(*combination, marks=pytest.mark.thorough)
    for combination in itertools.product(LOSSES, KL)
]
PERMUTATIONS = 4


@dataclass(frozen=True)
class Case:
    """A policy, a batch, a reference for the KL term, and the baseline."""

    policy: Policy
    rows: list[Row]
    reference: Weights
    baseline: Baseline
    shuffled: list[Baseline] = field(default_factory=list)


def recipe(loss: str, aggregation: str, kl: float) -> PolicyGradient:
    # GSPO's own bounds would clip nearly every sequence of this noise.
    bounds = {"name": loss, "clip_low": 0.2, "clip_high": 0.2}
    found = make_recipe(
        {
            "loss": bounds | ({"dual_clip": 1.3} if kl and loss == "clip" else {}),
            "aggregation": aggregation,
            "constant": 7 if aggregation == "constant" else 0,
            "kl_coef": kl,
        }
    )
    assert isinstance(found, PolicyGradient)
    return found


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def single(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """In float32, with baselines of permuted rows."""
    policy = make_policy(make_architecture(tmp_path_factory.mktemp(kind) / kind, kind))
    assert policy.info.shares_prefixes
    rows, reference = episodes(policy), another_reference(policy)

    def baseline(order: Sequence[int]) -> Baseline:
        return Baseline(policy, [rows[i] for i in order], reference, together=True)

    orders = [np.random.default_rng(seed).permutation(len(rows)).tolist() for seed in range(PERMUTATIONS)]
    return Case(policy, rows, reference, baseline(range(len(rows))), [baseline(order) for order in orders])


@pytest.fixture(scope="module")
def double(kind: str, single: Case, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same batch in float64."""
    policy = make_policy(make_architecture(tmp_path_factory.mktemp(kind) / "double", kind))
    policy.model.double()
    reference = {name: value.double() for name, value in single.reference.items()}
    with Double():
        return Case(policy, single.rows, reference, Baseline(policy, single.rows, reference))


@pytest.fixture(scope="module")
def restricted(double: Case) -> Case:
    """Another batch in float64, whose tokens were chosen among sets."""
    with Double():
        rows = episodes(double.policy, restricted=True)
        return dataclasses.replace(double, rows=rows, baseline=Baseline(double.policy, rows, double.reference))


@pytest.mark.parametrize(("loss", "aggregation", "kl"), COMBINATIONS)
def test_in_float64_the_gradients_are_equal(double: Case, loss: str, aggregation: str, kl: float) -> None:
    chosen = recipe(loss, aggregation, kl)
    forest = build_forest(double.rows)
    assert forest.tree_token_ratio > 2
    assert len(np.unique(forest.node)) < forest.num_targets, "no two calls sampled the same token in one context"
    with Double():
        ours = learner_gradient(double.policy, forest, chosen, double.reference)
        assert relative(ours, double.baseline.gradient(chosen)) <= 1e-9


@pytest.mark.parametrize(("loss", "aggregation", "kl"), COMBINATIONS)
def test_in_float32_the_error_is_that_of_the_baseline(
    single: Case, double: Case, loss: str, aggregation: str, kl: float
) -> None:
    chosen = recipe(loss, aggregation, kl)
    ours = learner_gradient(single.policy, build_forest(single.rows), chosen, single.reference)
    plain = single.baseline.gradient(chosen)
    if not kl:
        permuting = max(relative(shuffled.gradient(chosen), plain) for shuffled in single.shuffled)
        assert 0 < relative(ours, plain) <= 3 * permuting
    with Double():
        truth = double.baseline.gradient(chosen)
    assert relative(ours, truth) <= 3 * relative(plain, truth)


def test_the_comparison_would_see_a_wrong_context(double: Case) -> None:
    """One prompt token of one call changed: far above the bound."""
    chosen = recipe("clip", "token_mean", 0.0)
    changed = double.rows[3].tokens.copy()
    changed[2] += 1
    wrong = [dataclasses.replace(row, tokens=changed) if i == 3 else row for i, row in enumerate(double.rows)]
    with Double():
        ours = learner_gradient(double.policy, build_forest(wrong), chosen, double.reference)
        assert relative(ours, double.baseline.gradient(chosen)) > 1e-4


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_change_nothing(double: Case, loss: str) -> None:
    chosen = recipe(loss, "sequence_mean", 0.1)
    with Double():
        cut = learner_gradient(
            double.policy, build_forest(double.rows), chosen, double.reference, micro_batch_tokens=50
        )
        assert relative(cut, double.baseline.gradient(chosen)) <= 1e-9


@pytest.mark.parametrize("loss", ("clip", "gspo_token", "cispo"))
def test_branches_without_advantage_are_not_computed_and_change_nothing(double: Case, loss: str) -> None:
    # The second call of sequence 0 is quiet, too, but its tokens count in the mean over the sequence.
    assert double.rows[0]["sequence"] == double.rows[1]["sequence"] == 0
    quiet = [
        row if row["sequence"] < 3 and i != 1 else row.with_columns(advantage=0.0) for i, row in enumerate(double.rows)
    ]
    chosen = recipe(loss, "sequence_mean", 0.0)
    with Double():
        ours = learner_gradient(double.policy, build_forest(quiet), chosen, double.reference)
        baseline = Baseline(double.policy, quiet, double.reference)
        assert relative(ours, baseline.gradient(chosen)) <= 1e-9


@pytest.mark.parametrize(("loss", "kl"), COMBINATIONS_OF_SETS)
def test_restricted_tokens_have_the_gradient_of_the_restricted_softmax(restricted: Case, loss: str, kl: float) -> None:
    """Each row's distributions are over the members of its tokens' sets only; the reference's, too."""
    chosen = recipe(loss, "sequence_mean", kl)
    policy, rows, reference = restricted.policy, restricted.rows, restricted.reference
    with Double():
        truth = restricted.baseline.gradient(chosen)
        forest = build_forest(rows)
        assert relative(learner_gradient(policy, forest, chosen, reference), truth) <= 1e-9
        cut = learner_gradient(policy, forest, chosen, reference, micro_batch_tokens=50)
        assert relative(cut, truth) <= 1e-9
        free = build_forest([dataclasses.replace(row, support=()) for row in rows])
        assert relative(learner_gradient(policy, free, chosen, reference), truth) > 1e-3, "the sets make no difference"


def test_a_token_without_an_alternative_counts_and_has_no_gradient(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    prompt, completion = tokens(1, 9), tokens(2, 3)
    alone = tuple(encode_set(np.arange(policy.vocabulary) == token) for token in completion)
    forced = call_row(np.concatenate([prompt, completion]), np.zeros(3, np.float32), np.zeros(3, np.int32), 1.0, 0.7, 0)
    free = call_row(
        np.concatenate([prompt, tokens(3, 3)]), np.full(3, -5.0, np.float32), forced["version"], -1.0, 1.0, 1
    )
    mixed = build_forest([dataclasses.replace(forced, support=alone), free])
    learner = PolicyLearner(policy)
    assert learner.logprobs(mixed)[:3].tolist() == [0.0] * 3
    chosen, reference = recipe("cispo", "token_mean", 0.1), another_reference(policy)
    both = learner_gradient(policy, mixed, chosen, reference)
    # The mean is over six tokens, of which three have no gradient.
    assert relative(2 * both, learner_gradient(policy, build_forest([free]), chosen, reference)) < 1e-6


def test_a_forest_keeps_less_for_its_backward_pass_than_its_rows(tiny_folder: Path) -> None:
    """Two timelines side by side, a long one alone, and many short ones: bytes that autograd holds at the peak."""
    policy = make_policy(tiny_folder)
    learner = PolicyLearner(policy)
    trunk = tokens(1, 1200)
    shapes = {
        "long trunk": [np.concatenate([trunk, tokens(i, 20)]) for i in range(2, 10)],
        "a single row": [trunk],
        "nothing shared": [np.concatenate([[5 + i], tokens(i, 60)]).astype(np.int32) for i in range(20)],
    }
    for name, sequences in shapes.items():
        rows = [
            call_row(s.astype(np.int32), np.zeros(4, np.float32), np.zeros(4, np.int32), 1.0, 1.0, i)
            for i, s in enumerate(sequences)
        ]
        forest, *alone = (build_forest(own) for own in (rows, *([row] for row in rows)))
        assert bytes_kept(learner, [forest]) <= 1.01 * bytes_kept(learner, alone), name
