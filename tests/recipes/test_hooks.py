"""A hook that fails or returns what cannot be trained is refused: recipe, hook, value and line. Built-ins pass."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentjet.errors import InvalidRequest, RecipeError
from agentjet.recipes import hooks, registry
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import FinishedGroup, Recipe
from tests.recipes.batches import make_batch

BATCH = make_batch([[1, 1], [1, 0]])
GROUP = FinishedGroup("t", "", [1.0, 0.0], [{}, {}], [3, 4], is_uniform=False)


def refusal(recipe: type[Recipe], call: Callable[[Recipe], Any]) -> str:
    with pytest.raises(RecipeError) as error:
        call(recipe())
    assert "recipe 'broken'" in str(error.value) and str(error.value).endswith(hooks.WAY_OUT)
    return str(error.value)


def broken(base: type[Recipe], **methods: Any) -> type[Recipe]:
    return type("Broken", (base,), {"__annotations__": {"name": str}, "name": "broken", **methods})


def columns(recipe: Recipe) -> Any:
    return hooks.columns(recipe, BATCH, {})


def zero_division(self: Any, rewards_G: Any) -> Any:
    with np.errstate(all="ignore"):
        return (rewards_G - rewards_G.mean()) / rewards_G.std()


@pytest.mark.parametrize(
    ("method", "function", "sentence"),
    [
        ("group_advantages", zero_division, r"returned \[nan, nan\] for the rewards \[1.0, 1.0\]: a division by"),
        ("group_advantages", lambda self, rewards_G: 0.5, r"returned float instead of an array of shape \(2,\)"),
        ("group_advantages", lambda self, rewards_G: rewards_G[:1], r"ndarray of shape \(1,\) instead of an array of"),
        ("group_advantages", lambda self, rewards_G: 1 / 0, r"`columns` failed at .*test_hooks.py:\d+: ZeroDivision"),
        ("group_advantages", lambda self, rewards_G: ["a", "b"], r"returned \['a', 'b'\] instead of numbers"),
        ("group_advantages", lambda self, rewards_G: sys.exit(3), r"failed at .*test_hooks.py:\d+: SystemExit: 3"),
        ("sequence_advantages", lambda self, batch: np.zeros(4), r"`sequence_advantages` .* of shape \(4, 1\)"),
        ("token_advantages", lambda self, batch: np.zeros(3), r"column 'advantage' as ndarray of shape \(3,\) inst"),
        ("token_advantages", lambda self, batch: np.full(8, np.inf), r"with 8 of 8 values that are not finite"),
        ("columns", lambda self, batch, outputs: batch.forest, "returned Forest instead of a forest and metrics"),
        ("columns", lambda self, batch, outputs: (batch.forest, {}), "no column 'advantage', which `reads` names"),
        ("columns", lambda self, batch, outputs: None, "returned NoneType instead of"),
        (
            "columns",
            lambda self, batch, outputs: (batch.forest, {"policy/kind": "new"}),
            "the metrics {'policy/kind': 'new'} instead of",
        ),
        ("weights", lambda self, forest: [1.0], "`weights` returned weights as list instead of an array of 8 tokens"),
        ("contributing", lambda self, forest: np.ones(8), "returned values of type float64 instead of bool"),
        ("contributing", lambda self, forest: np.ones(3, bool), r"returned values as ndarray of shape \(3,\)"),
        ("token_loss", lambda self, logp, columns: -logp, r"Tensor of shape \(2,\) instead of the losses and a dict"),
        (
            "token_loss",
            lambda self, logp, columns: (-logp.mean(), {}),
            r"of shape \(\) instead of a tensor of 2",
        ),
        ("token_loss", lambda self, logp, columns: (-logp.detach(), {}), "returned losses without gradient"),
        ("token_loss", lambda self, logp, columns: (-logp, {"a": 1.0}), "metric 'a' as float instead of a tensor of 2"),
        ("token_loss", lambda self, logp, columns: columns["missing"], "`token_loss` failed at"),
    ],
)
def test_what_a_hook_returns(method: str, function: Any, sentence: str) -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    calls: dict[str, Callable[[Recipe], Any]] = {
        "weights": lambda recipe: hooks.weights(recipe, BATCH.forest),
        "contributing": lambda recipe: hooks.contributing(recipe, BATCH.forest),
        "token_loss": lambda recipe: hooks.loss(recipe, logp, {}),
    }
    found = refusal(broken(PolicyGradient, **{method: function}), calls.get(method, columns))
    assert re.search(sentence, found), found


def test_a_diverged_policy_is_not_a_mistake_of_the_recipe() -> None:
    nothing = np.full(BATCH.forest.num_targets, np.nan, np.float32)
    forest, _ = hooks.columns(registry.make_recipe({"correction": "tis"}), BATCH, {"proximal": nothing})
    assert np.isnan(forest["advantage"]).any()


def test_losses_that_are_not_finite_are_counted_where_the_policy_is_finite() -> None:
    loss, logp = torch.tensor([np.nan, np.inf, 1.0, np.nan]), torch.tensor([-1.0, -1.0, -1.0, np.nan])
    assert hooks.num_not_finite(loss, logp, {}) == 2
    assert hooks.num_not_finite(loss, logp, {"advantage": torch.tensor([np.inf, 1.0, 1.0, 1.0])}) == 1
    found = refusal(broken(Recipe), lambda recipe: hooks.check_loss(recipe, 2.0, BATCH.forest))
    assert "`token_loss` returned 2 of 8 losses that are not finite" in found


@pytest.mark.parametrize("reason", [None, True, "Too long a story", "too_few"])
def test_accept(reason: object) -> None:
    def call(recipe: Recipe) -> str:
        return hooks.accept(recipe, GROUP, frozenset({"too_few"}))

    found = refusal(broken(Recipe, accept=lambda self, group: reason), call)
    assert f"drops a group for the reason {reason!r}: `accept` returns ''" in found
    found = refusal(broken(Recipe, accept=lambda self, group: group.rewards["a"]), call)
    assert "`accept` failed at" in found and "TypeError" in found

    def refuses(self: Any, group: FinishedGroup) -> str:
        raise InvalidRequest("not this one")

    found = refusal(broken(Recipe, accept=refuses), call)
    assert "`accept` failed at" in found and "InvalidRequest: not this one" in found, "no request waits for it"


def test_memory_that_is_not_enough_is_not_a_mistake_of_the_recipe() -> None:
    def fails(self: Any, batch: Any, outputs: Any) -> Any:
        raise torch.OutOfMemoryError("too large")

    with pytest.raises(torch.OutOfMemoryError):
        columns(broken(Recipe, columns=fails)())


FILES = {
    "absent": ("", "cannot be imported: there is no module 'absent': install its package"),
    "imports": ("\nimport not_installed_here\n", r"imports.py:2: ModuleNotFoundError: No module named 'not_inst"),
    "mistyped": ("x = 1\ndef f(:\n", r"mistyped.py:2: SyntaxError"),
    "untyped": (
        "from agentjet.recipes.policy_gradient import PolicyGradient\n\nclass Chosen(PolicyGradient):\n"
        "    name = 'chosen'\n",
        r"untyped.py:3: PydanticUserError: Field 'name' defined on a base class was overridden by a non-annotated",
    ),
    "other": (
        "from agentjet.recipes.policy_gradient import PolicyGradient\n\nclass Chose(PolicyGradient):\n    pass\n",
        r"there is no class 'Chosen' in .*other.py. Of a Recipe .*other.py has Chose$",
    ),
    "wrong": (
        "class Chosen:\n    pass\n",
        r"is not a subclass of agentjet.recipes.recipe.Recipe. Of these .* has none",
    ),
}


@pytest.mark.parametrize("module", FILES)
def test_a_plug_in_that_cannot_be_imported(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, sentence = FILES[module]
    monkeypatch.syspath_prepend(tmp_path)
    if text:
        (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        registry.make_recipe(f"{module}:Chosen")


TERMS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a bonus": (lambda logp, columns: -logp - 0.1 * columns["entropy"], "adds 'entropy', which has no gradient"),
    "a squared distance": (lambda logp, columns: -logp + (columns["value"] - 2) ** 2, "adds 'value', which has no"),
    "a factor": (lambda logp, columns: -logp * columns["entropy"], ""),
    "a factor of another number": (lambda logp, columns: -logp + (columns["new_value"] - columns["value"]) ** 2, ""),
    "a bonus with gradient": (lambda logp, columns: -logp - 0.1 * columns["new_entropy"], ""),
    "a detached factor": (lambda logp, columns: -logp * columns["entropy"].detach(), ""),
}


@pytest.mark.parametrize("hook", ["token_loss", "batch_loss"])
@pytest.mark.parametrize("term", TERMS)
def test_a_term_without_effect_is_refused(term: str, hook: str) -> None:
    function, sentence = TERMS[term]
    names = ("entropy", "value", "new_entropy", "new_value")
    columns = {name: torch.ones(2, requires_grad=name.startswith("new_")) for name in names}
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    recipe = broken(Recipe, **{hook: lambda self, logp, columns: (function(logp, columns), {})})
    if sentence:
        assert sentence in refusal(recipe, lambda recipe: hooks.loss(recipe, logp, columns))
    else:
        assert hooks.loss(recipe(), logp, columns)[0].shape == (2,)


def test_numbers_of_a_whole_mini_batch() -> None:
    logp = torch.tensor([-1.0, -3.0], requires_grad=True)
    recipe = broken(Recipe, batch_loss=lambda self, logp, columns: (logp.mean(), {"a": logp.detach().max()}))
    loss, metrics = hooks.loss(recipe(), logp, {})
    assert (float(loss), metrics["a"].tolist()) == (-2.0, [-1.0, -1.0])
    recipe = broken(Recipe, batch_loss=lambda self, logp, columns: (logp[:1], {}))
    assert "instead of a tensor of 2 values" in refusal(recipe, lambda recipe: hooks.loss(recipe, logp, {}))
    recipe = broken(Recipe, token_loss=lambda self, logp, columns: (logp.mean(), {}))
    assert "instead of a tensor of 2 values" in refusal(recipe, lambda recipe: hooks.loss(recipe, logp, {}))


@pytest.mark.parametrize(
    ("seconds", "before", "now", "is_overdue"),
    [(30.0, 0.0, 0.0, True), (30.0, 50.0, 65.0, False), (30.0, 50.0, 0.0, True), (15.0, 0.0, 0.0, False)],
    ids=["slow", "it waited for a core", "the system does not show it any more", "in time"],
)
def test_the_time_without_a_core_is_not_that_of_a_hook(
    seconds: float, before: float, now: float, is_overdue: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, queued = [0.0, seconds], [before, now]
    monkeypatch.setattr(hooks, "time", SimpleNamespace(monotonic=lambda: times.pop(0)))
    monkeypatch.setattr(hooks, "queued_seconds", lambda task: queued.pop(0))
    with hooks.running("mine", "columns"):
        assert bool(hooks.overdue_call(20.0, "20 s")) == is_overdue


@pytest.mark.parametrize("way", ["call", "wait_for"])
def test_a_hook_whose_thread_has_no_core_is_not_abandoned(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, released = itertools.count(), threading.Event()

    def queued_seconds(task: Path) -> float:
        if next(looks) < 2:
            return 0.0
        released.set()
        return 1e6

    monkeypatch.setattr(hooks, "queued_seconds", queued_seconds)
    threads = hooks.PlugInThreads(0.05)
    waits = {
        "call": lambda: threads.call("hook", released.wait),
        "wait_for": lambda: asyncio.run(threads.wait_for("hook", released.wait)),
    }
    assert waits[way]()
