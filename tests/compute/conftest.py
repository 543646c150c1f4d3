"""A tiny policy, and batches sampled from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentjet.compute.backend import ProcessCompute
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.sampler import ModelSampler
from agentjet.config import LoraConfig, ModelConfig
from agentjet.processes.placement import LocalPlacement
from agentjet.timeline.forest import Row, call_row
from agentjet.types import PolicyId, SamplingParams
from tests.compute import forked_workers
from tests.tiny import make_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def make_policy(folder: Path, *, dtype: str = "float32", rank: int = 0, offload: bool = False) -> Policy:
    lora = LoraConfig(rank=rank)
    return load_policy(
        ModelConfig(name=str(folder), device="cpu", dtype=dtype, threads=1, offload_optimizer=offload, lora=lora)
    )


def with_random_adapter(policy: Policy, seed: int) -> Policy:
    """An adapter that changes the logits: a new one does not."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.trainable().items():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    policy.end_tokens = frozenset()
    return policy


@pytest.fixture
def workers_start_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker costs seven seconds of imports; a forked one costs none."""
    monkeypatch.setattr(LocalPlacement, "start", forked_workers.start)


def pid_of(compute: ProcessCompute, policy: PolicyId) -> int:
    """Returns the process id of a policy's worker; 0 if it does not run."""
    return next((int(one.place.split()[-1]) for one in compute.processes(policy) if one.place), 0)


@pytest.fixture
def policy(tiny_folder: Path) -> Policy:
    return make_policy(tiny_folder)


def run(
    sampler: ModelSampler, requests: dict[int, tuple[np.ndarray, SamplingParams]]
) -> dict[int, tuple[list[int], list[float]]]:
    """Submit all, step to the end; tokens and log-probabilities by request."""
    out: dict[int, tuple[list[int], list[float]]] = {id: ([], []) for id in requests}
    for id, (prompt, params) in requests.items():
        sampler.submit(id, prompt, params)
    while not sampler.is_idle:
        for new in sampler.step():
            out[new.id][0].append(new.token)
            out[new.id][1].append(new.logprob)
    return out


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 200, length).astype(np.int32)


def sampler_of(policy: Policy, max_concurrent: int = 16, cache_tokens: int = 16384) -> ModelSampler:
    """The sampler that the worker would take."""
    return ModelSampler(policy, max_concurrent, cache_tokens)


def sampled_rows(
    policy: Policy, *, groups: int = 3, repeats: int = 4, turns: int = 2, temperature: float = 1.0, seed: int = 0
) -> list[Row]:
    """Episodes of several turns that share their group's prompt, one row per call, with random advantages."""
    sampler = sampler_of(policy)
    rng = np.random.default_rng(seed)
    system = tokens(99, 6)
    histories = {(g, r): np.concatenate([system, tokens(g, 5 + g)]) for g in range(groups) for r in range(repeats)}
    rows: list[Row] = []
    for turn in range(turns):
        requests = {
            i: (history, SamplingParams(max_tokens=6, temperature=temperature, seed=seed + 100 * turn + i))
            for i, history in enumerate(histories.values())
        }
        out = run(sampler, requests)
        for i, key in enumerate(histories):
            chosen, logprobs = out[i]
            full = np.concatenate([histories[key], np.array(chosen, np.int32)])
            rows.append(
                call_row(
                    full,
                    np.array(logprobs, np.float32),
                    np.zeros(len(chosen), np.int32),
                    float(rng.normal()),
                    temperature,
                    i,
                )
            )
            histories[key] = np.concatenate([full, tokens(1000 + turn, 4)])
    return rows
