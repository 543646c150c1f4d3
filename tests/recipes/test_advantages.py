"""Pins the advantages: golden numbers worked out by hand, and what holds for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe

ESTIMATORS = ("grpo", "dr_grpo", "rloo")
REWARDS = st.lists(st.integers(-50, 50).map(lambda n: n / 10), min_size=1, max_size=12)


def advantages(name: str, rewards_G: np.ndarray) -> np.ndarray:
    recipe = make_recipe(name)
    assert isinstance(recipe, PolicyGradient)
    return recipe.group_advantages(rewards_G)


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ("grpo", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo", [0.2, 0.8, 0.5], [-0.45, 0.45, 0]),
    ],
)
def test_golden_numbers(name: str, rewards: list[float], expected: list[float]) -> None:
    assert advantages(name, np.asarray(rewards, np.float64)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[0.7], [0.5, 0.5, 0.5], [0.1] * 7])
def test_nobody_to_differ_from_teaches_exactly_nothing(name: str, rewards: list[float]) -> None:
    assert advantages(name, np.asarray(rewards, np.float64)).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(rewards=REWARDS, shift=st.integers(-20, 20), seed=st.integers(0, 99))
def test_only_differences_count_and_order_does_not(name: str, rewards: list[float], shift: int, seed: int) -> None:
    rewards_G = np.asarray(rewards, np.float64)
    advantages_G = advantages(name, rewards_G)
    order = np.random.default_rng(seed).permutation(len(rewards))
    assert np.all(np.isfinite(advantages_G))
    assert advantages(name, rewards_G + shift) == pytest.approx(advantages_G, abs=1e-6)
    assert advantages(name, rewards_G[order]) == pytest.approx(advantages_G[order], abs=1e-9)
    assert advantages_G.sum() == pytest.approx(0, abs=1e-6)
    better = np.subtract.outer(rewards_G, rewards_G) > 0
    assert np.all(np.subtract.outer(advantages_G, advantages_G)[better] > 0)
