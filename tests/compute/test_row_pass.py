"""Models that do not share prefixes. Pinned here:

1. their config or a trial detects them, with one log line that names the reason; other models are not affected;
2. learning one row per timeline gives the gradient of one row per call: each target in exactly one row, within the
   budget of a micro-batch;
3. their sampler agrees with the learner, and drops its state when the weights change;
4. logits equal the model's own, with soft caps and scales.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.embedded import checkpoint
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy, prefix_sharing_obstacle
from agentjet.compute.embedded.passes import RowPass
from agentjet.compute.embedded.policy import Policy, find_logit_transform
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.compute.embedded.token_sampling import score
from agentjet.compute.embedded.worker import Worker
from agentjet.compute.protocol import LossSpec
from agentjet.config import JobConfig, ModelConfig, OptimizerConfig, SamplerConfig
from agentjet.errors import ConfigError, OutOfCache
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import ancestors, build_forest, call_row
from agentjet.types import Op, PolicyId, SamplingParams
from tests.compute.architectures import BRANCHING, ROWS, make_architecture
from tests.compute.baseline import (
    Baseline,
    Double,
    another_reference,
    episodes,
    learner_gradient,
    policy_gradient,
    relative,
    row_logprobs,
)
from tests.compute.conftest import make_policy, run, sampled_rows, tokens

REASONS = {
    "mistral": "layers of kind sliding_attention of 8 in a context of 512",
    "gemma3_window": "layers of kind sliding_attention of 8 in a context of 512",
    "gemma2": "attention with softcap",
    "gpt_oss": "attention with s_aux",
    "mamba": "layers of kind linear_attention",
    "lfm2": "layers of kind conv",
    "qwen3_next": "layers of kind linear_attention",
    "falcon_h1": "layers of kind hybrid",
    "bamba": "layers of kind linear_attention",
    "llama4": "layers of kind chunked_attention of 8192 in a context of 512",
    "recurrent_gemma": "layers of kind linear_attention, sliding_attention of 8 in a context of 512",
}
SAMPLED = ("mistral", "mamba", "lfm2", "qwen3_next", "bamba")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {kind: make_architecture(parent / kind, kind) for kind in (*ROWS, *BRANCHING)}


def in_double(policy: Policy) -> None:
    """Float64, with experts computed one by one, because the grouped kernel does not support float64."""
    policy.model.double()
    policy.config._experts_implementation = "eager"


@pytest.mark.parametrize("kind", ROWS)
def test_models_that_share_no_prefixes_are_recognised(
    folders: dict[str, Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "agentjet"):
        policy = make_policy(folders[kind])
    assert not policy.info.shares_prefixes
    (line,) = [r.getMessage() for r in caplog.records if "prefixes are not shared" in r.getMessage()]
    assert line.startswith(f"{folders[kind]}: prefixes are not shared (") and line.endswith("): one row per timeline")
    assert REASONS[kind] in line


@pytest.mark.parametrize("kind", BRANCHING)
def test_full_attention_shares_prefixes(folders: dict[str, Path], kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentjet"):
        assert make_policy(folders[kind]).info.shares_prefixes
    assert "prefixes are not shared" not in caplog.text


def test_a_layer_that_attends_twice_shares_no_prefixes(folders: dict[str, Path]) -> None:
    """The cache has one place for a layer's keys, so the second call would overwrite those of the first."""
    policy = make_policy(folders["llama"])
    for layer in cast(Any, policy.decoder).layers:
        attend = layer.self_attn.forward

        def twice(hidden_states: Tensor, attend: Any = attend, **given: Any) -> Any:
            return attend(hidden_states=hidden_states + attend(hidden_states=hidden_states, **given)[0], **given)

        layer.self_attn.forward = twice
    with policy.attention("eager"):
        assert "attend once each" in (prefix_sharing_obstacle(policy) or "")


def test_a_window_as_wide_as_the_context_branches(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["mistral"], tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 40}))
    for context_length, branches in ((40, True), (41, False)):
        model = ModelConfig(name=str(folder), device="cpu", dtype="float32", context_length=context_length)
        assert load_policy(model).info.shares_prefixes == branches


@pytest.mark.parametrize("kind", ["granite", "falcon_h1", "gemma2", "llama"])
def test_logits_end_as_the_models_own(folders: dict[str, Path], kind: str) -> None:
    policy = make_policy(folders[kind])
    ids = torch.from_numpy(tokens(1, 30).astype(np.int64))[None]
    with torch.no_grad(), policy.attention("eager"):
        hidden = policy.decoder(input_ids=ids, use_cache=False).last_hidden_state
        assert torch.allclose(policy.head(hidden), policy.model(input_ids=ids, use_cache=False).logits, atol=1e-6)
        bare = torch.allclose(policy._head(hidden), policy.model(input_ids=ids, use_cache=False).logits, atol=1e-6)
    assert bare == (kind == "llama")


def test_logits_that_are_no_product_are_refused(folders: dict[str, Path]) -> None:
    policy = make_policy(folders["mistral"])
    policy._head = torch.nn.Linear(32, policy.vocabulary)
    with pytest.raises(ConfigError, match=r"model\.name = .*its logits are not the product"):
        find_logit_transform(policy)


