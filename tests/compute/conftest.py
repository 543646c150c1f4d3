"""A tiny policy, and batches sampled from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentjet.compute.backend import ProcessCompute
from agentjet.compute.learner import PolicyLearner
from agentjet.compute.model import load_policy
from agentjet.compute.policy import Policy
from agentjet.compute.sampler import ModelSampler, NewToken
from agentjet.compute.token_choice import ChoiceRules, sample_tokens
from agentjet.config import ModelConfig
from agentjet.processes.supervisor import LocalPlacement
from agentjet.timeline.forest import EVERYTHING, Forest, Row, call_row
from agentjet.types import PolicyId, SamplingParams
from tests.compute import forked_workers
from tests.compute.architectures import make_architecture
from tests.tiny import make_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def folder_of(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of an architecture, made once. `tiny` is the model of most tests."""
    parent = tmp_path_factory.mktemp("architectures")
    return cache(lambda kind: tiny_folder if kind == "tiny" else make_architecture(parent / kind, kind))


def model_config(folder: Path, *, rank: int = 0, **changes: Any) -> ModelConfig:
    settings = {"name": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "lora": {"rank": rank}}
    return ModelConfig.model_validate(settings | changes)


def make_policy(folder: Path, **changes: Any) -> Policy:
    """The policy of a `model_config` with these changes."""
    return load_policy(model_config(folder, **changes))


def make_endless(folder: Path, **changes: Any) -> Policy:
    """A policy whose completions end at `max_tokens`."""
    policy = make_policy(folder, **changes)
    policy.end_tokens = frozenset()
    return policy


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


Requests = Mapping[int, tuple[np.ndarray, SamplingParams] | tuple[np.ndarray, SamplingParams, Policy]]
"""Prompt, parameters and policy by id, of the sampler's own policy by default."""


def complete(sampler: ModelSampler, requests: Requests) -> dict[int, list[NewToken]]:
    """Submit all, step to the end; all that was sampled by request."""
    found: dict[int, list[NewToken]] = {id: [] for id in requests}
    for id, request in requests.items():
        sampler.submit(id, *request)
    while not sampler.is_idle:
        for new in sampler.step():
            found[new.id].append(new)
    return found


def run(sampler: ModelSampler, requests: Requests) -> dict[int, tuple[list[int], list[float]]]:
    """The tokens and log-probabilities of `complete`."""
    found = complete(sampler, requests)
    return {id: ([new.token for new in all], [new.logprob for new in all]) for id, all in found.items()}


Completions = Mapping[int, tuple[list[int], list[float]]]


def check_same(found: Completions, expected: Completions, tolerance: float) -> None:
    """The same tokens, and log-probabilities within a tolerance."""
    assert found.keys() >= expected.keys()
    for id, (chosen, logprobs) in expected.items():
        assert found[id][0] == chosen, id
        assert found[id][1] == pytest.approx(logprobs, abs=tolerance), id


def tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, 200, length).astype(np.int32)


def choose(
    logits: Tensor,
    of: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[bytes],
    uniforms: Sequence[float],
) -> tuple[list[int], list[float], list[bytes]]:
    """`sample_tokens` with the rules of these completions. An empty mask allows every token."""
    rules = ChoiceRules(
        np.array(of),
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params]),
        np.array([p.top_p for p in params], np.float64),
        np.array(uniforms, np.float64),
        {i: mask for i, mask in enumerate(masks) if mask},
    )
    tokens, logprobs, support = sample_tokens(logits, rules)
    return tokens.tolist(), logprobs.tolist(), support or [EVERYTHING] * len(params)


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


def bytes_kept(learner: PolicyLearner, forests: Sequence[Forest]) -> int:
    """Storage that the backward passes over all these forests need, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in learner.policy.model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = [learner._pass.hidden(forest)[0] for forest in forests]
    assert all(h.requires_grad for h in hidden)
    return sum(kept.values())
