"""Models with windows, chunks, caps, sinks and states, and models that do not share prefixes. Pinned here:

1. a trial detects what a config does not show (reasons by architecture: `test_models`);
2. learning gives the gradient of one row per call, cut into micro-batches or not: on a forest with each node computed
   once, or with each target in exactly one row within the budget of a micro-batch;
3. a cache that is not exact is not used (their sampler: `test_sampler`);
4. logits equal the model's own, with soft caps and scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Cache

from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import prefix_sharing_obstacles
from agentjet.compute.passes import RowPass
from agentjet.compute.policy import distance, find_logit_transform, tolerance
from agentjet.compute.protocol import LossSpec
from agentjet.compute.rank import Rank
from agentjet.compute.sampler import ModelSampler
from agentjet.config import JobConfig, OptimizerConfig, SamplerConfig
from agentjet.errors import ConfigError
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import ancestors, build_forest, call_row, chunk_forest
from agentjet.types import Op, PolicyId, SamplingParams
from tests.compute.architectures import ROWS
from tests.compute.baseline import (
    Baseline,
    Double,
    another_reference,
    episodes,
    in_double,
    learner_gradient,
    policy_gradient,
    relative,
    row_logprobs,
)
from tests.compute.conftest import make_endless, make_policy, model_config, run, sampled_rows, tokens
from tests.compute.direct import learn_directly


def test_a_layer_that_attends_twice_shares_no_prefixes(folder_of: Callable[[str], Path]) -> None:
    """The cache has one place for a layer's keys, so the second call would overwrite those of the first."""
    policy = make_policy(folder_of("llama"))
    for layer in cast(Any, policy.decoder).layers:
        attend = layer.self_attn.forward

        def twice(hidden_states: Tensor, attend: Any = attend, **given: Any) -> Any:
            return attend(hidden_states=hidden_states + attend(hidden_states=hidden_states, **given)[0], **given)

        layer.self_attn.forward = twice
    with policy.attention("eager"):
        assert "attend once each" in (prefix_sharing_obstacles(policy)[0] or "")


