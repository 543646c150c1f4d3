"""The classes in docs/recipes.md that set every hook and class variable. Pinned here:

1. each public member of a base that a recipe may override is set in the class of the page, with an example, and in the
   tables of "Write a recipe";
2. the classes run: all hooks of a batch return what the gateway and the learner accept.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentjet.recipes import hooks
from agentjet.recipes.critic import Critic
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import FinishedGroup, Recipe
from agentjet.recipes.rollout import Rollout, TaskStats
from agentjet.section import Section
from tests.recipes.batches import make_batch

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
BASES = {"EveryHook": Recipe, "EveryAdvantage": PolicyGradient, "EveryValue": Critic, "EveryLoss": PolicyLoss}


def classes() -> dict[str, type[Any]]:
    section = PAGE.read_text(encoding="utf-8").partition("### Every hook and class variable")[2].partition("\n### ")[0]
    scope: dict[str, Any] = {"__name__": "plugin"}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(compile(block, f"<{PAGE.name}>", "exec", dont_inherit=True), scope)  # pydantic reads a file as Python
    return {name: scope[name] for name in BASES}


def overridable(base: type[Any]) -> set[str]:
    """Public members that the base defines and that are not parameters."""
    return {
        name
        for name in vars(base)
        if not name.startswith("_") and name not in base.model_fields and name not in dir(Section)
    }


@pytest.mark.parametrize("name", BASES)
def test_the_page_sets_every_hook_and_class_variable(name: str) -> None:
    base = BASES[name]
    known = {
        member
        for other in BASES.values()
        if other is not base and issubclass(base, other)
        for member in overridable(other)
    }
    assert overridable(base), "the base has hooks"
    assert overridable(base) - known <= vars(classes()[name]).keys()


def test_the_tables_name_every_hook_and_class_variable() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Write a recipe")[2].partition("\n### ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")]
    named = {word for row in rows for code in re.findall(r"`([^`]+)`", row) for word in re.findall(r"\w+", code)}
    assert {member for base in BASES.values() for member in overridable(base)} - named == set()


@pytest.mark.parametrize("name", ["EveryHook", "EveryAdvantage", "EveryValue"])
def test_the_hooks_of_the_page_run(name: str) -> None:
    recipe: Recipe = classes()[name](**({"loss": classes()["EveryLoss"]()} if name == "EveryAdvantage" else {}))
    default = Rollout(4, 1.0)
    assert hooks.rollout(recipe, TaskStats("t", "1"), default, 0) == default
    failing = TaskStats("t", "1", recent_rewards=(0.0, 1.0))
    assert hooks.rollout(recipe, failing, default, 0).temperature == (1.1 if name == "EveryHook" else 1.0)
    group = FinishedGroup("1", "t", [0.0, 0.0], [{}, {}], [3, 3], is_uniform=True)
    assert hooks.accept(recipe, group, frozenset()) == ("all_wrong" if name == "EveryHook" else "")
    batch = make_batch([[1, 0, 0, 1]])
    names = [*recipe.needs, *(recipe.value_heads.names if recipe.value_heads else ())]
    outputs = {need: np.full(batch.forest.num_targets, 0.25, np.float32) for need in names}
    batch = replace(batch, forest=batch.forest.with_columns(**outputs))
    forest, metrics = hooks.columns(recipe, batch, outputs)
    assert forest.num_targets == (4 if name == "EveryAdvantage" else 8), "`counting` leaves negative advantages out"
    assert float(np.abs(forest["advantage"]).sum()) > 0
    assert hooks.weights(recipe, forest).sum() == pytest.approx(1)
    assert hooks.contributing(recipe, forest).any()
    logp = torch.full((forest.num_targets,), -1.0, requires_grad=True)
    columns = {one: torch.from_numpy(forest[one].copy()) for one in ("logprob", *recipe.reads) if one in forest.targets}
    columns |= {f"new_{head}": torch.zeros(forest.num_targets, requires_grad=True) for head in outputs}
    loss, reported = hooks.loss(recipe, logp, columns)
    assert {*recipe.reports} <= reported.keys()
    means = {key: float(value.detach().float().mean()) for key, value in reported.items()}
    state = hooks.next_state(recipe, {}, metrics | means)
    assert bool(state) is (name == "EveryHook")
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None and bool(logp.grad.any())
