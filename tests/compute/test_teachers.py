"""Teachers, likely tokens and references that move, in the learner. Pinned here:

1. grades and likely tokens of every teacher, in its context, are those of one row per call through `transformers`;
2. the gradient by the likely tokens is that of autograd over the whole loss, in any micro-batches, to 1e-9;
3. a token outside the set of its target has no probability and no gradient;
4. a reference moves as its formula says, and continues bit by bit from a checkpoint, also if the settings change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import ConfigError
from agentjet.recipes.recipe import Need, Recipe, ReferenceMoves, Teaching
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import Forest, Row, build_forest, decode_set
from tests.compute.architectures import make_architecture
from tests.compute.baseline import Double, Weights, another_reference, episodes, relative, row_distributions
from tests.compute.conftest import make_policy, tokens, with_random_adapter
from tests.compute.test_locks import recorded_batch, training_batch
from tests.compute.test_values import host, learn
from tests.tiny import make_model

K = 5
Parameters = dict[str, Any]


class Likely(Recipe):
    """A recipe with a teacher, or with likely tokens alone, whose loss reads all that it can get."""

    name: str = "likely"
    source: str = ""
    top_k: int = K
    top_of: str = "teacher"
    context: bool = False
    whole: bool = False

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"teacher"}) if self.source else frozenset()

    @property
    def teaching(self) -> Any:
        return Teaching((self.source,) * bool(self.source), "", self.top_k, self.top_of, self.context)  # type: ignore[arg-type]

    @property
    def reads(self) -> tuple[str, ...]:
        return ("logprob", "new_top", "teacher_top" if self.source else "old_top", "sequence")

    @property
    def takes_batch(self) -> bool:
        return self.whole

    def token_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return token_losses(logp, columns), {}

    def batch_loss(self, logp: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return token_losses(logp, columns).mean().square() + columns["new_top"].exp().sum(-1).prod(), {}


def token_losses(logp: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """A divergence, and a product with the sampled token."""
    old = columns["teacher_top"] if "teacher_top" in columns else columns["old_top"]
    new = columns["new_top"]
    return (new.exp() * (new - old)).sum(-1) + logp * new[:, 0]


@dataclass(frozen=True)
class Case:
    """A policy with its calls, and the same calls as a teacher sees some of them."""

    policy: Policy
    folder: Path
    rows: list[Row]
    taught: dict[int, Row]

    def batch(self) -> TrainingBatch:
        first = np.cumsum([0, *(row.num_targets for row in self.rows)])
        seen = [
            row.with_columns(target=np.arange(first[number], first[number + 1])) for number, row in self.taught.items()
        ]
        return TrainingBatch(0, build_forest(self.rows), None, {}, build_forest(seen))

    def expected(self, policy: Policy, weights: Weights | None, *, context: bool) -> list[Tensor | None]:
        """The distributions of the teacher for each call; None for a call that it does not grade."""
        rows = [self.taught.get(n) if context else row for n, row in enumerate(self.rows)]
        return [None if row is None else row_distributions(policy, row, weights) for row in rows]


def case_of(policy: Policy, folder: Path) -> Case:
    rows = [row.with_columns(call=number) for number, row in enumerate(episodes(policy))]
    taught = {}
    for number in range(0, len(rows), 2):
        row, before = rows[number], tokens(50 + number % 3, 4 + number % 3)
        assert isinstance(row.at, slice)
        at = slice(row.at.start + len(before), row.at.stop + len(before))
        taught[number] = Row(np.concatenate([before, row.tokens]), at, row.columns)
    return Case(policy, folder, rows, taught)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_model(tmp_path_factory.mktemp("tiny") / "teacher")
    policy = make_policy(folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in policy.trainable().values():
            p.add_(0.02 * torch.randn(p.shape, generator=generator))
    return case_of(policy, folder)


def sampled(rows: list[Row]) -> list[np.ndarray]:
    return [row.tokens[row.at] for row in rows]


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("top_of", ["teacher", "policy"])
@pytest.mark.parametrize("source", ["policy", "reference", "folder"])
def test_every_teacher_grades_in_its_context(case: Case, source: str, top_of: str, context: bool) -> None:
    learner, reference = PolicyLearner(case.policy), another_reference(case.policy)
    learner._reference = {**reference}
    recipe = Likely(source=str(case.folder) if source == "folder" else source, top_of=top_of, context=context)
    found = learner._outputs(case.batch(), recipe, 40)
    teacher = make_policy(case.folder) if source == "folder" else case.policy
    with torch.no_grad():
        expected = case.expected(teacher, reference if source == "reference" else None, context=context)
        own = case.expected(case.policy, None, context=False)
    start = 0
    for logps, of_policy, ids in zip(expected, own, sampled(case.rows), strict=True):
        part = {name: values[start : start + len(ids)] for name, values in found.items()}
        start += len(ids)
        if logps is None:
            assert np.isnan(part["teacher"]).all() and np.isnan(part["teacher_top"]).all()
            continue
        assert part["teacher"] == pytest.approx(logps[range(len(ids)), ids].numpy(), abs=2e-5)
        chosen = of_policy if top_of == "policy" else logps
        assert chosen is not None
        likely, likely_ids = chosen.topk(K)
        assert np.array_equal(part["top_ids"], likely_ids.numpy())
        assert part["teacher_top"] == pytest.approx(logps.gather(1, likely_ids).numpy(), abs=2e-5)
        if top_of == "policy":
            assert part["old_top"] == pytest.approx(likely.numpy(), abs=2e-5)
    assert start == len(found["teacher"]) and ("old_top" in found) == (top_of == "policy")
    assert found["top_ids"].dtype == np.int32


def test_without_a_context_nothing_is_graded(case: Case) -> None:
    batch = TrainingBatch(0, build_forest(case.rows))
    found = PolicyLearner(case.policy)._outputs(batch, Likely(source="policy", context=True), 40)
    assert np.isnan(found["teacher"]).all() and found["teacher_top"].shape == (batch.forest.num_targets, K)
    without = PolicyLearner(case.policy)._outputs(batch, Likely(source="http://gone/v1"), 40)
    assert np.isnan(without["teacher"]).all() and without["top_ids"].shape == (batch.forest.num_targets, K)
    nothing = PolicyLearner(case.policy)._outputs(TrainingBatch(0, build_forest([])), Likely(source="policy"), 40)
    assert nothing["teacher"].shape == (0,) and nothing["teacher_top"].shape == (0, K)


def test_grades_of_an_endpoint_are_taken_as_they_are(case: Case) -> None:
    forest = build_forest(case.rows)
    given = {
        "teacher": np.where(np.arange(forest.num_targets) % 3, -0.5, np.nan).astype(np.float32),
        "top_ids": np.tile(np.arange(3, dtype=np.int32), (forest.num_targets, 1)),
        "teacher_top": np.full((forest.num_targets, 3), -1.5, np.float32),
    }
    batch = TrainingBatch(0, forest.with_columns(**given))
    recipe = make_recipe({"name": "distill_top_k", "teacher": "http://here/v1", "top_k": 3})
    outputs = PolicyLearner(case.policy).forward_backward(batch, LossSpec.of(JobConfig(recipe=recipe)))
    assert outputs.metrics["teacher/graded"] == pytest.approx(np.mean(~np.isnan(given["teacher"])))
    assert outputs.metrics["policy/teacher_divergence"] > 0
    with pytest.raises(ConfigError, match="top_k = 999999"):
        PolicyLearner(case.policy)._outputs(batch, Likely(top_k=999_999), 40)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = make_architecture(tmp_path_factory.mktemp("llama") / "double", "llama")
    policy = make_policy(folder)
    policy.model.double()
    with Double():
        yield case_of(policy, folder)


def flat_gradient(learner: PolicyLearner) -> Tensor:
    found = torch.cat([master.grad.flatten() for master in learner.masters() if master.grad is not None])
    for master in learner.masters():
        master.grad = None
    return found


@pytest.mark.parametrize("micro_batch_tokens", [100_000, 50])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("source", ["", "policy"])
def test_likely_tokens_have_a_gradient(double: Case, source: str, whole: bool, micro_batch_tokens: int) -> None:
    recipe = Likely(source=source, top_of="policy", whole=whole)
    learner, batch = PolicyLearner(double.policy), TrainingBatch(0, build_forest(double.rows))
    with Double():
        loss = LossSpec.of(JobConfig(recipe=recipe, micro_batch_tokens=micro_batch_tokens))
        learner.forward_backward(batch, loss)
        ours = flat_gradient(learner)
        rows = [row_distributions(double.policy, row) for row in double.rows]
        logps = torch.cat(rows)
        ids = logps.detach().topk(K).indices
        new = logps.gather(1, ids)
        own = torch.from_numpy(np.concatenate(sampled(double.rows)).astype(np.int64))
        stored = new.detach().numpy().astype(np.float32).astype(np.float64)
        columns = {"new_top": new, "old_top": torch.from_numpy(stored)}
        logp = logps.gather(1, own[:, None])[:, 0]
        if whole:
            total, _ = recipe.batch_loss(logp, columns)
        else:
            total = token_losses(logp, columns).sum() * float(np.float32(1 / len(logp)))
        truth = torch.cat(
            [one.flatten() for one in torch.autograd.grad(total, list(double.policy.trainable().values()))]
        )
        assert float(truth.norm()) > 0 and truth.dtype == torch.float64
    assert relative(ours, truth) <= 1e-9


def test_tokens_outside_the_set_have_no_probability(case: Case) -> None:
    forest = build_forest(episodes(case.policy, restricted=True))
    found = PolicyLearner(case.policy)._outputs(TrainingBatch(0, forest), Likely(top_of="policy"), 40)
    outside = np.zeros(found["old_top"].shape, bool)
    for target in np.flatnonzero(forest["support"] >= 0):
        members = decode_set(forest.sets[forest["support"][target]], case.policy.vocabulary)
        outside[target] = ~members[found["top_ids"][target]]
    assert outside.any() and np.array_equal(found["old_top"] == -100, outside)
    full = outside.any(1)
    assert np.exp(found["old_top"][full]).sum(1) == pytest.approx(np.ones(full.sum()), abs=1e-5)
    recipe = make_recipe({"name": "distill_top_k", "teacher": str(case.folder), "top_k": K, "loss": {"beta": 0.0}})
    learner = PolicyLearner(case.policy)
    metrics = learner.forward_backward(TrainingBatch(0, forest), LossSpec.of(JobConfig(recipe=recipe))).metrics
    gradient = flat_gradient(learner)
    assert 0 < metrics["policy/teacher_divergence"] < 5 and bool(gradient.isfinite().all()) and bool(gradient.any())


# ---- references that move --------------------------------------------------------------------------------------------

KINDS: dict[str, Parameters] = {"full": {}, "bfloat16": {"dtype": "bfloat16"}, "lora": {"rank": 4}}


def reference_job(**changes: Any) -> JobConfig:
    recipe = make_recipe({"name": "grpo", "kl_coef": 0.1, **changes})
    return JobConfig(recipe=recipe, optimizer=OptimizerConfig(lr=1e-2))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}


def reference_of(learner: PolicyLearner, forest: Forest) -> np.ndarray:
    with learner._reference_weights():
        return learner.logprobs(forest).float().numpy()


@pytest.mark.parametrize(("every", "mix"), [(1, 1.0), (2, 0.3), (1, 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_moves_by_its_formula(tiny_folder: Path, kind: str, every: int, mix: float) -> None:
    hosted = host(tiny_folder, **KINDS[kind])
    learner, forest = hosted.learner, training_batch(recorded_batch(0), 0).forest
    names = list(learner._masters)
    expected = copied(learner._masters)  # Version 0
    of_version_0, present = reference_of(learner, forest), learner.logprobs(forest).float().numpy()
    assert of_version_0 == pytest.approx(present, abs=1e-6)
    for version in range(3):
        learn(hosted, reference_job(reference_every=every, reference_mix=mix), version)
        if (version + 1) % every == 0:
            for name in names:
                if kind == "lora" and "lora_A" in name and version + 1 == every:
                    expected[name] = learner._masters[name].detach().float().clone()
                expected[name].lerp_(learner._masters[name].detach().float(), mix)
    state = learner.state()["reference"]
    for name in names:
        assert torch.allclose(state[name], expected[name], rtol=1e-6, atol=1e-9), name
    before = copied(learner.policy.trainable())
    found = reference_of(learner, forest)
    assert all(torch.equal(before[name], p.detach().float()) for name, p in learner.policy.trainable().items())
    assert np.abs(found - of_version_0).max() > (1e-4 if mix > 0.1 else 1e-6)
    if mix == every == 1:
        assert found.tolist() == learner.logprobs(forest).float().numpy().tolist()
    other = make_policy(tiny_folder, **KINDS[kind])
    with torch.no_grad():
        for name, p in other.trainable().items():
            p.copy_(expected[name])
    again = PolicyLearner(other).logprobs(forest).float().numpy()
    assert found == pytest.approx(again, abs=1e-5 if kind != "bfloat16" else 1e-2)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_moved_reference_continues_bit_by_bit(tiny_folder: Path, tmp_path: Path, kind: str, offload: bool) -> None:
    """With settings that change after the checkpoint: it stays where it is, then moves again."""
    first = host(tiny_folder, **KINDS[kind])
    for version in range(2):
        learn(first, reference_job(reference_every=2, reference_mix=0.3), version)
    first.save(tmp_path / "saved")
    later: list[Parameters] = [{}, {"reference_every": 1, "reference_mix": 0.5}]

    def go_on(hosted: Any) -> list[dict[str, float]]:
        return [learn(hosted, reference_job(**one), 2 + number) for number, one in enumerate(later)]

    undisturbed = go_on(first)
    again = host(tiny_folder, **KINDS[kind], offload_optimizer=offload)
    again.load(tmp_path / "saved")
    assert go_on(again) == undisturbed
    ours, theirs = first.learner.state(), again.learner.state()
    assert ours["reference"].keys() == theirs["reference"].keys()
    assert all(torch.equal(ours["reference"][name], theirs["reference"][name]) for name in ours["reference"])
    assert first.save(tmp_path / "a").digest == again.save(tmp_path / "b").digest
    assert json.loads((tmp_path / "saved" / "state.json").read_text())["moved_reference"] is True
    new = host(tiny_folder, **KINDS[kind])
    new.save(tmp_path / "new")
    again.load(tmp_path / "new")
    assert "reference" not in again.learner.state(), "an older checkpoint has the reference of version 0"


def test_a_failure_moves_nothing_and_a_skipped_batch_keeps_its_turn(tiny_folder: Path) -> None:
    policy = with_random_adapter(make_policy(tiny_folder, rank=4), 0)
    learner, batch = PolicyLearner(policy), training_batch(recorded_batch(0), 0)
    job = reference_job(reference_every=1)
    learner.forward_backward(batch, LossSpec.of(job))
    with pytest.raises(ConfigError):
        learner.forward_backward(batch, LossSpec.of(JobConfig(recipe=Likely(top_k=999_999))))
    assert not learner.reference_moved
    learner.optim_step(job.optimizer, 0)
    assert learner.reference_moved and learner.reference_moved == bool(learner.state()["reference"])
    assert make_recipe({"name": "sdft"}).reference_moves == ReferenceMoves(1, 0.01)
