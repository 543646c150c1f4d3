"""Recipes with values or state, against numbers worked out by hand. `steps` are in the order of sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentjet.recipes.critic import explained_variance, gae, steps
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import build_forest
from tests.recipes.batches import make_batch, recipe_of


def with_values(batch: TrainingBatch, **columns: list[float]) -> TrainingBatch:
    """The batch as the learner gives it to `columns`."""
    forest = batch.forest.with_columns(**{name: np.array(values) for name, values in columns.items()})
    return replace(batch, forest=forest)


def test_advantages_skip_observations() -> None:
    batch = with_values(make_batch([[1.0]], calls=[[1, 2]]), value=[0.5, 0.6, 0.8])
    found = recipe_of("ppo").estimates(batch)["return"]
    assert found.tolist() == pytest.approx([0.9705, 0.99, 1.0])  # advantages 0.4705 0.39 0.2
    whole = recipe_of("ppo", lam=1.0).estimates(batch)["return"]
    assert whole.tolist() == pytest.approx([1.0, 1.0, 1.0])
    forest, metrics = recipe_of("ppo").columns(batch, {})
    assert forest["advantage"].mean() == pytest.approx(0, abs=1e-6)
    assert np.std(forest["advantage"], ddof=1) == pytest.approx(1, abs=1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(explained_variance(batch.forest["value"], found))


def test_advantages_of_ppo_are_whitened() -> None:
    """Advantages 1 2 3 6: mean 3, variance 14 / 3."""
    batch = with_values(make_batch([[1.0, 2.0, 3.0, 6.0]], calls=[[1]] * 4), value=[0.0] * 4)
    advantage = recipe_of("ppo").columns(batch, {})[0]["advantage"]
    assert advantage.tolist() == pytest.approx([-0.925820, -0.462910, 0, 1.388730], abs=1e-6)


def test_vapo_has_a_lambda_for_the_policy_and_one_for_values() -> None:
    """alpha = 1: lambda is 1/2 for two tokens, and 0 for one. d: 0.2, 0.4 and 0.7."""
    batch = with_values(make_batch([[1.0, 0.0]], calls=[[2], [1]]), value=[0.4, 0.6, -0.7])
    vapo = recipe_of("vapo", alpha=1.0, warm_up=1)
    found = vapo.estimates(batch)
    assert found["gae"].tolist() == pytest.approx([0.4, 0.4, 0.7]) and found["return"].tolist() == [1, 1, 0]
    assert vapo.estimates(batch)["return"].tolist() == recipe_of("ppo", lam=1).estimates(batch)["return"].tolist()
    assert recipe_of("vapo", alpha=0.4).estimates(batch)["gae"].tolist() == pytest.approx(
        [0.2, 0.4, 0.7]
    )  # not below 0
    first, _ = vapo.columns(batch, {})
    assert first["advantage"].tolist() == [0, 0, 0] and first["return"].tolist() == [1, 1, 0]
    state = vapo.next_state({}, {})
    later, _ = vapo.columns(replace(batch, state=state), {})
    assert later["advantage"].tolist() == pytest.approx([-0.577350, -0.577350, 1.154701], abs=1e-5)  # 0.5, 0.173205
    assert vapo.next_state(state, {}) == {"batches": 2} and vapo.value_heads.body_coef == 0


def test_values_do_not_learn_from_truncated_episodes_that_are_dropped() -> None:
    batch = with_values(make_batch([[1.0, 0.0]], calls=[[2], [1, 1]]), value=[0.4, 0.6, -0.7, 0.1])
    cut = replace(batch, facts=replace(batch.facts, call_truncated=np.array([False, True, False])))
    forest, _ = recipe_of("ppo", drop_truncated=True).columns(cut, {})
    assert forest["call"].tolist() == [0, 0] and forest["return"].tolist() == pytest.approx([0.98, 1.0])
    assert recipe_of("direct_advantage", drop_truncated=True, min_advantage=0).columns(
        cut, {"reference": np.zeros(4, np.float32)}
    )[0]["call"].tolist() == [0, 0]


def test_rewards_come_at_the_ends_of_calls_and_sequences() -> None:
    batch = make_batch([[1.0, 2.0]], calls=[[2, 1], [1]], turn_rewards=[[0.5, 0.25], [0.0]])
    found = steps(batch)
    assert found.rewards.tolist() == [0, 0.5, 1.25, 2.0]
    assert found.sequence.tolist() == [0, 0, 0, 1]
    assert found.starts.tolist() == [0, 2, 3] and found.ends.tolist() == [1, 2, 3]
    backwards = replace(batch, facts=replace(batch.facts, call_turn=np.array([1, 0, 0], np.int32)))
    assert steps(backwards).order.tolist() == [2, 0, 1, 3]
    named = make_batch([[1.0, 2.0]], calls=[[2, 1], [1]], turn_rewards=[[0.5, 0.25], [0.0]], named=[3, 7])
    assert steps(named).rewards.tolist() == [0, 0.5, 3.25, 7.0]


@pytest.mark.parametrize("name", ["ppo", "vapo", "archer", "digirl"])
def test_a_role_without_a_reward_among_named_ones_is_not_trained(name: str) -> None:
    batch = with_values(make_batch([[1.0, 2.0, 2.0]], calls=[[1, 1], [2], [2]]), value=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    named = replace(batch, facts=replace(batch.facts, role_rewards=np.array([[7.0], [np.nan], [5.0]])))
    recipe = recipe_of(name)
    forest, _ = recipe.columns(named, {})
    assert forest["call"].tolist() == [0, 1, 3, 3]
    alone = with_values(make_batch([[7.0, 5.0]], calls=[[1, 1], [2]]), value=[0.1, 0.2, 0.5, 0.6])
    assert forest["advantage"].tolist() == recipe.columns(alone, {})[0]["advantage"].tolist()
    nothing = replace(batch, facts=replace(batch.facts, groups=np.zeros(3, np.int32)))
    assert recipe.columns(nothing, {})[0].num_targets == 6


def test_sequences_of_different_lengths_are_computed_together() -> None:
    rewards, values = np.array([0.0, 1.0, 0.0, 0.0, 1.0]), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    sequence = np.array([0, 0, 1, 1, 1])
    together = gae(rewards, values, sequence, 0.9, 0.8)
    parts = [gae(rewards[own], values[own], sequence[own], 0.9, 0.8) for own in (slice(0, 2), slice(2, 5))]
    assert together.tolist() == np.concatenate(parts).tolist()
    assert together[-1] == 0.5 and together[-2] == pytest.approx(0.9 * 0.5 - 0.4 + 0.9 * 0.8 * 0.5)


@pytest.mark.parametrize(("value", "loss"), [(1.2, 0.02), (2.0, 0.5)])
def test_the_clipped_value_loss(value: float, loss: float) -> None:
    columns = {"new_value": torch.tensor([value]), "value": torch.tensor([0.5]), "return": torch.tensor([1.0])}
    assert float(recipe_of("ppo").value_loss(columns)) == pytest.approx(loss)


def test_archer_by_hand() -> None:
    batch = with_values(make_batch([[1.0]], calls=[[2, 2]]), value=[0.5, 9, 0.6, 9])
    one_step = recipe_of("archer", lam=0.0).estimates(batch)
    assert one_step["return"].tolist() == pytest.approx([0.57, 0, 1.0, 0])  # 0.95 x 0.6, and the reward
    assert one_step["utterance_advantage"].tolist() == pytest.approx([0.07, 0.07, 0.4, 0.4])
    three = with_values(make_batch([[1.0]], calls=[[1, 1, 1]]), value=[0, 0, 0])
    assert recipe_of("archer", lam=1.0).estimates(three)["return"].tolist() == pytest.approx([0.9025, 0.95, 1])
    columns = {"is_start": [1.0, 0.0], "new_value": [0.5, 3.0], "return": [0.7, 0.0]}
    tensors = {name: torch.tensor(numbers) for name, numbers in columns.items()}
    assert recipe_of("archer").value_loss(tensors).tolist() == pytest.approx([0.04, 0])


@pytest.mark.parametrize(
    ("after", "before", "reward", "chosen"),
    [(0.7, 0.6, 0, 1), (0.62, 0.6, 0, 0), (0.3, 0.6, 1, 1)],  # A = 0.05, -0.03, 0.3 - 0.6 - 0.05 + 0.5 = 0.15
)
def test_digirl_by_hand(after: float, before: float, reward: float, chosen: int) -> None:
    logits = [math.log(p / (1 - p)) for p in (before, before, after)]
    batch = with_values(make_batch([[reward]], calls=[[2, 1]]), value=logits)
    found = recipe_of("digirl").estimates(batch)
    assert found["chosen"].tolist() == [chosen, chosen, reward]
    assert found["succeeds"].tolist() == [reward, 0, reward] and found["is_start"].tolist() == [1, 0, 1]


def test_digirls_critic_is_a_classifier() -> None:
    columns = {"new_value": [0.0, 2.0, 2.0], "succeeds": [1.0, 1.0, 0.0], "is_start": [1.0, 1.0, 1.0]}
    tensors = {name: torch.tensor(numbers) for name, numbers in columns.items()}
    assert recipe_of("digirl").value_loss(tensors).tolist() == pytest.approx([0.693147, 0.126928, 2.126928], abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "vapo", "archer", "digirl"])
def test_one_token_and_none(name: str) -> None:
    recipe = recipe_of(name)
    batch = with_values(make_batch([[1.0]], calls=[[1]]), value=[0.0])
    assert np.isfinite(recipe.columns(batch, {})[0]["advantage"]).all()
    assert recipe.columns(replace(batch, forest=build_forest([])), {})[0].num_targets == 0


def test_the_weight_of_the_adaptive_penalty() -> None:
    recipe = make_recipe("adaptive_kl")
    metrics = {"policy/kl_coef": 0.001, "policy/kl_sequences": 256.0, "policy/kl": 0.2}
    assert recipe.next_state({}, metrics)["kl_coef"] == pytest.approx(0.00100512)  # 0.001 (1 + 0.2 x 256 / 10000)
    assert recipe.next_state({}, metrics | {"policy/kl": 0.09})["kl_coef"] == pytest.approx(0.00099744)
    many = metrics | {"policy/kl": 0.0, "policy/kl_sequences": 1e6}
    assert recipe.next_state({}, many)["kl_coef"] == pytest.approx(0.0008), "never negative"
    del metrics["policy/kl"]
    assert recipe.next_state({}, metrics) == {"kl_coef": 0.001}, "a batch without tokens"
    batch = replace(make_batch([[1, 0]]), state={"kl_coef": 0.25})
    forest, reported = recipe.columns(batch, {})
    assert set(forest["kl_coef"].tolist()) == {0.25} and reported["policy/kl_coef"] == 0.25
    columns = {"logprob": -1.5, "advantage": 0.0, "reference": -1.5, "kl_coef": 0.25}
    tensors = {name: torch.tensor([number]) for name, number in columns.items()}
    loss, _ = recipe.token_loss(torch.tensor([-1.0], requires_grad=True), tensors)
    assert float(loss.detach()) == pytest.approx(0.25 * 0.1065307, abs=1e-7)
