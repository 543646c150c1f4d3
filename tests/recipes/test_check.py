"""`agentjet recipes check` and `check`. Pinned here:

1. every built-in recipe passes, and so do the losses that others may be combined with;
2. each broken plug-in is found, at its hook and with a sentence that says what to mend;
3. the command: files, losses alone, parameters, JSON, exit codes, and sentences for wrong input.
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from pydantic import model_validator
from typer.testing import CliRunner

from agentjet.cli.main import app
from agentjet.errors import ConfigError
from agentjet.recipes.check import check
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.recipe import Recipe, ReferenceMoves, Teaching
from agentjet.recipes.registry import built_in
from tests.recipes.test_every_hook import BASES, PAGE, classes

SEEN: list[int] = []


@pytest.mark.parametrize("name", built_in())
def test_built_in_recipes_pass(name: str) -> None:
    report = check(name)
    assert report.ok, str(report)
    assert report.example and "tokens have a gradient" in str(report)


@pytest.mark.parametrize(
    "parameters",
    [
        {"kl_coef": 0.1, "entropy_coef": 0.1, "correction": "mis", "correction_level": "sequence"},
        {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "by_role": True},
        {"loss": "gspo", "entropy_coef": 0.1, "mini_batches": 2},
    ],
    ids=str,
)
def test_recipes_with_further_terms_pass(parameters: dict[str, Any]) -> None:
    report = check(parameters)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", BASES)
def test_the_classes_of_the_page_that_set_every_hook_pass(name: str) -> None:
    report = check(classes()[name])
    assert report.ok, str(report)


def test_the_example_of_the_page_that_learns_from_itself_passes() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("### Teachers and references")[2].partition("\n### ")[0]
    scope: dict[str, Any] = {"__name__": "plugin"}
    exec(compile(section.partition("```python\n")[2].partition("```")[0], "<plugin>", "exec", dont_inherit=True), scope)
    report = check(scope["LearnFromMistakes"])
    assert report.ok and "teacher_context" in str(report), str(report)


# ---- broken plug-ins -------------------------------------------------------------------------------------------------


def advantages(function: Any) -> type[Recipe]:
    return type("Own", (PolicyGradient,), {"__module__": "own", "group_advantages": lambda self, r: function(r)})


def loss(function: Any, hook: str = "token_loss", **more: Any) -> type[PolicyLoss]:
    def own(self: Any, logp: Any, columns: Any) -> Any:
        return function(logp, columns), {}

    return type("OwnLoss", (PolicyLoss,), {"__module__": "own", hook: own, **more})


def counted(rewards: Any) -> Any:
    SEEN.append(1)
    return (rewards - rewards.mean()) * len(SEEN)


class InPlace(PolicyGradient):
    def sequence_advantages(self, batch: Any) -> Any:
        batch.facts.rewards[:] -= 0.1
        return super().sequence_advantages(batch)


class Additive(PolicyGradient):
    @property
    def needs(self) -> Any:
        return super().needs | {"entropy"}

    @property
    def reads(self) -> Any:
        return (*super().reads, "entropy")

    def token_loss(self, logp: Any, columns: Any) -> Any:
        losses, metrics = super().token_loss(logp, columns)
        return losses - 0.01 * columns["entropy"], metrics


class Needy(PolicyGradient):
    @property
    def needs(self) -> Any:
        return frozenset({"entropies"})


class Listed(PolicyGradient):
    @property
    def needs(self) -> Any:
        return ["entropy"]


class Headed(PolicyGradient):
    @property
    def value_heads(self) -> Any:
        return ("value",)


class Diverging(PolicyGradient):
    def next_state(self, state: Any, metrics: Any) -> Any:
        return {"scale": state.get("scale", 1.0) * np.inf}


class Growing(PolicyGradient):
    scale: float = 1.0

    @model_validator(mode="after")
    def _grows(self) -> Self:
        object.__setattr__(self, "scale", self.scale + 1)
        return self


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0]  # A factor of 2 is missing.


SEEING = Teaching(("reference",), has_context=True)


def taught(context: Any, teaching: Any = SEEING) -> type[Recipe]:
    own = {"needs": property(lambda self: frozenset({"teacher"})), "teaching": property(lambda self: teaching)}
    own |= {"teacher_context": lambda self, attempt, others: context(attempt)}
    return type("Taught", (PolicyGradient,), {"__module__": "own", **own})


def moving(every: Any, mix: Any) -> type[Recipe]:
    own = {"reference_moves": property(lambda self: ReferenceMoves(every, mix))}
    return type("Moving", (PolicyGradient,), {"__module__": "own", **own})


class Silent(PolicyGradient):
    needs = taught(str).needs
    teaching = taught(str).teaching


class Unlikely(PolicyLoss):
    reads = ("new_top",)

    def token_loss(self, logp: Any, columns: Any) -> Any:
        return columns["new_top"].sum(-1), {}


def slow(rewards: Any) -> Any:
    time.sleep(0.3)
    return rewards


@pytest.mark.parametrize(
    ("recipe", "hook", "sentence"),
    [
        (advantages(lambda r: r - np.random.rand()), "columns", "other values for the same input.*`batch.id`"),
        (advantages(lambda r: r * random.random()), "columns", "take randomness from `batch.id`"),
        (advantages(counted), "columns", "keep nothing outside of `next_state`"),
        (
            advantages(lambda r: (r - r.mean()) / r.std()),
            "columns",
            r"equal rewards: `group_advantages` returned \[nan.*a division by a deviation of 0",
        ),
        (
            advantages(lambda r: r.std(ddof=1) * r),
            "columns",
            r"a role with one reward: `group_advantages` returned \[nan\] for the rewards \[1.0\]",
        ),
        (advantages(lambda r: r[:1]), "columns", r"instead of an array of shape \(3,\): one value for each episode"),
        (advantages(lambda r: r * 0), "token_loss", "no token of any batch has a gradient"),
        (advantages(lambda r: r["a"]), "columns", r"`columns` failed at .*test_check.py:\d+: IndexError"),
        (advantages(slow), "columns", r"did not return within 0.1 s; it was at .*test_check.py:\d+"),
        (InPlace, "columns", "changes its input in place"),
        (Additive, "token_loss", "adds 'entropy', which has no gradient"),
        (Needy, "needs, reads", r"returned frozenset\({'entropies'}\) instead of a frozenset of some of entropy, prox"),
        (Listed, "needs, reads", r"`needs` returned \['entropy'\] instead of a frozenset"),
        (Headed, "needs, reads", r"`value_heads` returned \('value',\) instead of None or ValueHeads"),
        (taught(lambda one: f"{random.random()}"), "teacher_context", "a group: .* other values for the same input"),
        (taught(lambda one: SEEN.append(1) or str(len(SEEN))), "teacher_context", "other values for the same input"),
        (taught(lambda one: [one.text]), "teacher_context", r"returned \['a {text}'\] instead of a text, or None for"),
        (taught(lambda one: one.feedback), "teacher_context", r"`teacher_context` failed at .*test_check.py:\d+: Attr"),
        (taught(str, "a folder"), "needs, reads", "`teaching` returned 'a folder' instead of None or Teaching"),
        (taught(str, Teaching()), "needs, reads", "names a teacher, and `teaching` returned .* with a source"),
        (taught(str, Teaching("reference")), "needs, reads", "`sources` is 'reference' instead of a tuple of texts"),  # type: ignore[arg-type]
        (taught(str, Teaching(("policy",), top_k=-1)), "needs, reads", "`top_k` is -1 instead of a number of tokens"),
        (taught(str, SEEING._replace(top_of="student")), "needs, reads", "`top_of` is 'student': 'teacher' or"),
        (Silent, "needs, reads", "has a context, and the recipe has no `teacher_context`"),
        (moving(-1, 0.5), "needs, reads", r"`reference_moves` returned .*: `every` is -1 instead of a number of bat"),
        (moving(1, 2.0), "needs, reads", "`mix` is 2.0 instead of a share above 0, at most 1"),
        (Unlikely, "columns", r"no tokens for 'new_top' of `reads`: `teaching` must return Teaching\(top_k"),
        (Diverging, "next_state", "instead of a dict of finite numbers"),
        (Growing, "parameters", "change their own result: scale = 2.0 became 3.0"),
        (loss(lambda logp, columns: -logp[:2]), "token_loss", r"of shape \(2,\) instead of a tensor of"),
        (loss(lambda logp, columns: -logp.detach()), "token_loss", "losses without gradient"),
        (
            loss(lambda logp, columns: columns["gone"]),
            "token_loss",
            "KeyError: 'gone': the columns are .*; add others to `reads`",
        ),
        (loss(lambda logp, columns: (logp - logp).sqrt()), "token_loss", "has a gradient that is not finite"),
        (loss(lambda logp, columns: (logp - logp) / 0), "token_loss", "losses that are not finite"),
        (loss(lambda logp, columns: -logp * logp.mean()), "token_loss", "other losses for half of the tokens"),
        (
            loss(lambda logp, columns: -logp * columns["advantage"] * torch.ones(34)),
            "token_loss",
            r"half of the tokens.*`token_loss` failed at .*test_check.py:\d+: RuntimeError",
        ),
        (loss(lambda logp, columns: logp * logp.sum().item(), "batch_loss"), "batch_loss", "NumPy cuts the gradient"),
        (loss(lambda logp, columns: Square.apply(logp)), "token_loss", "a backward pass of its own is wrong"),
    ],
)
def test_broken_plug_ins_are_found(recipe: Any, hook: str, sentence: str) -> None:
    for _ in range(2):  # The second check in a process finds as much as the first.
        report = check(recipe, seconds=0.1 if "within" in sentence else 20)
        problems = {one.hook: one.problem for one in report.checks if one.problem}
        assert not report.ok and re.search(sentence, problems[hook]), str(report)


@pytest.mark.parametrize(
    "function",
    [
        lambda logp, columns: -(logp - columns["logprob"]).exp().detach() * columns["advantage"] * logp,
        lambda logp, columns: -columns["advantage"] * no_grad_ratio(logp, columns) * logp,
        lambda logp, columns: (logp - columns["logprob"]).abs(),
    ],
)
def test_what_is_cut_off_by_intention_passes(function: Any) -> None:
    report = check(loss(function))
    assert report.ok, str(report)


def no_grad_ratio(logp: Any, columns: Any) -> Any:
    with torch.no_grad():
        return (logp - columns["logprob"]).exp()


# ---- the command -----------------------------------------------------------------------------------------------------

FILE = """
from agentjet.recipes.losses import PolicyLoss
from agentjet.recipes.policy_gradient import PolicyGradient

