"""Value heads, entropies, teachers and the state of recipes in the learner.

1. Gradients of the heads and of the body are those of one row per call through `transformers`.
2. A state and heads that were saved continue bit by bit, and change only with an optimiser step.
3. A recipe that needs what a backend does not have is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import BaseModel
from agentjet.compute.passes import ValueModel
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import Capabilities, LossSpec, check_capabilities
from agentjet.compute.rank import PolicyHost
from agentjet.compute.sampler import ModelSampler
from agentjet.config import JobConfig, OptimizerConfig, ServeConfig
from agentjet.errors import ConfigError, RecipeError
from agentjet.recipes.policy_gradient import PolicyGradient
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest
from agentjet.types import Op, PolicyId
from tests.compute.baseline import episodes, relative, row_logprobs
from tests.compute.conftest import make_policy, model_config, sampled_rows
from tests.compute.direct import learn_directly
from tests.compute.test_locks import recorded_batch, training_batch

RATE = OptimizerConfig(lr=1e-3)


def returns(rows: list[Row]) -> list[Row]:
    """The rows with a return, as PPO gives it to the loss."""
    return [row.with_columns(**{"return": 0.3 * number - 1}) for number, row in enumerate(rows)]


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_gradients_of_heads_and_body(tiny_folder: Path, coef: float) -> None:
    policy = make_policy(tiny_folder)
    rows = returns(episodes(policy))
    recipe = make_recipe({"name": "ppo", "value_coef": coef, "value_clip": 100.0})
    assert recipe.value_heads is not None
    learner = PolicyLearner(policy)
    learner._values = model = ValueModel(recipe.value_heads, policy)
    torch.nn.init.normal_(model.weights.data, std=3.0, generator=torch.Generator().manual_seed(0))
    loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=40))
    learner.forward_backward(TrainingBatch(0, build_forest(rows)), loss)
    ours = torch.cat([m.grad.flatten() for m in learner.masters() if m.grad is not None])
    own_head = model.weights.grad
    assert own_head is not None

    weights = model.weights.detach().clone().requires_grad_()
    parameters = list(policy.trainable().values())
    count = sum(len(row["logprob"]) for row in rows)
    policy_loss = value_loss = torch.zeros(())
    for row in rows:
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        with policy.attention("eager"):
            states = policy.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        first = len(row.tokens) - len(row["logprob"])
        features = states[first - 1 : -1]
        features = features / features.norm(dim=-1, keepdim=True) / math.sqrt(features.shape[-1])
        values = features @ weights[0, :-1] + 0.1 * weights[0, -1]
        value_loss = value_loss + 0.5 * ((values - row["return"]) ** 2).sum() / count
        ratio = (row_logprobs(policy, row) - torch.from_numpy(row["logprob"])).exp()
        gain = torch.minimum(ratio * row["advantage"], ratio.clamp(0.8, 1.2) * row["advantage"])
        policy_loss = policy_loss - gain.sum() / count
    [head] = torch.autograd.grad(value_loss, [weights], retain_graph=True)
    assert relative(own_head, head) < 1e-4
    body = torch.autograd.grad(policy_loss + coef * value_loss, parameters)
    assert relative(ours, torch.cat([gradient.flatten() for gradient in body])) < 1e-4


def test_heads_learn_the_returns(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    learner = PolicyLearner(policy)
    batch = training_batch(recorded_batch(0), 0)
    assert batch.facts is not None
    rewards = np.where(batch.facts.groups == 0, 1.0, -1.0)  # A prompt decides.
    facts = type(batch.facts)(**{**{n: getattr(batch.facts, n) for n in batch.facts.__slots__}, "rewards": rewards})
    job = JobConfig(
        recipe=make_recipe({"name": "ppo", "lam": 1.0, "value_lr": 0.3}), optimizer=OptimizerConfig(lr=1e-4)
    )
    found = [learn_directly(learner, batch.forest, job, version, facts) for version in range(40)]
    assert found[0]["critic/explained_variance"] == 0 and found[0]["critic/loss"] == pytest.approx(0.5)
    assert found[-1]["critic/explained_variance"] > 0.5 and found[-1]["critic/loss"] < 0.25


def host(folder: Path, **changes: Any) -> PolicyHost:
    config = model_config(folder, **changes)
    base = BaseModel(config)
    sampler = ModelSampler(base.policy, 4, 1024)
    return PolicyHost(PolicyLearner(base.policy_of(config)), sampler)


def learn(hosted: PolicyHost, job: JobConfig, version: int) -> dict[str, float]:
    """One batch of one step, from the operation `2 * version` on."""
    batch, op = training_batch(recorded_batch(version), version), Op.of(PolicyId(), 2 * version)
    hosted.load_batch(batch)
    outputs = hosted.forward_backward(op, batch.id, LossSpec.of(job))
    metrics = {**outputs.metrics, **hosted.optim_step(op.next(), job.optimizer)}
    hosted.publish(version + 1)
    return metrics


@pytest.mark.parametrize("name", ["adaptive_kl", "ppo"])
def test_state_and_heads_continue_bit_by_bit(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    own = {"horizon": 50.0, "target": 1e-4} if name == "adaptive_kl" else {}
    job = JobConfig(recipe=make_recipe({"name": name, **own}), optimizer=OptimizerConfig(lr=1e-2))
    first = host(tiny_folder)
    for version in range(2):
        learn(first, job, version)
    first.save(tmp_path / "saved")
    undisturbed = [learn(first, job, version) for version in (2, 3)]
    again = host(tiny_folder, offload_optimizer=True)
    again.load(tmp_path / "saved")
    assert [learn(again, job, version) for version in (2, 3)] == undisturbed
    for ours, theirs in zip(first.learner.masters(), again.learner.masters(), strict=True):
        assert torch.equal(ours, theirs)
    assert first.learner.recipe_states == again.learner.recipe_states
    assert first.save(tmp_path / "a").digest == again.save(tmp_path / "b").digest
    saved = json.loads((tmp_path / "saved" / "state.json").read_text())
    if name == "adaptive_kl":
        assert undisturbed[0]["policy/kl_coef"] != undisturbed[1]["policy/kl_coef"]
        assert saved["recipe_states"] == {name: {"kl_coef": undisturbed[0]["policy/kl_coef"]}}
    else:
        assert "recipe_states" not in saved and "values" in again.learner.state()


class Counting(PolicyGradient):
    """Counts batches, and fails if asked to."""

    name: str = "counting"
    result: float = 0.0

    def columns(self, batch: TrainingBatch, outputs: Mapping[str, Any]) -> Any:
        forest, metrics = super().columns(batch, outputs)
        return forest, {**metrics, "count": batch.state.get("count", 0.0)}

    def next_state(self, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {"count": metrics["count"] + 1 + self.result}


def test_state_changes_with_the_optimiser_step_of_the_last_step(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    learner, forest = PolicyLearner(policy), build_forest(sampled_rows(policy))
    job = JobConfig(recipe=Counting(epochs=2), optimizer=RATE)
    counts = [learn_directly(learner, forest, job, version)["count"] for version in range(3)]
    assert counts == [0, 1, 2] and learner.recipe_states == {"counting": {"count": 3.0}}
    infinite = forest.with_columns(advantage=np.full(forest.num_targets, np.inf))
    learn_directly(learner, infinite, job, 3)
    assert learner.recipe_states == {"counting": {"count": 3.0}}, "a skipped step"
    learn_directly(learner, forest, JobConfig(recipe=make_recipe("grpo"), optimizer=RATE), 4)
    assert learn_directly(learner, forest, job, 5)["count"] == 3, "after a batch of another recipe"
    with pytest.raises(RecipeError, match=r"the recipe 'counting': `next_state` returned {'count': inf} instead of"):
        learn_directly(learner, forest, JobConfig(recipe=Counting.model_construct(name="counting", result=math.inf)), 6)


def test_a_policy_that_diverged_leaves_the_state_and_does_not_blame_the_recipe(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    learner, forest = PolicyLearner(policy), build_forest(sampled_rows(policy))
    job = JobConfig(recipe=make_recipe("adaptive_kl"), optimizer=RATE)
    learn_directly(learner, forest, job, 0)
    state = dict(learner.recipe_states)
    diverged = {name: torch.full_like(master, math.nan) for name, master in learner.state()["masters"].items()}
    learner.restore({**learner.state(), "masters": diverged})
    assert learn_directly(learner, forest, job, 1)["weights/finite"] == 0
    assert learner.recipe_states == state


class Measured(PolicyGradient):
    """Keeps what it was given."""

    name: str = "measured"

    @property
    def needs(self) -> Any:
        return frozenset({"proximal", "entropy"})


def outputs_of(policy: Policy, forest: Forest, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the learner computes for the recipe's columns."""
    found: dict[str, Any] = {}
    columns = type(recipe).columns

    def kept(self: Any, batch: TrainingBatch, outputs: Any) -> Any:
        found.update(outputs)
        return columns(self, batch, outputs)

    with monkeypatch.context() as patch:
        patch.setattr(type(recipe), "columns", kept)
        loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=40))
        PolicyLearner(policy).forward_backward(TrainingBatch(0, forest), loss)
    return found


