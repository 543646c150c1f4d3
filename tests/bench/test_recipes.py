"""The bench of recipes: when a reward has risen, what counts as learned, and each part on few recipes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.learning import chosen, costs, tables
from bench.recipes import in_runs, in_tables, summary
from tests.tiny import make_model


def test_a_reward_has_risen_if_it_rose_by_more_than_the_interval() -> None:
    rising = chosen.rise([[0.0, 0.2], [0.5, 0.5], [0.5, 0.5], [0.9, 1.1]])
    # Both variances are 0.02, of two episodes each: 1.96 x sqrt(0.02)
    assert rising == {"first": 0.1, "last": 1.0, "interval": 0.2772} and chosen.has_risen(rising)
    assert not chosen.has_risen(chosen.rise([[0.0, 1.0], [0.2, 1.2]]))


def test_every_recipe_must_learn_everywhere() -> None:
    fine, flat = {"learned": True, "equal": True}, {"learned": False, "equal": False}
    parts = {"tables": {"grpo": fine, "gspo": fine}, "served": {"grpo": fine, "gspo": flat}}
    found = summary(["grpo", "gspo"], parts, {"grpo": 1.0, "gspo": 1.3})
    assert (found["recipes"], found["learned"], found["replay_equal"]) == (2, 1, False)
    assert found["worst_step_cost"] == 1.0, "gspo needs a further pass"
    assert found["costs_with_passes"] == {"gspo": [1.3, "sequence_log_ratio"]}


def test_a_recipe_learns_a_table_and_equal_seeds_give_equal_bits() -> None:
    found = in_tables("grpo", 12)
    assert found["learned"] and found["equal"], found
    recipe = chosen.chosen("grpo")
    assert tables.train(recipe, 1, seed=0)[1] != tables.train(recipe, 1, seed=1)[1]


def test_costs_are_those_of_a_step(tmp_path: Path) -> None:
    found = costs.measure(["grpo", "rloo"], make_model(tmp_path / "model"), 1)
    assert set(found) == {"grpo", "rloo"} and min(found.values()) > 0


@pytest.mark.e2e
@pytest.mark.thorough
def test_runs_of_a_server_learn_and_replay_after_a_kill(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    found = asyncio.run(in_runs(["grpo", "mars"], 20, tmp_path / "data", model))
    assert all(row["learned"] and row["equal"] for row in found.values()), found
