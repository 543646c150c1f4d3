"""Pins of the learner:

1. every node attends to its path exactly once, however the forest is cut (gradients: `test_gradients.py`);
2. what has no advantage is not computed;
3. the sampler's log-probabilities are the learner's (mismatch near zero);
4. a replay is equal bit by bit, from version 0 or a checkpoint, also if only one of both offloads the optimiser; one
   made under other settings is refused;
5. a batch whose gradient is not finite changes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentjet.compute import checkpoint
from agentjet.compute.attention import cut
from agentjet.compute.checkpoint import seal
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.optimizer import learning_rate
from agentjet.compute.policy import Policy
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.errors import CheckpointError, ConfigError
from agentjet.timeline.forest import build_forest, call_row
from tests.compute.baseline import Double, row_logprobs
from tests.compute.conftest import make_policy, sampled_rows, tokens
from tests.compute.direct import learn_directly
from tests.compute.test_sampler import STATEFUL
from tests.tiny import make_model


def job(recipe: object = "grpo", **settings: object) -> JobConfig:
    optimizer = settings.pop("optimizer", OptimizerConfig(lr=1e-3))
    return JobConfig.model_validate({"recipe": recipe, "optimizer": optimizer, **settings})


def test_every_node_sees_its_path_exactly_once() -> None:
    trunk = tokens(1, 90)
    rows = []
    for i in range(5):
        branch = np.concatenate([trunk, tokens(10 + i % 2, 40), tokens(20 + i, 30)])
        rows.append(call_row(branch, np.full(30, -4.0, np.float32), np.zeros(30, np.int32), 1.0 + i, 1.0, i))
    forest = build_forest(rows)
    nodes = np.arange(forest.num_nodes)
    interval = (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < forest.end[None, :])
    for block_tokens, crossing_tokens in ((1, 1), (7, 20), (32, 100), (256, 128), (10_000, 1)):
        seen = np.zeros_like(interval, int)
        blocks, crossings = cut(forest, block_tokens, crossing_tokens)
        for block in blocks:
            own = slice(block.start, block.stop)
            seen[own, own] += interval[own, own] if block.branched else np.tri(block.stop - block.start, dtype=int)
        for crossing in crossings:
            for start, stop in crossing.runs:
                seen[crossing.start : crossing.stop, start:stop] += 1
        assert (seen == interval).all(), (block_tokens, crossing_tokens)


def test_long_runs_and_deep_branches_attend_as_they_should(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    policy.model.double()
    trunk = tokens(1, 300)
    rows = []
    for i in range(6):
        branch = np.concatenate([trunk, tokens(10 + i % 2, 280), tokens(30 + i, 12), tokens(20 + i, 30)])
        rows.append(call_row(branch, np.full(30, -4.0, np.float32), np.zeros(30, np.int32), 1.0 + i, 1.0, i))
    learner = PolicyLearner(policy)
    with Double():
        ours = learner.logprobs(build_forest(rows))
        assert torch.allclose(ours, torch.cat([row_logprobs(policy, row) for row in rows]), atol=1e-9)


def test_what_has_no_advantage_is_not_computed(policy: Policy) -> None:
    rows = sampled_rows(policy)
    flat = [
        call_row(r.tokens, r["logprob"], r["version"], r["advantage"] if r["sequence"] < 4 else 0.0, 1.0, r["sequence"])
        for r in rows
    ]
    forest = build_forest(flat)
    learner = PolicyLearner(policy)
    assert learn_directly(learner, forest, job(), 0)["forest/tokens_computed"] < 0.6 * forest.num_nodes
    quiet = [call_row(r.tokens, r["logprob"], r["version"], 0.0, 1.0, r["sequence"]) for r in rows]
    assert learn_directly(learner, build_forest(quiet), job(), 1)["forest/tokens_computed"] == 0


@pytest.mark.parametrize(
    "kind, dtype, tolerance",
    [("tiny", "float32", 1e-7), ("tiny", "bfloat16", 1e-2), *((kind, "float32", 1e-7) for kind in STATEFUL)],
)
def test_sampler_and_learner_agree(folder_of: Callable[[str], Path], kind: str, dtype: str, tolerance: float) -> None:
    policy = make_policy(folder_of(kind), dtype=dtype)
    forest = build_forest(sampled_rows(policy, temperature=0.8))
    metrics = learn_directly(PolicyLearner(policy), forest, job(), 0)
    assert metrics["policy/mismatch_kl"] < tolerance
    assert metrics["policy/clip_fraction"] == pytest.approx(0.0, abs=0.05)
    assert metrics["policy/entropy"] > 0


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_metrics_of_the_policy_are_those_of_the_loss_over_every_sampled_token(policy: Policy, loss: str) -> None:
    """Half of the sequences have an advantage, and the clip acts on exactly these: on one token of each, as the others
    compensate for it in the sequence's ratio, or on none for GSPO.
    """
    rows = []
    for r in sampled_rows(policy):
        others = len(r["logprob"]) - 1
        moved = np.array([1.0, *[-1 / others] * others] if others else [0.0], np.float32)
        advantage = 1.0 if r["sequence"] < 4 else 0.0
        rows.append(call_row(r.tokens, r["logprob"] - moved, r["version"], advantage, 1.0, r["sequence"]))
    forest = build_forest(rows)
    bounds = {"clip_low": 0.9, "clip_high": 0.2}  # what compensates for it stays inside
    metrics = learn_directly(PolicyLearner(policy), forest, job({"loss": {"name": loss, **bounds}}), 0)
    clipped = 0 if loss == "gspo" else sum(r["sequence"] < 4 and len(r["logprob"]) > 1 for r in rows)
    assert metrics["policy/clip_fraction"] == pytest.approx(clipped / forest.num_targets)
    assert metrics["policy/entropy"] == pytest.approx(-forest["logprob"].mean())
    quiet = forest.with_columns(advantage=np.zeros_like(forest["advantage"]))
    metrics = learn_directly(PolicyLearner(policy), quiet, job(), 1)
    assert (
        metrics["policy/entropy"] == pytest.approx(-forest["logprob"].mean()) and metrics["policy/clip_fraction"] == 0
    )
    assert "policy/mismatch_kl" not in metrics, "it needs log-probabilities that are not computed"


@pytest.mark.parametrize(
    "kind, dtype, rank, before, after",
    [
        ("tiny", "float32", 0, False, False),
        ("tiny", "float32", 0, True, False),
        ("tiny", "float32", 4, False, True),
        ("tiny", "bfloat16", 0, False, True),
        ("tiny", "bfloat16", 4, True, False),
        ("mistral", "bfloat16", 0, False, False),
        ("mamba", "bfloat16", 0, False, False),
    ],
)
def test_a_replay_from_a_checkpoint_is_equal_bit_by_bit(
    folder_of: Callable[[str], Path], tmp_path: Path, kind: str, dtype: str, rank: int, before: bool, after: bool
) -> None:
    """`before` and `after`: the optimiser is offloaded before the checkpoint is saved, or after it is loaded."""
    settings = job(
        {"mini_batches": 2, "epochs": 2, "kl_coef": 0.01},
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, weight_decay=0.1),
    )
    policy = make_policy(folder_of(kind), dtype=dtype, rank=rank, offload_optimizer=before)
    learner = PolicyLearner(policy)
    batches = [build_forest(sampled_rows(policy, seed=s)) for s in range(4)]
    for version, forest in enumerate(batches):
        if version == 2:
            checkpoint.save(tmp_path / "step_000002", learner, {"policy_version": 2})
        learn_directly(learner, forest, settings, version)
    undisturbed = {name: p.detach().clone() for name, p in policy.trainable().items()}

    revived = make_policy(folder_of(kind), dtype=dtype, rank=rank, offload_optimizer=after)
    second = PolicyLearner(revived)
    state = checkpoint.load(tmp_path / "step_000002", second)
    weights = {id(p) for p in revived.trainable().values()}
    assert any(id(master) in weights for master in second.masters()) == (dtype == "float32" and not after)
    for version in range(state["policy_version"], 4):
        learn_directly(second, batches[version], settings, version)
    for name, p in revived.trainable().items():
        assert torch.equal(p, undisturbed[name]), name


def test_a_gradient_that_is_not_finite_changes_nothing(policy: Policy) -> None:
    rows = sampled_rows(policy)
    rows[0] = call_row(rows[0].tokens, rows[0]["logprob"], rows[0]["version"], math.inf, 1.0, rows[0]["sequence"])
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    learner = PolicyLearner(policy)
    metrics = learn_directly(learner, build_forest(rows), job(), 0)
    assert metrics["optim/skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable().items())
    rows[0] = call_row(rows[0].tokens, rows[0]["logprob"], rows[0]["version"], 1.0, 1.0, rows[0]["sequence"])
    assert learn_directly(learner, build_forest(rows), job(), 1)["optim/skipped_steps"] == 0
    assert not all(torch.equal(p, before[name]) for name, p in policy.trainable().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_nothing_can_be_computed_with_show(tiny_folder: Path, dtype: str) -> None:
    policy = make_policy(tiny_folder, dtype=dtype)
    forest, learner = build_forest(sampled_rows(policy)), PolicyLearner(policy)
    assert learn_directly(learner, forest, job(), 0)["weights/finite"] == 1
    assert learn_directly(learner, forest, job(optimizer=OptimizerConfig(lr=1e38)), 1)["weights/finite"] == 0
    assert learn_directly(learner, forest, job(), 2)["weights/finite"] == 0


ADAPTER = {"lora": {"rank": 4, "alpha": 8}}


@pytest.mark.parametrize(
    ("saved", "changes", "error"),
    [
        ({}, {"rank": 4}, "adapters = False, this server has True"),
        ({}, {"name": "other"}, "model_weights = '{}', this server"),
        (ADAPTER, {"lora": {"rank": 8, "alpha": 8}}, "model.lora.rank = 4, this server has 8"),
        (ADAPTER, {"lora": {"rank": 4, "alpha": 16}}, "model.lora.alpha = 8, this server has 16"),
        (ADAPTER, {"lora": {"rank": 4, "alpha": 8, "target_modules": "q_proj,v_proj"}}, "model.lora.target_modules"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    tiny_folder: Path, tmp_path: Path, saved: dict[str, Any], changes: dict[str, Any], error: str
) -> None:
    policy = make_policy(tiny_folder, **saved)
    checkpoint.save(tmp_path / "step_000000", PolicyLearner(policy), {"policy_version": 0})
    if "name" in changes:
        changes = {"name": str(make_model(tmp_path / "other", seed=1))}
    other = make_policy(tiny_folder, **changes)
    before = {name: p.detach().clone() for name, p in other.trainable().items()}
    with pytest.raises(ConfigError, match=error.format(policy.info.weights)):
        checkpoint.load(tmp_path / "step_000000", PolicyLearner(other))
    assert all(torch.equal(p, before[name]) for name, p in other.trainable().items())
    same = PolicyLearner(make_policy(tiny_folder, **saved))
    assert checkpoint.load(tmp_path / "step_000000", same)["policy_version"] == 0
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "nothing", same)


def replace_trainer(folder: Path, trainer: dict[str, Any]) -> None:
    torch.save(trainer, folder / "trainer.pt")
    state = json.loads((folder / "state.json").read_text())
    seal(folder, {key: state[key] for key in state if key not in ("files", "digest")})


def test_a_trainer_of_version_0_2_continues_bit_by_bit(tiny_folder: Path, tmp_path: Path) -> None:
    """It has the state of the optimiser by number."""
    policy = make_policy(tiny_folder, dtype="bfloat16")
    learner, forest = PolicyLearner(policy), build_forest(sampled_rows(policy))
    learn_directly(learner, forest, job(), 0)
    checkpoint.save(tmp_path / "step_000001", learner, {"policy_version": 1})
    state = learner.state()
    trainer = {"masters": state["masters"], "optimizer": {"state": dict(enumerate(state["moments"].values()))}}
    replace_trainer(tmp_path / "step_000001", trainer)
    learn_directly(learner, forest, job(), 1)
    second = PolicyLearner(make_policy(tiny_folder, dtype="bfloat16"))
    checkpoint.load(tmp_path / "step_000001", second)
    learn_directly(second, forest, job(), 1)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second.masters(), learner.masters(), strict=True))


def test_an_exported_adapter_is_what_peft_loads(tiny_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = make_policy(tiny_folder, rank=4)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.normal_(std=0.1)
    learner = PolicyLearner(policy)
    checkpoint.export(tmp_path / "adapter", learner, adapter=True)
    checkpoint.export(tmp_path / "model", learner)
    ids = torch.from_numpy(tokens(3, 20)).long()[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_folder)
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(input_ids=ids).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(input_ids=ids).logits
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(settings["target_modules"]) > 5 and settings["target_modules"] == sorted(settings["target_modules"])
    assert torch.allclose(adapted, whole, atol=1e-4) and not torch.allclose(adapted, before, atol=1e-2)


def test_weights_of_another_shape_are_a_checkpoint_that_does_not_fit(tiny_folder: Path, tmp_path: Path) -> None:
    policy = make_policy(tiny_folder)
    learner = PolicyLearner(policy)
    checkpoint.save(tmp_path / "step_000000", learner, {"policy_version": 0})
    trainer = learner.state()
    name = next(iter(trainer["masters"]))
    replace_trainer(tmp_path / "step_000000", {**trainer, "masters": {name: torch.zeros(3)}})
    with pytest.raises(CheckpointError, match="does not fit this model"):
        checkpoint.load(tmp_path / "step_000000", learner)


@pytest.mark.parametrize("rank", [0, 4])
def test_an_exported_folder_is_the_policy(tiny_folder: Path, tmp_path: Path, rank: int) -> None:
    from transformers import AutoModelForCausalLM

    policy = make_policy(tiny_folder, rank=rank)
    forest = build_forest(sampled_rows(policy))
    learner = PolicyLearner(policy)
    learn_directly(learner, forest, job(optimizer=OptimizerConfig(lr=1e-2)), 0)
    checkpoint.export(tmp_path / "model", learner)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.from_numpy(tokens(3, 20)).long()[None]
    with torch.no_grad(), policy.attention("eager"):
        merged = policy.model(input_ids=ids).logits
        assert torch.allclose(loaded(input_ids=ids).logits, merged, atol=1e-4)
    ours = make_policy(tmp_path / "model")
    assert ours.info.chat_template == policy.info.chat_template
    assert torch.allclose(PolicyLearner(ours).logprobs(forest), learner.logprobs(forest), atol=1e-4)


def test_schedules() -> None:
    warm = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="linear", total_steps=14, min_lr_ratio=0.1)
    assert [learning_rate(warm, v) for v in (0, 3, 4, 9, 14, 99)] == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1, 0.1])
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", total_steps=10)
    assert [learning_rate(cosine, v) for v in (0, 5, 10)] == pytest.approx([2.0, 1.0, 0.0])
    assert learning_rate(OptimizerConfig(lr=3.0), 1000) == 3.0