class Own(PolicyGradient):
    smallest_group = 16
    scale: float = 1.0

    def group_advantages(self, rewards_G):
        return self.scale * (rewards_G - rewards_G.mean()) / (rewards_G.std() if self.scale == 3 else 1)

class OwnLoss(PolicyLoss):
    pull: float = 0.05

    def token_loss(self, logp, columns):
        return -columns["advantage"] * logp + self.pull * (logp - columns["logprob"]) ** 2, {}

class Other:
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[str]:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    path, before = tmp_path / f"{name}.py", list(sys.path)
    path.write_text(FILE)
    yield str(path)
    sys.path[:] = before
    sys.modules.pop(name, None)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["recipes", "check", *arguments])
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_a_file(file: str) -> None:
    code, text = run(f"{file}:Own", "--set", "scale=2")
    assert code == 0 and "advantage" in text and "26 of 29 tokens have a gradient" in text
    code, text = run(f"{file}:Own", "--set", "job.recipe.scale=3", "--json")
    found = json.loads(text[text.index("{") :])
    assert code == 1 and not found["ok"]
    assert "division by a deviation of 0" in {one["hook"]: one["problem"] for one in found["checks"]}["columns"]


def test_a_loss_alone(file: str) -> None:
    code, text = run(f"{file}:OwnLoss", "--set", "pull=0.1")
    assert code == 0 and f"recipe grpo with the loss {Path(file).stem}:OwnLoss" in text


