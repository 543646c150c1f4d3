"""Settings that a recipe would ignore, or that take away what it learns from, are refused by name."""

from __future__ import annotations

import sys
import threading
from typing import Self

import pytest
from pydantic import model_validator

from agentjet.recipes import hooks
from agentjet.recipes.baselines import Grpo
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.registry import make_recipe
from tests.recipes.batches import recipe_of

COMPARES_NO_EPISODES = ("mars", "dense_turn_credit", "direct_advantage", "distill", "ppo", "vapo", "archer", "digirl")


@pytest.mark.parametrize("name", COMPARES_NO_EPISODES)
def test_recipes_that_compare_no_episodes(name: str) -> None:
    for setting, value in (("by_role", True), ("kl_in", "reward")):
        with pytest.raises(
            ValueError, match=rf"{setting} = .*the recipe '{name}' does not compare rewards of episodes"
        ):
            make_recipe({"name": name, setting: value})
    if name != "dense_turn_credit":  # It compares the turns of a group, and so does the gateway.
        with pytest.raises(
            ValueError, match=r"drop_zero_variance = True: the recipe .* groups with equal rewards teach"
        ):
            make_recipe({"name": name, "drop_zero_variance": True})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rft", "compares the reward with a threshold"),
        ("digirl_curriculum", "compares the reward with those of earlier episodes"),
        ("single_stream", "compares the reward with those of earlier episodes"),
        ("craft_gui", "learns from metrics instead of the reward"),
        ("gdpo", "compares metrics besides the reward"),
        ("rae", "compares the reward with those of earlier episodes"),
        ("adaptive_kl", "adapts the weight of the penalty in the loss"),
    ],
)
def test_a_penalty_in_the_reward_that_would_be_lost(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"kl_in = 'reward': the recipe '{name}' {reason}; set kl_in to 'loss'"):
        make_recipe({"name": name, "kl_in": "reward"})


@pytest.mark.parametrize("loss", ["clip", "aepo"])
def test_a_dual_clip_that_takes_the_gradient_of_failures(loss: str) -> None:
    for value in (0.5, 1.0):
        with pytest.raises(ValueError, match=f"dual_clip = {value} takes the gradient from negative advantages"):
            make_recipe({"loss": {"name": loss, "dual_clip": value}})
    assert recipe_of("grpo", loss={"name": loss, "dual_clip": 0}).loss.name == loss


def test_covariances_that_no_token_has() -> None:
    with pytest.raises(ValueError, match=r"lowest = 5\.0 is not below highest = 5\.0: no token would be chosen"):
        make_recipe({"name": "clip_cov", "loss": {"lowest": 5}})


def test_groups_with_equal_rewards_that_teach_are_not_dropped() -> None:
    with pytest.raises(ValueError, match="the recipe 'rft' does not compare the episodes of a group"):
        make_recipe({"name": "rft", "drop_zero_variance": True})
    for name in ("gigpo", "craft_gui", "hc_grpo", "gdpo", "alp"):
        with pytest.raises(ValueError, match=f"'{name}' does not learn from the reward alone, so groups with equal"):
            make_recipe({"name": name, "drop_zero_variance": True})
    with pytest.raises(
        ValueError, match=r"the penalty of kl_in = 'reward' makes the rewards .* drop_zero_variance of 'dapo' to False"
    ):
        make_recipe({"name": "dapo", "kl_coef": 0.1, "kl_in": "reward"})
    assert recipe_of("dapo", kl_coef=0.1, kl_in="reward", drop_zero_variance=False).needs == {"reference"}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("unittest.__main__:X", "it is the program of a package: name the module that has the class"),
        ("tests.plugins.hostile_import:X", "hostile_import.py:5: SystemExit: the import ends the program"),
        (
            "tests.plugins.slow_import:X",
            "'tests.plugins.slow_import:X' cannot be imported: its import did not end within",
        ),
    ],
)
def test_an_import_that_runs_a_program_or_does_not_end(path: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a refusal: nothing else of the process ends, or waits."""
    monkeypatch.setattr(hooks.IMPORTS, "_seconds", 60.0 if "slow" not in path else 0.05)
    for setting in ({"name": path}, {"loss": {"name": path}}):
        with pytest.raises(ValueError, match="cannot be imported") as refusal:
            make_recipe(setting)
        assert reason in str(refusal.value) and "nothing is lost" not in str(refusal.value)
    assert "unittest.__main__" not in sys.modules
    assert threading.current_thread() is threading.main_thread()


class Exiting(Grpo):
    """A recipe whose validator ends the program, or never ends itself."""

    name: str = f"{__name__}:Exiting"
    ends: bool = True

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.ends:
            sys.exit("the validator ends the program")
        threading.Event().wait(1.0)
        return self


class Waiting(PolicyLoss):
    """A loss whose validator takes long."""

    name: str = f"{__name__}:Waiting"

    @model_validator(mode="after")
    def _checked(self) -> Self:
        threading.Event().wait(1.0)
        return self


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (f"{__name__}:Exiting", r"test_refusals.py:\d+: SystemExit: the validator ends the program"),
        ({"name": f"{__name__}:Exiting", "ends": False}, r"Exiting': `validators` did not return within 0.05 s; it"),
        ({"name": "grpo", "loss": f"{__name__}:Waiting"}, r"the recipe 'grpo': `validators` did not return within"),
    ],
)
def test_validators_that_end_the_program_or_do_not_end(
    setting: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks.VALIDATORS, "_seconds", 0.05)
    with pytest.raises(ValueError, match=reason) as refusal:
        make_recipe(setting)
    assert "start the server again" not in str(refusal.value), "a refused job stopped no server"
