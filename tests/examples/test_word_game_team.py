"""1. The rewards, by hand.
2. The whole run on tiny models: what each of the two is rewarded for rises, with each of three seeds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentjet.config import load_config
from examples.word_game_team.agent import DESCRIBER, GUESSER, closeness, fairness, letters
from examples.word_game_team.train import SETTINGS, ends, main
from tests.tiny import make_model, set_options

STEPS = 24


def test_a_guess_is_scored_by_its_letters() -> None:
    assert closeness(" Apple.\n", "apple") == 1.0
    assert closeness("ape", "apple") == pytest.approx(2 * 3 / 8)
    assert closeness("", "apple") == 0.0


def test_a_hint_that_says_the_word_is_worth_nothing() -> None:
    assert fairness("it grows on trees", "apple") == 1.0
    assert fairness("an Apple", "apple") == 0.0
    assert fairness("a 12!", "apple") == pytest.approx(1 / 4)
    assert fairness("", "apple") == 0.0


def test_a_guess_is_letters_only() -> None:
    assert (letters("apple"), letters("ap 1"), letters("")) == (1.0, 0.5, 0.0)


def test_the_shipped_settings_load() -> None:
    config = load_config(SETTINGS)
    assert (config.policy_names, config.job.max_steps) == ((DESCRIBER, GUESSER), 15)


def tiny_run(folder: Path, seed: int) -> dict[str, list[float]]:
    """Mean rewards by policy and batch, of a run on tiny models."""
    sets = set_options(make_model(folder / "model"), max_steps=STEPS, batch_size=2, optimizer__lr=1e-2)
    out = folder / "out"
    result = main(["--out", str(out), "--seed", str(seed), *sets])
    assert json.loads((out / "result.json").read_text()) == result
    assert result["aborted"] == 0 and result["episodes"] >= STEPS * 16
    rewards: dict[str, list[float]] = result["rewards"]
    return rewards


@pytest.mark.e2e
@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_models_learn(tmp_path: Path, seed: int) -> None:
    rewards = tiny_run(tmp_path, seed)
    for policy in (DESCRIBER, GUESSER):
        assert len(rewards[policy]) == STEPS
        first, last = ends(rewards[policy])
        assert last > 1.5 * first, rewards