@pytest.mark.parametrize(
    ("target", "options", "sentence"),
    [
        ("FILE", (), "names no class: write FILE:CLASS"),
        ("FILE:Missing", (), "there is no class 'Missing' in FILE"),
        ("FILE:Other", (), "is not a subclass of agentjet.recipes.recipe.Recipe"),
        ("FILE:Own", ("--set", "scal=1"), "has no parameter 'scal'; did you mean 'scale'?"),
        ("FILE:Own", ("--set", "scale"), "is not of the form"),
        ("gspi", (), "there is no recipe 'gspi'; did you mean 'gspo'?"),
        ("nowhere.py:Own", (), "'nowhere.py': there is no such file"),
        ("nowhere.module:Own", (), "there is no module 'nowhere'"),
    ],
)
def test_wrong_input(file: str, target: str, options: tuple[str, ...], sentence: str) -> None:
    code, text = run(target.replace("FILE", file), *options)
    assert code == 2 and sentence.replace("FILE", file) in text


def test_files_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text, sentence in (
        ("own_broken", "x = 1\nimport not_installed_here\n", "own_broken.py:2: ModuleNotFoundError"),
        ("json", FILE, "has the name of another module, json: rename the file"),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        code, found = run(f"{path}:Own")
        assert code == 2 and sentence in found
