"""1. What a digit is.
2. The whole run: the lock never opens with the default recipe, and nearly always with turn rewards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentjet.config import load_config
from examples.combination_lock.agent import is_right
from examples.combination_lock.train import RECIPES, SETTINGS, ends, main


def test_a_wheel_is_right_if_it_shows_a_digit() -> None:
    assert [is_right(text) for text in ("7", "a", "", "7a", "²")] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_shipped_settings_load() -> None:
    for recipe in RECIPES:
        assert load_config(SETTINGS, [f"job.recipe={recipe}"]).job.recipe.name == recipe


@pytest.mark.e2e
@pytest.mark.thorough
def test_turn_rewards_open_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "lock"
    result = main(["--out", str(out)])
    assert json.loads((out / "result.json").read_text()) == result
    assert ends(result["grpo"]["opened"]) == (0.0, 0.0)
    assert ends(result["mars"]["opened"])[1] > 0.5, result
