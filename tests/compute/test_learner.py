"""Pins of the learner:

1. forest = one row per call, for loss and gradient, for every loss and aggregation, in float64 to 1e-9;
2. cutting a batch into micro-batches changes nothing; mini-batches hold whole sequences;
3. the sampler's log-probabilities are the learner's (mismatch near zero);
4. a replay from a checkpoint is equal bit by bit;
5. a batch whose gradient is not finite changes nothing.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.compute.embedded import checkpoint
from agentjet.compute.embedded.learner import Learner, learning_rate
from agentjet.compute.embedded.model import Policy
from agentjet.compute.embedded.tree_attention import blocks
from agentjet.config import AlgorithmConfig, JobConfig, OptimizerConfig
from agentjet.errors import CheckpointError
from agentjet.timeline.forest import Forest, Row, build_forest, select, split
from tests.compute.conftest import make_policy, sampled_rows, tokens

ALGORITHMS = [
    AlgorithmConfig(
        loss=loss,
        aggregation=aggregation,
        constant=7 if aggregation == "constant" else 0,
        kl_coef=kl,
        dual_clip=3.0 if kl else 0,
    )
    for loss in ("clip", "gspo", "cispo")
    for aggregation, kl in (("token_mean", 0.0), ("sequence_mean", 0.1), ("constant", 0.0))
]


def job(algorithm: AlgorithmConfig | None = None, **settings: object) -> JobConfig:
    optimizer = settings.pop("optimizer", OptimizerConfig(lr=1e-3))
    return JobConfig.model_validate({"algorithm": algorithm or AlgorithmConfig(), "optimizer": optimizer, **settings})


def in_double(policy: Policy) -> None:
    """Float64 throughout: `transformers` computes norms in float32 whatever the weights are, so theirs are replaced."""
    policy.model.double()
    for module in policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_norm, module)


def _norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return module.weight * hidden * (hidden.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()


def gradients(
    policy: Policy, forests: list[Forest], algorithm: AlgorithmConfig, *, micro_batch_tokens: int = 100_000
) -> torch.Tensor:
    """The flat gradient of one mini-batch given as forests whose targets together are the batch."""
    learner = Learner(policy)
    reference = policy.original_weights()
    learner._reference = {name: value.to(policy.dtype) + 0.05 for name, value in reference.items()}  # one that differs
    captured: list[torch.Tensor] = []

    def capture(optimizer: OptimizerConfig) -> float:
        captured.append(torch.cat([m.grad.flatten() for m in learner._masters.values()]))
        learner._optimizer.zero_grad()
        return 1.0

    learner._apply = capture  # type: ignore[method-assign]
    (forest,) = forests
    learner.learn(forest, job(algorithm, micro_batch_tokens=micro_batch_tokens), 0)
    return captured[0]


def row_forest(rows: list[Row]) -> Forest:
    """The baseline: every call a tree of its own, nothing shared."""
    singles = [build_forest([row]) for row in rows]
    offsets = np.cumsum([0] + [f.num_nodes for f in singles])
    return Forest(
        tokens=np.concatenate([f.tokens for f in singles]),
        parent=np.concatenate(
            [np.where(f.parent < 0, -1, f.parent + o) for f, o in zip(singles, offsets, strict=False)]
        ).astype(np.int32),
        end=np.concatenate([f.end + o for f, o in zip(singles, offsets, strict=False)]).astype(np.int32),
        depth=np.concatenate([f.depth for f in singles]),
        node=np.concatenate([f.node + o for f, o in zip(singles, offsets, strict=False)]).astype(np.int32),
        advantage=np.concatenate([f.advantage for f in singles]),
        logprob=np.concatenate([f.logprob for f in singles]),
        temperature=np.concatenate([f.temperature for f in singles]),
        version=np.concatenate([f.version for f in singles]),
        sequence=np.concatenate([f.sequence for f in singles]),
        num_sequences=len({row.sequence for row in rows}),
        num_row_tokens=sum(len(row.tokens) for row in rows),
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: f"{a.loss}-{a.aggregation}")
def test_the_forests_gradient_is_that_of_one_row_per_call(tiny_folder: Path, algorithm: AlgorithmConfig) -> None:
    policy = make_policy(tiny_folder)
    rows = sampled_rows(policy, temperature=0.9)
    in_double(policy)
    forest = build_forest(rows)
    assert forest.tree_token_ratio > 2
    ours = gradients(policy, [forest], algorithm)
    baseline = gradients(policy, [row_forest(rows)], algorithm)
    assert float((ours - baseline).norm() / baseline.norm()) < 1e-9


def test_branches_without_advantage_are_not_computed_and_change_nothing(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    rows = sampled_rows(policy)
    flat = [
        Row(r.tokens, r.logprobs, r.versions, r.advantage if r.sequence < 4 else 0.0, 1.0, r.sequence) for r in rows
    ]
    in_double(policy)
    for algorithm in (ALGORITHMS[0], AlgorithmConfig(loss="gspo", aggregation="sequence_mean")):
        computed = gradients(policy, [build_forest(flat)], algorithm)
        whole = gradients(policy, [build_forest(flat)], algorithm.model_copy(update={"kl_coef": 1e-300}))
        assert float((computed - whole).norm() / whole.norm()) < 1e-9
    learner = Learner(policy)
    forest = build_forest(flat)
    assert learner.learn(forest, job(), 0)["forest/tokens_computed"] < 0.6 * forest.num_nodes
    quiet = [Row(r.tokens, r.logprobs, r.versions, 0.0, 1.0, r.sequence) for r in rows]
    assert learner.learn(build_forest(quiet), job(), 1)["forest/tokens_computed"] == 0


def test_micro_batches_change_nothing(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    forest = build_forest(sampled_rows(policy))
    in_double(policy)
    for algorithm in (ALGORITHMS[0], ALGORITHMS[4]):
        whole = gradients(policy, [forest], algorithm)
        cut = gradients(policy, [forest], algorithm, micro_batch_tokens=50)
        assert float((whole - cut).norm() / whole.norm()) < 1e-9


def test_long_runs_and_deep_branches_attend_as_they_should(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    in_double(policy)
    trunk = tokens(1, 90)
    rows = []
    for i in range(5):
        branch = np.concatenate([trunk, tokens(10 + i % 2, 40), tokens(20 + i, 30)])
        rows.append(Row(branch, np.full(30, -4.0, np.float32), np.zeros(30, np.int32), 1.0 + i, 1.0, i))
    forest = build_forest(rows)
    learner = Learner(policy)
    assert torch.allclose(learner.logprobs(forest), learner.logprobs(row_forest(rows)), atol=1e-9)
    for size in (1, 7, 32, 10_000):
        covered = np.zeros(forest.num_nodes, int)
        for block in blocks(forest, size):
            covered[block.start : block.stop] += 1
            path = block.ancestors
            assert all(p <= block.start < forest.end[p] for p in path)
        assert (covered == 1).all()


def test_split_and_select_keep_every_target_in_its_context(policy: Policy) -> None:
    forest = build_forest(sampled_rows(policy))
    learner = Learner(policy)
    whole = learner.logprobs(forest).numpy()
    seen = np.zeros(forest.num_targets, int)
    for piece, targets in split(forest, 40):
        seen[targets] += 1
        assert learner.logprobs(piece).numpy() == pytest.approx(whole[targets], abs=1e-5)
    assert (seen == 1).all()
    keep = forest.sequence % 2 == 0
    assert learner.logprobs(select(forest, keep)).numpy() == pytest.approx(whole[keep], abs=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-7), ("bfloat16", 1e-2)])
def test_sampler_and_learner_agree(tiny_folder: Path, dtype: str, tolerance: float) -> None:
    policy = make_policy(tiny_folder, dtype=dtype)
    forest = build_forest(sampled_rows(policy, temperature=0.8))
    metrics = Learner(policy).learn(forest, job(), 0)
    assert metrics["policy/mismatch_kl"] < tolerance
    assert metrics["policy/clip_fraction"] == pytest.approx(0.0, abs=0.05)
    assert metrics["policy/entropy"] > 0


@pytest.mark.parametrize("rank", [0, 4])
def test_learning_raises_what_was_rewarded(tiny_folder: Path, rank: int) -> None:
    policy = make_policy(tiny_folder, dtype="bfloat16", rank=rank)
    rows = sampled_rows(policy)
    forest = build_forest(rows)
    learner = Learner(policy)
    before = learner.logprobs(forest).float().numpy()
    for version in range(3):
        learner.learn(forest, job(optimizer=OptimizerConfig(lr=3e-3)), version)
    change = learner.logprobs(forest).float().numpy() - before
    assert change[forest.advantage > 0.5].mean() > change[forest.advantage < -0.5].mean() + 0.01


@pytest.mark.parametrize("dtype, rank", [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_a_replay_from_a_checkpoint_is_equal_bit_by_bit(
    tiny_folder: Path, tmp_path: Path, dtype: str, rank: int
) -> None:
    settings = job(
        AlgorithmConfig(mini_batches=2, epochs=2, kl_coef=0.01),
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, weight_decay=0.1),
    )
    policy = make_policy(tiny_folder, dtype=dtype, rank=rank)
    learner = Learner(policy)
    batches = [build_forest(sampled_rows(policy, seed=s)) for s in range(4)]
    for version, forest in enumerate(batches):
        if version == 2:
            checkpoint.save(tmp_path / "step_000002", policy, learner, {"policy_version": 2})
        learner.learn(forest, settings, version)
    undisturbed = {name: p.detach().clone() for name, p in policy.trainable().items()}

    revived = make_policy(tiny_folder, dtype=dtype, rank=rank)
    second = Learner(revived)
    state = checkpoint.load(tmp_path / "step_000002", revived, second)
    for version in range(state["policy_version"], 4):
        second.learn(batches[version], settings, version)
    for name, p in revived.trainable().items():
        assert torch.equal(p, undisturbed[name]), name


def test_a_gradient_that_is_not_finite_changes_nothing(policy: Policy) -> None:
    rows = sampled_rows(policy)
    rows[0] = Row(rows[0].tokens, rows[0].logprobs, rows[0].versions, math.inf, 1.0, rows[0].sequence)
    before = {name: p.detach().clone() for name, p in policy.trainable().items()}
    learner = Learner(policy)
    metrics = learner.learn(build_forest(rows), job(), 0)
    assert metrics["optim/skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in policy.trainable().items())
    rows[0] = Row(rows[0].tokens, rows[0].logprobs, rows[0].versions, 1.0, 1.0, rows[0].sequence)
    assert learner.learn(build_forest(rows), job(), 1)["optim/skipped_steps"] == 0
    assert not all(torch.equal(p, before[name]) for name, p in policy.trainable().items())


def test_a_checkpoint_of_another_model_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    policy = make_policy(tiny_folder)
    checkpoint.save(tmp_path / "step_000000", policy, Learner(policy), {"policy_version": 0})
    other = make_policy(tiny_folder, rank=4)
    with pytest.raises(CheckpointError, match="adapters = False, this server True"):
        checkpoint.load(tmp_path / "step_000000", other, Learner(other))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "nothing", policy, Learner(policy))


@pytest.mark.parametrize("rank", [0, 4])
def test_an_exported_folder_is_the_policy(tiny_folder: Path, tmp_path: Path, rank: int) -> None:
    from transformers import AutoModelForCausalLM

    policy = make_policy(tiny_folder, rank=rank)
    forest = build_forest(sampled_rows(policy))
    learner = Learner(policy)
    learner.learn(forest, job(optimizer=OptimizerConfig(lr=1e-2)), 0)
    checkpoint.export(tmp_path / "model", policy)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.from_numpy(tokens(3, 20)).long()
    again = make_policy(tmp_path / "model")
    with torch.no_grad():
        expected = loaded(input_ids=ids[None]).logits.log_softmax(-1)
    ours = make_policy(tmp_path / "model")
    assert ours.card.chat_template == policy.card.chat_template == again.card.chat_template
    plain = Learner(ours).logprobs(forest)
    assert torch.allclose(plain, learner.logprobs(forest), atol=1e-4)
    assert expected.shape[-1] == policy.vocabulary


def test_schedules() -> None:
    warm = OptimizerConfig(lr=1.0, warmup_steps=4, schedule="linear", total_steps=14, min_lr_ratio=0.1)
    assert [learning_rate(warm, v) for v in (0, 3, 4, 9, 14, 99)] == pytest.approx([0.2, 0.8, 1.0, 0.55, 0.1, 0.1])
    cosine = OptimizerConfig(lr=2.0, schedule="cosine", total_steps=10)
    assert [learning_rate(cosine, v) for v in (0, 5, 10)] == pytest.approx([2.0, 1.0, 0.0])
    assert learning_rate(OptimizerConfig(lr=3.0), 1000) == 3.0