@pytest.mark.parametrize("kind", ROWS)
def test_the_gradient_is_that_of_one_row_per_call(folders: dict[str, Path], kind: str) -> None:
    policy = make_policy(folders[kind])
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
    bound = 1e-7 if kind == "recurrent_gemma" else 1e-9  # The gates of its recurrence are in float32 in any case.
    assert relative(whole, baseline.gradient(clip)) <= bound
    assert relative(cut, baseline.gradient(gspo)) <= bound


def test_rows_are_timelines_within_the_budget(folders: dict[str, Path]) -> None:
    policy = make_policy(folders["mistral"])
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


def test_tokens_computed_are_those_of_the_padded_rows(folders: dict[str, Path]) -> None:
    policy = make_policy(folders["mistral"])
    forest = build_forest(episodes(policy))
    leaves = np.flatnonzero(forest.end == np.arange(forest.num_nodes) + 1)
    lengths = forest.depth[leaves] + 1
    together = PolicyLearner(policy).learn(forest, JobConfig(), 0)["forest/tokens_computed"]
    apart = PolicyLearner(policy).learn(forest, JobConfig(micro_batch_tokens=16), 1)["forest/tokens_computed"]
    assert together == len(leaves) * lengths.max()
    assert apart == lengths.sum() > forest.num_nodes


@pytest.mark.parametrize("kind", SAMPLED)
def test_sampler_and_learner_agree(folders: dict[str, Path], kind: str) -> None:
    policy = make_policy(folders[kind])
    rows = sampled_rows(policy, groups=2, repeats=2, temperature=0.8)
    with torch.no_grad():
        for row in rows:
            assert row["logprob"] == pytest.approx(row_logprobs(policy, row).numpy(), abs=1e-4)
    metrics = PolicyLearner(policy).learn(build_forest(rows), JobConfig(), 0)
    assert metrics["policy/mismatch_kl"] < 1e-7


@pytest.mark.parametrize("kind", ["mistral", "mamba"])
def test_a_replay_from_a_checkpoint_is_equal_bit_by_bit(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    job = JobConfig(
        recipe=policy_gradient({"mini_batches": 2, "kl_coef": 0.01}),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1),
    )
    policy = make_policy(folders[kind], dtype="bfloat16")
    learner = PolicyLearner(policy)
    batches = [build_forest(sampled_rows(policy, groups=2, repeats=2, seed=s)) for s in range(3)]
    for version, forest in enumerate(batches):
        if version == 1:
            checkpoint.save(tmp_path / "step_000001", policy, learner, {"policy_version": 1})
        learner.learn(forest, job, version)
    revived = make_policy(folders[kind], dtype="bfloat16")
    second = PolicyLearner(revived)
    checkpoint.load(tmp_path / "step_000001", revived, second)
    for version in (1, 2):
        second.learn(batches[version], job, version)
    undisturbed = policy.trainable()
    assert all(torch.equal(p, undisturbed[name]) for name, p in revived.trainable().items())


@pytest.mark.parametrize("kind", [kind for kind in SAMPLED if kind != "bamba"])  # whose cache is not used
def test_a_cache_never_outlives_the_weights(folders: dict[str, Path], kind: str) -> None:
    policy = make_policy(folders[kind])
    policy.end_tokens = frozenset()
    prompt = tokens(5, 20)

    def completion(invalidates: bool) -> tuple[list[int], list[float]]:
        sampler = ModelSampler(policy, 4, 8192)
        sampler.submit(1, prompt, SamplingParams(max_tokens=10, seed=2))
        found = [sampler.step()[0] for _ in range(4)]
        with torch.no_grad():
            for p in policy.model.parameters():
                p.mul_(1.5)
        if invalidates:
            sampler.invalidate()
        while not sampler.is_idle:
            found += sampler.step()
        return [new.token for new in found], [new.logprob for new in found]

    def plain(chosen: list[int]) -> list[float]:
        ids = torch.from_numpy(np.concatenate([prompt, chosen]).astype(np.int64))
        with torch.no_grad():
            logp = policy.model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        return [float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(chosen)]

    chosen, logprobs = completion(invalidates=True)
    assert logprobs[4:] == pytest.approx(plain(chosen)[4:], abs=1e-4)
    chosen, logprobs = completion(invalidates=False)
    assert logprobs[5:] != pytest.approx(plain(chosen)[5:], abs=1e-3), "a stale cache would not show"


