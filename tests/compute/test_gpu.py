"""Pins of CUDA, against the same on a CPU (attention itself: `test_flex_attention.py`). `bench/gpu.sh` runs them.

1. a learner's step gives the CPU's weights within a tolerance, and the same weights bit by bit when repeated; those of
   an adapter, and of a model that does not share prefixes, too; so does an optimiser that is offloaded to the CPU, with
   checkpoints from and to one that is not;
2. the sampler reports the log-probabilities that a plain forward pass on a CPU gives;
3. the choice of a token under grammars, `top_k` and `top_p` is that of a CPU;
4. without a GPU, the script that runs these refuses; in miniature every piece runs on a CPU; a slow path ends a bench.

With `GPU_TESTS_DEVICE=cpu` the first three run on a CPU, which shows that they are free of mistakes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agentjet.compute import checkpoint
from agentjet.compute.group import RankGroup, Sharding
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.policy import Policy
from agentjet.compute.rank import make_deterministic
from agentjet.compute.sampler import ModelSampler
from agentjet.config import JobConfig, OptimizerConfig
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import Row, build_forest, call_row
from agentjet.types import SamplingParams
from bench import gpu
from bench.machine import require_fast_path
from bench.merge_layouts import WORKLOADS
from tests.compute.architectures import make_architecture
from tests.compute.baseline import relative, row_logprobs
from tests.compute.conftest import choose, make_policy, run, sampled_rows, tokens
from tests.compute.direct import learn_directly
from tests.needs import need
from tests.tiny import make_model

CHOICES = [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.8), (1.3, 0, 1.0), (0.0, 0, 1.0), (0.9, 20, 0.9)]
"""Temperature, top_k and top_p."""
JOB = JobConfig(
    recipe=make_recipe({"kl_coef": 0.1, "mini_batches": 2}),
    optimizer=OptimizerConfig(lr=1e-3, eps=1e-4),
    micro_batch_tokens=120,
)
SCRIPT = Path(__file__).parent.parent.parent / "bench" / "gpu.sh"
DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
cuda = pytest.mark.needs(DEVICE)


@pytest.fixture
def deterministic() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def on_device(
    folder: Path, device: str = DEVICE, rank: int = 0, dtype: str = "float32", offload: bool = False
) -> Policy:
    lora = {"rank": rank, "alpha": 8}
    return make_policy(folder, device=device, dtype=dtype, offload_optimizer=offload, threads=0, lora=lora)


def learned(policy: Policy, rows: list[Row], saved: Path | None = None) -> torch.Tensor:
    """All weights after two batches, in one row. The first batch is loaded from `saved` if that exists."""
    learner = PolicyLearner(policy)
    for version in range(2):
        if version == 0 and saved is not None and saved.exists():
            checkpoint.load(saved, learner)
            continue
        learn_directly(learner, build_forest(rows), JOB, version)
        if version == 0 and saved is not None:
            checkpoint.save(saved, learner, {"policy_version": 1})
    assert {master.device.type for master in learner.masters()} == {
        "cpu" if policy.offloads_optimizer else policy.device.type
    }
    return torch.cat([p.detach().flatten().float().cpu() for p in policy.trainable().values()])


@pytest.mark.gpu
@cuda
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("kind", "rank"), [("llama", 0), ("llama", 4), ("mistral", 0)])
def test_a_step_gives_the_weights_of_the_cpu(tmp_path: Path, kind: str, rank: int) -> None:
    folder = make_model(tmp_path) if kind == "llama" else make_architecture(tmp_path, kind)
    policy = on_device(folder, "cpu", rank)
    before = torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])
    rows = sampled_rows(policy)
    wanted = learned(policy, rows)
    found = learned(on_device(folder, rank=rank), rows)
    assert relative(found - before, wanted - before) < 1e-2
    assert torch.equal(found, learned(on_device(folder, rank=rank), rows))


@pytest.mark.gpu
@cuda
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 4)])
def test_an_offloaded_optimiser_gives_the_same_weights(tmp_path: Path, dtype: str, rank: int) -> None:
    """The optimisers of both devices may round differently."""
    folder = make_model(tmp_path / "model")
    policy = on_device(folder, rank=rank, dtype=dtype)
    before = torch.cat([p.detach().flatten().float().cpu() for p in policy.trainable().values()])
    rows = sampled_rows(policy)
    wanted = learned(policy, rows, tmp_path / "on the device")
    runs = [
        learned(on_device(folder, rank=rank, dtype=dtype, offload=offload), rows, tmp_path / saved)
        for offload, saved in ((True, "on the CPU"), (True, "on the device"), (False, "on the CPU"))
    ]
    for found in runs:
        assert relative(found - before, wanted - before) < (1e-2 if dtype == "float32" else 5e-2)


@pytest.mark.gpu
@cuda
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("sharding", ["gathered", "sharded"])
def test_a_rank_that_offloads_gives_the_weights_of_one_that_does_not(tmp_path: Path, sharding: Sharding) -> None:
    """One rank is enough for FSDP's copies between pinned memory and the device."""
    folder = make_model(tmp_path / "model")
    rows = sampled_rows(on_device(folder))
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = RankGroup(0, 1, torch.device(DEVICE))

    def change(offload: bool, saved: Path) -> torch.Tensor:
        learner = PolicyLearner(on_device(folder, dtype="bfloat16", offload=offload), group, sharding)
        before = {name: tensor.float().cpu().clone() for name, tensor in learner.whole_weights().items()}
        if saved.exists():
            checkpoint.load(saved, learner)
        else:
            learn_directly(learner, build_forest(rows), JOB, 0)
            checkpoint.save(saved, learner, {"policy_version": 1})
        learn_directly(learner, build_forest(rows), JOB, 1)
        after = learner.whole_weights()
        return torch.cat([(after[name].float().cpu() - tensor).flatten() for name, tensor in before.items()])

    try:
        cases = ((False, "a"), (True, "b"), (True, "a"), (False, "b"))
        wanted, *found = [change(offload, tmp_path / name) for offload, name in cases]
    finally:
        dist.destroy_process_group()
    assert max(relative(one, wanted) for one in found) < 5e-2