@pytest.mark.parametrize("kind", ["granite", "falcon_h1", "gemma2", "llama"])
def test_logits_end_as_the_models_own(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_policy(folder_of(kind))
    ids = torch.from_numpy(tokens(1, 30).astype(np.int64))[None]
    with torch.no_grad(), policy.attention("eager"):
        hidden = policy.decoder(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.allclose(policy.head(hidden), policy.model(input_ids=ids, use_cache=False).logits, atol=1e-6)
        bare = torch.allclose(policy._head(hidden), policy.model(input_ids=ids, use_cache=False).logits, atol=1e-6)
    assert bare == (kind == "llama")


def test_logits_that_are_no_product_are_refused(folder_of: Callable[[str], Path]) -> None:
    policy = make_policy(folder_of("mistral"))
    policy._head = torch.nn.Linear(32, policy.vocabulary)
    with (
        policy.attention(policy.own_attention),
        pytest.raises(ConfigError, match=r"model\.name = .*its logits are not the product"),
    ):
        find_logit_transform(policy)


@pytest.mark.parametrize(
    ("part", "change", "counts_as_rounding"),
    [
        (np.s_[:], 0.035, True),  # SmolLM2 in bfloat16 on a CPU with AMX, as are the next two
        (np.s_[2], None, True),
        (np.s_[5, 77], 8.0, True),
        (np.s_[2], 0.12, False),  # the smallest of a position that is off by one
        (np.s_[:], 0.1, False),
    ],
)
def test_rounding_is_told_from_mistakes(part: Any, change: float | None, counts_as_rounding: bool) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 4, (21, 49_152))
    other = logits.copy()
    other[part] += 0.8 if change is None else 4 * change * rng.normal(size=logits[part].shape)
    ours, theirs = torch.from_numpy(other), torch.from_numpy(logits)
    assert (distance(ours, theirs) <= tolerance(torch.bfloat16, theirs)) == counts_as_rounding
    assert (distance(ours, theirs) <= tolerance(torch.float32, theirs)) == (change is None)


@pytest.mark.parametrize("kind", ROWS)
def test_the_gradient_is_that_of_one_row_per_call(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_policy(folder_of(kind))
    rows = episodes(policy, restricted=kind == "lfm2")
    in_double(policy)
    reference = another_reference(policy)
    clip, gspo = (
        policy_gradient({"loss": loss, "aggregation": "sequence_mean", "kl_coef": kl})
        for loss, kl in (("clip", 0.1), ("gspo", 0.0))
    )
    with Double():
        baseline = Baseline(policy, rows, reference)
        whole = learner_gradient(policy, build_forest(rows), clip, reference)
        cut = learner_gradient(policy, build_forest(rows), gspo, reference, micro_batch_tokens=60)
    # Gates of a recurrence and scores of a router are in float32 in any case.
    bound = 1e-7 if kind in ("recurrent_gemma", "deepseek_v3") else 1e-9
    assert relative(whole, baseline.gradient(clip)) <= bound
    assert relative(cut, baseline.gradient(gspo)) <= bound


def test_rows_are_timelines_within_the_budget(folder_of: Callable[[str], Path]) -> None:
    policy = make_policy(folder_of("mistral"))
    rows = [*episodes(policy), *sampled_rows(policy, groups=1, repeats=2, turns=3)]
    forest = build_forest(rows)
    timelines = {tuple(row.tokens) for row in rows}
    timelines = {t for t in timelines if not any(o != t and o[: len(t)] == t for o in timelines)}
    one_pass = RowPass(policy)
    with torch.no_grad():
        expected = torch.cat([row_logprobs(policy, row) for row in rows])
    for budget in (16, 60, 200, 10_000):
        seen = np.zeros(forest.num_targets, int)
        found: list[tuple[int, ...]] = []
        for piece, targets in one_pass.pieces(forest, budget):
            leaves = np.flatnonzero(piece.end == np.arange(piece.num_nodes) + 1)
            assert len(leaves) == 1 or one_pass.num_computed(piece) <= budget
            found += [tuple(piece.tokens[[*ancestors(piece, leaf), leaf]]) for leaf in leaves]
            seen[targets] += 1
            logprobs = PolicyLearner(policy).logprobs(piece)
            assert torch.allclose(logprobs, expected[torch.from_numpy(targets)], atol=1e-5)
        assert (seen == 1).all()
        assert sorted(found) == sorted(timelines)


@pytest.mark.parametrize("kind", ROWS)
def test_tokens_computed_are_those_of_the_forest_or_of_padded_rows(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = make_policy(folder_of(kind))
    forest = build_forest(episodes(policy))
    leaves = np.flatnonzero(forest.end == np.arange(forest.num_nodes) + 1)
    lengths = forest.depth[leaves] + 1
    together = learn_directly(PolicyLearner(policy), forest, JobConfig(), 0)["forest/tokens_computed"]
    apart = learn_directly(PolicyLearner(policy), forest, JobConfig(micro_batch_tokens=16), 1)["forest/tokens_computed"]
    if policy.learns_forests:
        assert together == forest.num_nodes
        chunks = chunk_forest(forest, 16)
        assert len(chunks) > 3 and apart == sum(chunk.num_nodes for chunk, _ in chunks)
    else:
        assert together == len(leaves) * lengths.max()
        assert apart == lengths.sum() > forest.num_nodes


def test_a_layer_with_another_window_than_its_config_has_is_not_a_forest(folder_of: Callable[[str], Path]) -> None:
    """The trial is shorter than a window, so it cannot show one."""
    policy = make_policy(folder_of("gemma3_window"))
    cast(Any, policy.decoder).layers[0].self_attn.sliding_window = 7
    with policy.attention(policy.own_attention):
        learning, sampling = prefix_sharing_obstacles(policy)
    assert learning == sampling == ("layer 0 computes a window of 7, and its config lists a window of 8")


@pytest.mark.parametrize(
    ("kind", "reason"), [("mistral", "its logits differ"), ("recurrent_gemma", r"(ValueError: only LinearAttention")]
)
def test_a_cache_that_gives_other_numbers_or_fails_is_not_used(
    folder_of: Callable[[str], Path],
    kind: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model that forgets what came before the tokens it is given, and one whose cache raises."""
    policy = make_endless(folder_of(kind))
    policy.info = dataclasses.replace(policy.info, shares_prefixes=False)
    whole = policy.decoder.forward

    def lost(*_: Any) -> int:
        raise ValueError("only LinearAttention layers")

    if kind == "mistral":
        monkeypatch.setattr(policy.decoder, "forward", lambda past_key_values=None, **given: whole(**given))
    else:
        monkeypatch.setattr(Cache, "get_seq_length", lost)
    sampler = ModelSampler(policy, 4, 4096)
    assert "no usable cache between tokens" in caplog.text and reason in caplog.text
    prompt = tokens(1, 20)
    chosen, logprobs = run(sampler, {0: (prompt, SamplingParams(max_tokens=6, seed=1))})[0]
    row = call_row(np.concatenate([prompt, np.int32(chosen)]), np.float32(logprobs), np.zeros(6, np.int32), 1.0, 1.0, 0)
    with torch.no_grad():
        assert logprobs == pytest.approx(row_logprobs(policy, row).numpy(), abs=1e-4)


def test_a_worker_samples_and_learns_such_a_model(folder_of: Callable[[str], Path]) -> None:
    model = model_config(folder_of("mamba"))
    sent: list[Any] = []
    worker, policy = Rank(sent.append), PolicyId()
    info = worker.handle("add", policy, model, SamplerConfig())
    assert info.shares_prefixes and info.context_length == 8192

    def sample() -> tuple[list[float], set[int]]:
        sent.clear()
        worker.handle("sample", policy, 1, tokens(1, 9), SamplingParams(max_tokens=5, seed=3))
        while not worker.policies[policy].sampler.is_idle:
            worker.sample_step()
        pieces = [piece for message in sent for _, piece in message]
        return [logp for piece in pieces for logp in piece.logprobs], {piece.policy_version for piece in pieces}

    before = sample()
    forest = build_forest(sampled_rows(make_policy(folder_of("mamba")), groups=1))
    batch, loss = TrainingBatch(0, forest), LossSpec.of(JobConfig())
    worker.handle("load_batch", policy, batch)
    outputs = worker.handle("forward_backward", policy, Op.of(policy, 0), batch.id, loss)
    assert outputs.metrics["forest/tokens_computed"] >= forest.num_nodes
    worker.handle("optim_step", policy, Op.of(policy, 1), OptimizerConfig(lr=1e-2))
    worker.handle("publish", policy, 1)
    after = sample()
    assert (before[1], after[1]) == ({0}, {1}) and before[0] != after[0]