def test_a_cache_that_gives_other_numbers_is_not_used(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that forgets what came before the tokens it is given."""
    policy = make_policy(folders["mistral"])
    whole = policy.decoder.forward
    monkeypatch.setattr(policy.decoder, "forward", lambda past_key_values=None, **given: whole(**given))
    sampler = ModelSampler(policy, 4, 4096)
    assert "no usable cache between tokens" in caplog.text
    prompt = tokens(1, 20)
    chosen, logprobs = run(sampler, {0: (prompt, SamplingParams(max_tokens=6, seed=1))})[0]
    row = call_row(np.concatenate([prompt, np.int32(chosen)]), np.float32(logprobs), np.zeros(6, np.int32), 1.0, 1.0, 0)
    with torch.no_grad():
        assert logprobs == pytest.approx(row_logprobs(policy, row).numpy(), abs=1e-4)


def test_requests_do_not_disturb_each_other(folders: dict[str, Path]) -> None:
    policy = make_policy(folders["lfm2"])
    policy.end_tokens = frozenset()
    wanted = (tokens(1, 20), SamplingParams(max_tokens=8, seed=7))
    alone = ModelSampler(policy, 4, 4096)
    expected = run(alone, {0: wanted})[0]
    assert alone.num_computed == 20 + 7
    narrow = ModelSampler(policy, 3, 256)  # room for two rows of one block
    crowd = {i: (tokens(50 + i, 5 * i), SamplingParams(max_tokens=3 + i, temperature=0.7, seed=i)) for i in range(1, 6)}
    found = run(narrow, {**crowd, 0: wanted})
    assert found[0][0] == expected[0]
    assert found[0][1] == pytest.approx(expected[1], abs=1e-5)
    assert [len(found[i][0]) for i in crowd] == [3 + i for i in crowd]


@pytest.mark.parametrize("kind", SAMPLED)
def test_repeats_of_a_prompt_share_its_state_until_they_part(folders: dict[str, Path], kind: str) -> None:
    policy = make_policy(folders[kind])
    policy.end_tokens = frozenset()
    prompt = tokens(1, 20)
    requests = {i: (prompt, SamplingParams(max_tokens=6, temperature=0.3, seed=i)) for i in range(4)}
    sampler = ModelSampler(policy, 8, 4096)
    out = run(sampler, requests)
    if kind != "bamba":  # whose cache is not used
        contexts = {tuple(np.concatenate([prompt, out[i][0]])[: n + 1]) for i in requests for n in range(20 + 5)}
        assert sampler.num_computed == len(contexts) > 20 + 5
    for i, request in requests.items():
        alone = run(ModelSampler(policy, 1, 4096), {i: request})[i]
        assert out[i][0] == alone[0]
        assert out[i][1] == pytest.approx(alone[1], abs=1e-4)


def test_requests_end_are_cancelled_and_are_refused(folders: dict[str, Path]) -> None:
    policy = make_policy(folders["lfm2"])
    policy.end_tokens = frozenset()
    sampler = ModelSampler(policy, 2, 1024)
    with pytest.raises(OutOfCache, match="600 prompt tokens"):
        sampler.submit(9, tokens(0, 600), SamplingParams(max_tokens=4))
    for i in range(4):
        sampler.submit(i, tokens(i, 10), SamplingParams(max_tokens=3, seed=i))
    first = {new.id for new in sampler.step()}
    assert first == {0, 1}
    for gone in (0, 3, 77):  # running, waiting, unknown
        sampler.cancel(gone)
    rest = []
    while not sampler.is_idle:
        rest += sampler.step()
    assert [new.id for new in rest] == [1, 2, 1, 2, 2]
    assert [new.finish_reason for new in rest] == [None, None, "length", None, "length"]
    policy.end_tokens = frozenset(range(policy.vocabulary))
    sampler.submit(1, tokens(0, 4), SamplingParams(max_tokens=50))
    (new,) = sampler.step()
    assert new.finish_reason == "stop" and sampler.is_idle


def test_a_worker_samples_and_learns_such_a_model(folders: dict[str, Path]) -> None:
    model = ModelConfig(name=str(folders["mamba"]), device="cpu", dtype="float32", threads=1)
    sent: list[Any] = []
    worker, policy = Worker(sent.append), PolicyId()
    info = worker.handle("add", policy, model, SamplerConfig())
    assert not info.shares_prefixes and info.context_length == 8192

    def sample() -> tuple[list[float], set[int]]:
        sent.clear()
        worker.handle("sample", policy, 1, tokens(1, 9), SamplingParams(max_tokens=5, seed=3))
        while worker._pieces:
            worker._sample_step()
        pieces = [piece for message in sent for _, piece in message]
        return [logp for piece in pieces for logp in piece.logprobs], {piece.policy_version for piece in pieces}

    before = sample()
    forest = build_forest(sampled_rows(make_policy(folders["mamba"]), groups=1))
    batch, loss = TrainingBatch(0, forest), LossSpec.of(JobConfig())
    worker.handle("load_batch", policy, batch)
    outputs = worker.handle("forward_backward", policy, Op.of(policy, 0), batch.id, loss)
    assert outputs.metrics["forest/tokens_computed"] >= forest.num_nodes
    worker.handle("optim_step", policy, Op.of(policy, 1), OptimizerConfig(lr=1e-2))
    worker.handle("publish", policy, 1)
    after = sample()
    assert (before[1], after[1]) == ({0}, {1}) and before[0] != after[0]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_text_of_one_token_has_no_scores(folders: dict[str, Path], kind: str) -> None:
    assert score(make_policy(folders[kind]), tokens(1, 1), 2) == []
