"""Adapters that a replica reads into a running engine. Pinned here:

1. after a publish all tokens have the new adapter's log-probabilities, in running completions, too;
2. nothing that was computed with an old adapter is used again for the same prompt;
3. settings that vLLM cannot hold as an adapter publish merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from agentjet.compute.model import load_policy
from agentjet.compute.weights import ARCHITECTURES, publishes_adapter
from agentjet.config import ComputeConfig, LoraConfig, ModelConfig, SamplerConfig
from agentjet.types import SamplingParams
from tests.cluster.local_replica import LocalReplica, Wanted, sampler_python
from tests.cluster.test_replica import CONTEXT, TOLERANCE, World, check, prompt, sample_across_versions
from tests.tiny import make_model

PYTHON = sampler_python()
LORA = LoraConfig(rank=4, alpha=16)


@pytest.mark.parametrize(
    ("lora", "architecture", "expected"),
    [
        (LORA, "LlamaForCausalLM", True),
        (LoraConfig(rank=0), "LlamaForCausalLM", False),
        (LoraConfig(rank=513), "LlamaForCausalLM", False),
        (LORA, "MambaForCausalLM", False),
        (LoraConfig(rank=8, target_modules="q_proj, down_proj"), "Qwen3ForCausalLM", True),
        (LoraConfig(rank=8, target_modules="q_proj,lm_head"), "Qwen3ForCausalLM", False),
    ],
)
def test_what_publishes_an_adapter(lora: LoraConfig, architecture: str, expected: bool) -> None:
    assert publishes_adapter(lora, [architecture]) == expected
    assert not publishes_adapter(lora, None)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("replica")
    name = make_model(folder / "tiny", hidden=64)
    change_architecture(name, request.param)
    config = ModelConfig(
        name=str(name), device="cpu", dtype="float32", threads=1, context_length=CONTEXT, lora=LORA
    )  # fmt: skip
    info = load_policy(config).info
    models = {version: adapted(str(name), version) for version in range(4)}
    assert PYTHON is not None
    with LocalReplica(PYTHON, folder / "log") as replica:
        replica.load(config, info, SamplerConfig(max_concurrent=8, cache_tokens=4096), ComputeConfig())
        made = World(replica, info, models)
        made.adopt(0)
        yield made


def change_architecture(folder: Path, architecture: str) -> None:
    """Write random weights of another architecture with the sizes of the model in a folder."""
    kinds = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2"}
    kept = AutoConfig.from_pretrained(folder).to_dict()
    for key in ("model_type", "architectures", "rope_parameters", "layer_types"):
        kept.pop(key, None)
    config = AutoConfig.for_model(kinds.get(architecture, "qwen3"), **kept)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def adapted(folder: str, seed: int) -> Any:
    """A model with an adapter of random weights."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    settings = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, settings).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("suspends", [False, True])
def test_adapters_reach_running_completions_whole(world: World, suspends: bool) -> None:
    params = SamplingParams(max_tokens=300, seed=1, is_reproducible=True)
    wanted = {i: Wanted(prompt(i, 100), replace(params, seed=i, piece_tokens=1 + 7 * (i % 2))) for i in range(4)}
    wanted[4] = Wanted(prompt(4, 20), replace(params, top_p=0.8, piece_tokens=3))
    publication = world.replica.publish(world.models[1], 1)
    assert publication.adapter and publication.num_bytes < 100_000
    found = sample_across_versions(world, wanted, suspends=suspends)
    for key, one in found.items():
        check(world, one, wanted[key])
    for version in (1, 2, 1, 0):
        after = world.replica.publish(world.models[version], version).probe_logprobs
        assert np.abs(np.array(world.adopt(version)) - after).max() <= TOLERANCE
        check(world, world.replica.sample(wanted[0]), wanted[0])  # The same prompt: no key of the old adapter.
