"""Recipes with a teacher, against numbers worked out by hand and the formulas of their sources. Pinned here:

1. the divergence over likely tokens and a tail: by hand, and as SDPO and OPSD write it;
2. tokens without a grade are in no denominator, and pull nothing;
3. what each teacher sees, and the templates and teachers that are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from agentjet.recipes.distillation import TopDivergence, with_tail
from agentjet.recipes.recipe import Attempt, Teaching
from agentjet.recipes.registry import CHAPTERS, find, make_recipe
from agentjet.timeline.batch import TrainingBatch
from tests.recipes.batches import make_batch, recipe_of

NAN = math.nan
TAUGHT = CHAPTERS["distillation"].split()
TOP = [name for name in TAUGHT if "loss" in vars(find(name)).get("__annotations__", {})]


def graded(batch: TrainingBatch, **columns: Any) -> TrainingBatch:
    """The batch as the learner gives it to `columns`."""
    forest = batch.forest.with_columns(**{name: np.array(values) for name, values in columns.items()})
    return replace(batch, forest=forest)


def loss_of(recipe: Any, logp: float = -1.0, **columns: Any) -> float:
    tensors = {"logprob": -1.0, "advantage": 0.0, **columns}
    given = {name: torch.tensor([values], dtype=torch.float64) for name, values in tensors.items()}
    loss, _ = recipe.token_loss(torch.tensor([logp], dtype=torch.float64), given)
    return float(loss)


# ---- divergences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "policy", "teacher", "expected"),
    [
        # one likely token and a tail: policy 1/2 1/2, teacher 1/4 3/4
        ("distill_top_k", {"beta": 0.0}, [0.5], [0.25], 0.130812),  # log 2 x (1/4 log2(1/2) + 3/4 log2(3/2))
        ("distill_top_k", {"beta": 1.0}, [0.5], [0.25], 0.143841),  # 1/2 log 2 + 1/2 log(2/3)
        ("distill_top_k", {}, [0.5], [0.25], 0.033822),  # m = 3/8 5/8: half of both divergences from it
        ("distill_top_k", {"beta": 0.25}, [0.5], [0.25], 0.024870),  # m = 7/16 9/16
        ("distill_top_k", {"beta": 0.0}, [0.5, 0.25], [0.25, 0.5], 0.173287),  # 1/4 log 2; the tails are equal
        # the shares of the forward KL are 1/4 log(1/2) and 3/4 log(3/2) = 0.304099
        ("opsd", {}, [0.5], [0.25], -0.123287),  # the second is at most 0.05
        ("opsd", {"token_clip": 0.0}, [0.5], [0.25], 0.130812),
        ("opsd", {"token_clip": 0.3}, [0.5], [0.25], 0.126713),
        ("sdft", {}, [0.5], [0.25], 0.143841),
        ("sdft", {}, [0.25], [0.5], 0.130812),
        ("sdft", {}, [0.5, 0.25], [0.25, 0.25], 0.173287),  # 1/2 log 2 + 1/4 log(1/2)
        ("sdpo", {}, [0.5], [0.25], 0.033822),
        ("sdpo", {"beta": 1.0}, [0.5], [0.25], 0.143841),
        ("sdpo", {"beta": 0.0}, [0.25], [0.5], 0.143841),
    ],
)
def test_divergences_by_hand(
    name: str, parameters: dict[str, float], policy: list[float], teacher: list[float], expected: float
) -> None:
    loss = {**recipe_of(name).loss.model_dump(), **parameters}
    top = {"new_top": np.log(policy).tolist(), "teacher_top": np.log(teacher).tolist()}
    assert loss_of(recipe_of(name, loss=loss), **top) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("logp", "weight"), [(-1.0, 1.0), (-0.5, math.exp(0.5)), (0.0, 2.0), (-2.0, math.exp(-1))])
def test_sdpo_weighs_a_divergence_by_the_ratio_of_its_token(logp: float, weight: float) -> None:
    top = {"new_top": [math.log(0.5)], "teacher_top": [math.log(0.25)]}
    assert loss_of(recipe_of("sdpo"), logp, **top) == pytest.approx(weight * 0.033822, abs=1e-4)


def reference_loss(policy: torch.Tensor, teacher: torch.Tensor, beta: float, clip: float) -> torch.Tensor:
    """As github.com/lasgroup/SDPO and github.com/siyan-zhao/OPSD compute it, in words of torch."""
    tails = [(1 - top.exp().sum(-1, keepdim=True)).log() for top in (policy, teacher)]
    policy, teacher = (torch.cat(both, -1) for both in zip((policy, teacher), tails, strict=True))
    if beta == 0:
        shares = kl_div(policy, teacher, reduction="none", log_target=True)
    elif beta == 1:
        shares = kl_div(teacher, policy, reduction="none", log_target=True)
    else:
        mixture = torch.logsumexp(torch.stack([policy + math.log(1 - beta), teacher + math.log(beta)]), 0)
        of_teacher, of_policy = (kl_div(mixture, one, reduction="none", log_target=True) for one in (teacher, policy))
        shares = torch.lerp(of_policy, of_teacher, beta)
    return (shares.clamp(max=clip) if clip else shares).sum(-1)


@pytest.mark.parametrize("clip", [0.0, 0.02])
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_a_divergence_and_its_gradient_are_those_of_its_sources(beta: float, clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, 30, generator=generator, dtype=torch.float64) * 2
    policy, teacher = logits.log_softmax(-1)[:, :, :7]
    leaves = [policy.clone().requires_grad_(), policy.clone().requires_grad_()]
    loss = TopDivergence(beta=beta, token_clip=clip)
    ours, _ = loss.token_loss(teacher[:, 0], {"new_top": leaves[0], "teacher_top": teacher, "logprob": teacher[:, 0]})
    theirs = reference_loss(leaves[1], teacher, beta, clip)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    (ours.sum() + theirs.sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-9, atol=1e-12)  # type: ignore[arg-type]
    assert bool(leaves[0].grad.any())  # type: ignore[union-attr]


def test_the_tail_of_everything_is_finite() -> None:
    """A set of two tokens, of which four are asked for: two are outside."""
    top = torch.tensor([[math.log(0.75), math.log(0.25), -100.0, -100.0]], requires_grad=True)
    tailed = with_tail(top)
    assert tailed.detach()[0, -1] == pytest.approx(math.log(1e-7), abs=0.2)
    teacher = torch.tensor([[math.log(0.5), math.log(0.5), -100.0, -100.0]])
    for beta in (0.0, 0.5, 1.0):
        columns = {"new_top": top, "teacher_top": teacher, "logprob": torch.zeros(1)}
        loss, _ = TopDivergence(beta=beta).token_loss(torch.zeros(1), columns)
        [gradient] = torch.autograd.grad(loss.sum(), [top], retain_graph=True)
        assert bool(loss.isfinite().all()) and bool(gradient.isfinite().all()) and float(loss.detach()) > 0.01


# ---- grades ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grades", "advantages", "gap", "share"),
    [
        ([-0.5, -3.0], [0.5, -2.0], 0.75, 1.0),  # sampled with -1
        ([-0.5, NAN], [0.5], -0.5, 0.5),
        ([NAN, NAN], [], None, 0.0),
    ],
)
def test_distillation_raises_what_the_teacher_finds_likelier(
    grades: list[float], advantages: list[float], gap: float | None, share: float
) -> None:
    recipe = recipe_of("distill", teacher="folder")
    forest, metrics = recipe.columns(graded(make_batch([[0.0]], calls=[[2]]), teacher=grades), {})
    assert forest["advantage"].tolist() == advantages
    assert metrics.get("policy/teacher_kl") == gap and metrics["teacher/graded"] == share
    if advantages:
        assert recipe.weights(forest).tolist() == [1 / len(advantages)] * len(advantages)
    assert recipe.needs == {"teacher"} and recipe.teaching == Teaching(("folder",))


@pytest.mark.parametrize("name", TOP)
def test_tokens_without_a_grade_are_left_out(name: str) -> None:
    recipe = recipe_of(name, top_k=1)
    columns = {"teacher": [-0.5, NAN, -0.5], "teacher_top": [[-0.1], [-0.1], [NAN]], "top_ids": [[1], [1], [1]]}
    forest, metrics = recipe.columns(graded(make_batch([[0.0]], calls=[[3]]), **columns), {})
    assert forest.num_targets == 1 and metrics["teacher/graded"] == pytest.approx(1 / 3)
    assert recipe.contributing(forest).tolist() == [True] and recipe.teaching.top_k == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parameters", "logp", "teacher", "coef", "expected"),
    [
        ({}, -1.0, -2.0, 0.002, 0.001),  # 0.002 x 1 / 2
        ({}, -1.0, -4.0, 0.002, 0.009),
        ({}, -1.0, -4.0, 0.0, 0.0),
        ({"estimator": "k3"}, -1.0, -1.5, 0.1, 0.01065307),  # 0.1 x (exp(-0.5) + 0.5 - 1)
        ({"kl_coef": 0.5, "kl_estimator": "k2"}, -1.0, -2.0, 0.002, 1.001),  # and 0.5 x 2^2 / 2
    ],
)
def test_kdrl_pulls_by_hand(
    parameters: dict[str, Any], logp: float, teacher: float, coef: float, expected: float
) -> None:
    columns = {"teacher": teacher, "teacher_coef": coef, "reference": -3.0}
    assert loss_of(recipe_of("kdrl", **parameters), logp, **columns) == pytest.approx(expected, abs=1e-8)


def test_kdrl_learns_from_rewards_without_a_grade() -> None:
    batch = graded(make_batch([[1.0, 0.0]], calls=[[2], [1]]), teacher=[-0.5, NAN, -3.0])
    forest, metrics = recipe_of("kdrl").columns(batch, {})
    assert forest["advantage"].tolist() == pytest.approx([0.707106, 0.707106, -0.707106], abs=1e-6)
    assert forest["teacher"].tolist() == [-0.5, 0.0, -3.0] and metrics["teacher/graded"] == pytest.approx(2 / 3)
    assert forest["teacher_coef"].tolist() == pytest.approx([0.002, 0.0, 0.002])
    equal, _ = recipe_of("kdrl").columns(graded(make_batch([[1.0, 1.0]]), teacher=[-0.5, NAN, -3.0, NAN]), {})
    assert recipe_of("kdrl").contributing(equal).tolist() == [True, False, True, False]
    of_advantage, _ = recipe_of("kdrl", estimator="k1", beta=0.1).columns(batch, {})
    assert of_advantage["advantage"].tolist() == pytest.approx([0.757106, 0.707106, -0.907106], abs=1e-6)
    assert "teacher_coef" not in of_advantage.targets


@pytest.mark.parametrize(("version", "beta"), [(0, 5e-3), (10, 4.5e-3), (80, 1e-3), (500, 1e-3)])
def test_kdrl_fades_as_in_its_paper(version: int, beta: float) -> None:
    batch = replace(graded(make_batch([[1.0, 0.0]], calls=[[1], [1]]), teacher=[-0.5, -0.5]), id=version)
    recipe = recipe_of("kdrl", beta=5e-3, beta_step=5e-5)
    assert recipe.columns(batch, {})[0]["teacher_coef"].tolist() == pytest.approx([beta] * 2)


# ---- contexts --------------------------------------------------------------------------------------------------------


def attempt(reward: float, text: str = "", answer: str = "") -> Attempt:
    return Attempt("t", "", reward, text, {}, answer)


RIGHT, OTHER, WRONG = attempt(1.0, "fine", "4"), attempt(1.0, "", "four"), attempt(0.0, "not {answer}", "5")
SOLUTION, FEEDBACK = "Correct solution:\n\n", "The following is feedback from your unsuccessful earlier attempt:\n\n"
END = "\n\nCorrectly solve the original question."


@pytest.mark.parametrize(
    ("name", "parameters", "own", "others", "expected"),
    [
        ("opsd", {"template": "Solution: {text}!"}, WRONG, [], "Solution: not {answer}!"),
        ("opsd", {}, OTHER, [RIGHT], None),
        ("sdft", {"template": "{text}"}, RIGHT, [], "fine"),
        ("sdft", {}, OTHER, [RIGHT], None),
        ("sdpo", {}, WRONG, [OTHER, RIGHT], f"{SOLUTION}four\n\n{FEEDBACK}not {{answer}}{END}"),
        ("sdpo", {}, WRONG, [WRONG], f"{FEEDBACK}not {{answer}}{END}"),
        ("sdpo", {}, RIGHT, [WRONG], None),  # a success without another one
        ("sdpo", {}, RIGHT, [WRONG, OTHER], f"{SOLUTION}four{END}"),
        ("sdpo", {}, attempt(0.0), [WRONG], None),
        ("sdpo", {"success": 0.0}, attempt(0.5), [WRONG], f"{SOLUTION}5{END}"),
        ("sdpo", {"feedback_template": "", "instruction": ""}, WRONG, [RIGHT], f"{SOLUTION}4"),
        ("sdpo", {"solution_template": ""}, attempt(0.0), [RIGHT], None),
    ],
)
def test_what_the_teacher_sees(
    name: str, parameters: dict[str, Any], own: Attempt, others: list[Attempt], expected: str | None
) -> None:
    recipe = recipe_of(name, **parameters)
    assert recipe.teacher_context(own, others) == expected
    assert recipe.teaching is not None and recipe.teaching.has_context


def test_without_a_template_the_teacher_sees_what_the_policy_sees() -> None:
    for name, fields in (("opsd", ["template"]), ("sdpo", ["solution_template", "feedback_template"])):
        recipe = recipe_of(name, **dict.fromkeys(fields, ""))
        assert recipe.teaching is not None and not recipe.teaching.has_context


@pytest.mark.parametrize(
    ("parameters", "sources", "top", "moves"),
    [
        ({"name": "distill", "teacher": ["http://a/v1", "http://b/v1"]}, ("http://a/v1", "http://b/v1"), 0, None),
        ({"name": "distill_top_k", "teacher": "/models/large", "top_k": 5}, ("/models/large",), 5, None),
        ({"name": "opsd"}, ("reference",), 64, None),
        ({"name": "sdft"}, ("reference",), 64, (1, 0.01)),
        ({"name": "sdpo"}, ("reference",), 100, (1, 0.05)),
        ({"name": "sdpo", "teacher": "policy"}, ("policy",), 100, None),
        ({"name": "grpo", "kl_coef": 0.1, "reference_every": 4, "reference_mix": 0.5}, None, 0, (4, 0.5)),
    ],
    ids=str,
)
def test_teachers(
    parameters: dict[str, Any], sources: tuple[str, ...] | None, top: int, moves: tuple[int, float] | None
) -> None:
    recipe = make_recipe(parameters)
    assert recipe.reference_moves == moves
    assert recipe.teaching is None if sources is None else recipe.teaching and recipe.teaching.sources == sources
    assert recipe.teaching is None or recipe.teaching.top_k == top


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"name": "opsd", "template": "no place"}, "the template has no {text}, the place of the text; add it"),
        ({"name": "sdpo", "solution_template": "{text}"}, "the template has no {answer}"),
        ({"name": "distill", "teacher": "policy"}, "shows it what the policy sees, so it teaches nothing"),
        ({"name": "opsd", "teacher": "policy", "template": ""}, "so it teaches nothing"),
        ({"name": "distill", "teacher": ["/a", "/b"]}, "give one folder, 'policy' or 'reference', or a list of URLs"),
        ({"name": "kdrl", "teacher": []}, "give one folder"),
        ({"name": "distill", "teacher": "http://me:key@host/v1"}, "give the server a key in AGENTJET_TEACHER_KEY"),
        ({"name": "sdpo", "teacher": "http://a/v1"}, "an endpoint returns its own likely tokens"),
        ({"name": "sdpo", "teacher": "policy", "reference_every": 2}, "the recipe 'sdpo' reads no reference"),
        (
            {"name": "grpo", "reference_every": 2},
            "reference_every = 2: the recipe 'grpo' reads no reference; set kl_coef",
        ),
        ({"name": "grpo", "kl_coef": 0.1, "reference_every": 2, "reference_mix": 0.0}, "greater than 0"),
    ],
    ids=str,
)
def test_teachers_that_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_recipe(parameters)
