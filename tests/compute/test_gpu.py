"""Pins of CUDA, against the same on a CPU (attention itself: `test_flex.py`). Run by `bench/gpu.sh`, where a GPU is.

1. a learner's step gives the CPU's weights within a tolerance, and the same weights bit by bit when repeated;
2. the sampler reports the log-probabilities that a plain forward pass on a CPU gives;
3. without a GPU, the script that runs these refuses.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.compute.embedded.worker import make_deterministic
from agentjet.config import JobConfig, ModelConfig, OptimizerConfig
from agentjet.recipes.registry import make_recipe
from agentjet.timeline.forest import Row, build_forest, call_row
from agentjet.types import SamplingParams
from tests.compute.baseline import relative, row_logprobs
from tests.compute.conftest import make_policy, run, sampled_rows, tokens

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "gpu.sh"
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def deterministic() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def on_cuda(folder: Path) -> Policy:
    return load_policy(ModelConfig(name=str(folder), device="cuda", dtype="float32"))


def learned(policy: Policy, rows: list[Row]) -> torch.Tensor:
    """All weights after two batches, in one row."""
    job = JobConfig(
        recipe=make_recipe({"kl_coef": 0.1, "mini_batches": 2}),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4),
        micro_batch_tokens=120,
    )
    learner = PolicyLearner(policy)
    for version in range(2):
        learner.learn(build_forest(rows), job, version)
    return torch.cat([p.detach().flatten().cpu() for p in policy.trainable().values()])


@pytest.mark.gpu
@cuda
@pytest.mark.usefixtures("deterministic")
def test_a_step_gives_the_weights_of_the_cpu(tiny_folder: Path) -> None:
    policy = make_policy(tiny_folder)
    before = torch.cat([p.detach().flatten().clone() for p in policy.trainable().values()])
    rows = sampled_rows(policy)
    wanted = learned(policy, rows)
    found = learned(on_cuda(tiny_folder), rows)
    assert relative(found - before, wanted - before) < 1e-2
    assert torch.equal(found, learned(on_cuda(tiny_folder), rows))


@pytest.mark.gpu
@cuda
def test_the_sampler_reports_what_a_cpu_computes(tiny_folder: Path) -> None:
    policy = on_cuda(tiny_folder)
    assert policy.info.shares_prefixes
    policy.end_tokens = frozenset()
    requests = {
        i: (tokens(i % 3, 70 * (i % 3) + 5), SamplingParams(max_tokens=6, temperature=0.8, seed=i)) for i in range(6)
    }
    reference = make_policy(tiny_folder)
    for id, (chosen, logprobs) in run(ModelSampler(policy, 8, 8192), requests).items():
        whole = np.concatenate([requests[id][0], np.int32(chosen)])
        row = call_row(whole, np.float32(logprobs), np.zeros(len(chosen), np.int32), 1.0, 0.8, id)
        with torch.no_grad():
            assert logprobs == pytest.approx(row_logprobs(reference, row).numpy(), abs=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_refuses(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", str(SCRIPT), str(tmp_path / "out")], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "needs a CUDA GPU" in done.stderr
    assert not (tmp_path / "out").exists()