def test_entropy_is_that_of_the_restricted_distribution(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(tiny_folder)
    rows = episodes(policy, restricted=True)
    learner, forest = PolicyLearner(policy), build_forest(rows)
    found = outputs_of(policy, forest, Measured(), monkeypatch)
    assert found["proximal"] == pytest.approx(learner.logprobs(forest).numpy(), abs=1e-5)
    alone = found["proximal"] == 0
    assert alone.any() and (found["entropy"][alone] == 0).all(), "a token without an alternative"
    ids = torch.from_numpy(rows[0].tokens.astype(np.int64))[None]
    with policy.attention("eager"):
        whole: Any = cast(Any, policy.model)(input_ids=ids, use_cache=False)
    logits = whole.logits[0, len(rows[0].tokens) - 1 - len(rows[0]["logprob"]) : -1]
    exact = torch.distributions.Categorical(logits=logits / rows[0]["temperature"]).entropy()
    assert found["entropy"][: len(exact)] == pytest.approx(exact.detach().numpy(), abs=1e-4)


def test_a_teacher_grades_the_tokens(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(tiny_folder)
    learner, forest = PolicyLearner(policy), build_forest(sampled_rows(policy))
    recipe = make_recipe({"name": "distill", "teacher": str(tiny_folder)})
    found = outputs_of(policy, forest, recipe, monkeypatch)
    assert found["teacher"] == pytest.approx(learner.logprobs(forest).numpy(), abs=1e-5)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.mul_(0.9)
    gaps = [learn_directly(learner, forest, JobConfig(recipe=recipe, optimizer=RATE), v, None) for v in range(1)]
    assert gaps[0]["policy/teacher_kl"] == pytest.approx(float((forest["logprob"] - found["teacher"]).mean()), abs=1e-5)


def test_a_backend_without_the_feature_is_refused() -> None:
    job = JobConfig(recipe=make_recipe("ppo"))
    with pytest.raises(ConfigError, match="recipe = 'ppo' needs values, and the embedded backend has"):
        check_capabilities(lambda _: Capabilities(), ServeConfig(job=job), job)