@pytest.mark.gpu
@cuda
def test_the_choice_of_a_token_is_that_of_a_cpu() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(1, temperature=t, top_k=k, top_p=p) for t, k, p in CHOICES]
    masks = [b"", b"", b"", np.packbits(np.arange(300) % 3 == 0, bitorder="little").tobytes(), b"", b""]
    uniforms = np.random.default_rng(1).random(6).tolist()
    found, wanted = (choose(logits.to(device), range(6), params, masks, uniforms) for device in (DEVICE, "cpu"))
    assert found[0] == wanted[0] and found[2] == wanted[2]
    assert found[1] == pytest.approx(wanted[1], abs=1e-4)


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kind", ["tiny", "lfm2", "qwen3_next", "bamba", "mamba"])
def test_the_sampler_reports_what_a_cpu_computes(folder_of: Callable[[str], Path], kind: str) -> None:
    policy = on_device(folder_of(kind))
    assert policy.info.shares_prefixes
    policy.end_tokens = frozenset()
    requests = {
        i: (tokens(i % 3, 70 * (i % 3) + 5), SamplingParams(max_tokens=6, temperature=0.8, seed=i)) for i in range(6)
    }
    reference = make_policy(folder_of(kind))
    sampler = ModelSampler(policy, 8, 8192)
    for _ in range(2):
        for id, (chosen, logprobs) in run(sampler, requests).items():
            whole = np.concatenate([requests[id][0], np.int32(chosen)])
            row = call_row(whole, np.float32(logprobs), np.zeros(len(chosen), np.int32), 1.0, 0.8, id)
            with torch.no_grad():
                assert logprobs == pytest.approx(row_logprobs(reference, row).numpy(), abs=1e-3)
        with torch.no_grad():  # New weights at the same addresses, as after a step of the learner.
            for weights in (*policy.trainable().values(), *reference.trainable().values()):
                weights.mul_(1.05)
        sampler.invalidate()
    if sampler._graphs is not None:
        graphs = sampler._graphs._graphs[policy].values()
        assert all(graph and graph.compile_seconds for graph in graphs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / "out")])
    assert gpu.main() == 2 and "needs a CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


PIECES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "sampler": lambda runs: (
        " passed" in runs["tests"]
        and runs["ceilings"]["product_tflop_s"] > 0
        and all(one["tokens_s"] > 0 for one in (runs["rows_64"], runs["rows_64"]["uncompiled"]))
    ),
    "vllm": lambda runs: all(run["tokens_s"]["2"] > 0 for run in runs.values()),
    "learning": lambda runs: all(run["tokens_s"] > 0 for run in runs.values()),
    "forest": lambda runs: runs["merge"]["recompute"] >= 1 and runs["demo"]["steps"] == 1,
    "cluster": lambda runs: (
        all(len(runs[name]["publishes"]) == 3 and runs[name]["mismatch_kl"] < 0.1 for name in ("replica", "colocated"))
        and runs["colocated_demo"]["steps"] == 1
    ),
}
"""By piece: True for figures of a run that did its work."""


@pytest.mark.thorough
@pytest.mark.parametrize("piece", gpu.PIECES)
def test_in_miniature_a_piece_runs_on_a_cpu(piece: str, tmp_path: Path) -> None:
    if any("{sampler}" in command for _, _, command in gpu.PIECES[piece]):
        need("vllm")
    line = ["bash", str(SCRIPT), str(tmp_path), "--small", "--only", piece]
    done = subprocess.run(line, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "gpu.json").read_text())
    runs = report["pieces"][piece]
    if importlib.util.find_spec("liger_kernel") is None and (liger := runs.pop("liger_32768", None)):
        assert liger["exit_code"] == 2 and "pip install liger-kernel" in liger["result"]
    assert {name: run["exit_code"] for name, run in runs.items()} == dict.fromkeys(runs, 0), done.stderr
    assert PIECES[piece]({name: run["result"] for name, run in runs.items()}), runs


def test_a_piece_fits_into_ten_minutes() -> None:
    assert all(sum(seconds for _, seconds, _ in piece) <= gpu.PIECE_SECONDS for piece in gpu.PIECES.values())
    assert set(gpu.WHOLE["forests"].split()) <= set(WORKLOADS)


def test_without_vllm_a_contender_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "sampler_python", lambda: None)
    one = gpu.run(("alone", 1.0, "{sampler} bench.contenders vllm {model}"), tmp_path, 1.0, small=True)
    assert one["exit_code"] == 2 and "agentjet cluster install" in one["result"]


def test_a_slow_path_ends_a_bench_with_a_sentence(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(folder_of("tiny"))
    sampler = ModelSampler(policy, 8, 8192)
    require_fast_path(policy, sampler)
    monkeypatch.setattr(Policy, "device", torch.device("cuda"))
    for graphs in ({}, {8: None}, {8: object(), 64: None}):
        monkeypatch.setattr(sampler, "_graphs", SimpleNamespace(_graphs={policy: graphs}))
        with pytest.raises(SystemExit, match="are not CUDA graphs"):
            require_fast_path(policy, sampler)
    monkeypatch.setattr(sampler, "_graphs", SimpleNamespace(_graphs={policy: {8: object()}}))
    require_fast_path(policy, sampler)
    monkeypatch.setattr(policy, "learns_forests", False)
    with pytest.raises(SystemExit, match="does not share prefixes here: install"):
        require_fast_path(policy)
