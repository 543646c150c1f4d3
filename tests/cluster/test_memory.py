"""The memory of ranks and replicas against hand arithmetic, and the parameter count against a real folder."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from agentjet.compute.group import Sharding
from agentjet.compute.memory import (
    REPLICA_USABLE,
    Learning,
    SamplerRoom,
    activation_bytes,
    adapter_parameters,
    fewest_ranks,
    model_size,
    parameters_in,
    rank_need,
    replica_limits,
    replica_need,
    sampling_rate,
    size_from_config,
    states_need,
)
from agentjet.config import SamplerConfig, SamplerLimits
from agentjet.errors import ConfigError

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
GB = 10**9


def test_parameters_of_known_models() -> None:
    assert size_from_config(LLAMA_8B).num_parameters == 8_030_261_248
    assert size_from_config(SMOLLM2).num_parameters == 134_515_008


def test_states_of_a_hybrid() -> None:
    """Qwen3-Next-80B: a fourth of its layers have keys; the others have 32 heads of 128 x 128, and 3 inputs of 8192."""
    linear = {f"linear_{part}_head_dim": 128 for part in ("key", "value")}
    linear |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
    config = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
    config |= {"head_dim": 256, "vocab_size": 151936, "intermediate_size": 5120, "full_attention_interval": 4}
    size = size_from_config(config | linear)
    assert size.cache_values == 2 * 12 * 2 * 256
    assert size.state_values == 36 * (32 * 128 * 128 + 3 * 8192)
    assert states_need(size, max_concurrent=64) == 4 * size.state_values * 2 * 64
    assert size_from_config(SMOLLM2).state_values == states_need(size_from_config(SMOLLM2), 64) == 0


def test_activations_as_measured() -> None:
    """44,759 bytes a token and layer of SmolLM2 in float32, counted by `saved_tensors_hooks`."""
    size = size_from_config(SMOLLM2)
    assert activation_bytes(size, tokens=1, value_bytes=4) == pytest.approx(30 * 44_759, rel=0.01)
    assert activation_bytes(size, tokens=1, value_bytes=4, recomputed=True) == 4 * (30 * 576 + 11_136)


def test_a_folder_with_weights_is_exact(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    assert not model_size(tmp_path).is_exact
    header = json.dumps({"a": {"shape": [3, 4]}, "b": {"shape": []}, "__metadata__": {"format": "pt"}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert parameters_in(file) == 13
    assert model_size(tmp_path).is_exact and model_size(tmp_path).num_parameters == 13


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json has no readable sizes"):
        model_size(tmp_path)


def test_8b_on_8_gpus_gathered() -> None:
    """2 bytes of weights, 4 of gradients, 12 / 8 of masters and moments."""
    need = rank_need(size_from_config(LLAMA_8B), ranks=8, sharding="gathered")
    assert need.total == pytest.approx(8.03 * GB * 7.5, rel=1e-3)


def test_sharded_ranks_hold_parts() -> None:
    size = size_from_config(LLAMA_8B)
    eight, sixteen = (rank_need(size, ranks=n, sharding="sharded").total for n in (8, 16))
    assert sixteen < eight < rank_need(size, ranks=8, sharding="gathered").total
    assert rank_need(size, Learning(trained=10**7), ranks=8, sharding="sharded").total < eight


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("sharding", ["gathered", "sharded"])
def test_a_reference_that_moves_is_divided(sharding: Sharding, offload: bool) -> None:
    size = size_from_config(LLAMA_8B)
    plain, moving = (
        rank_need(size, Learning(offload=offload, reference=reference), ranks=8, sharding=sharding)
        for reference in (False, True)
    )
    more = moving.host - plain.host if offload else moving.total - plain.total
    assert more == pytest.approx(4 * size.num_parameters / 8, abs=1)


@pytest.mark.parametrize("trained", [0, 10**7])
@pytest.mark.parametrize("sharding", ["gathered", "sharded"])
def test_what_is_offloaded_is_in_the_memory_of_the_cpu(sharding: Sharding, trained: int) -> None:
    """Of 8 ranks: 16 bytes a trained parameter, and the layers that a sharded rank does not learn."""
    size = size_from_config(LLAMA_8B)
    plain, offloaded = (
        rank_need(size, Learning(trained=trained, offload=offload), ranks=8, sharding=sharding)
        for offload in (False, True)
    )
    frozen = size.layer_parameters * 2 // 8 if trained and sharding == "sharded" else 0
    assert plain.host == offloaded.optimizer == 0
    assert offloaded.host == frozen + 16 * (trained or size.num_parameters) // 8
    assert offloaded.weights == plain.weights - frozen
    assert offloaded.total < plain.total
    fewest = fewest_ranks(size, 80 * GB, Learning(trained=trained, offload=True), sharding=sharding)
    assert fewest == {("gathered", 0): None, ("gathered", 10**7): 1}.get((sharding, trained), 2)


def test_fewest_ranks() -> None:
    size = size_from_config(SMOLLM2)
    assert fewest_ranks(size, 80 * GB, sharding="gathered") == 1
    assert fewest_ranks(size, 80 * GB, sharding="sharded") == 2, "one rank has nothing to divide"
    assert fewest_ranks(size_from_config(LLAMA_8B), 80 * GB, sharding="gathered") is None  # 48 GB do not hold 6 bytes.
    assert fewest_ranks(size_from_config(LLAMA_8B), 80 * GB, sharding="sharded") == 4


def test_a_replica() -> None:
    size = size_from_config(LLAMA_8B)
    need = replica_need(size, SamplerLimits(8, 1000), tensor_parallel=2)
    assert need.weights == size.num_parameters
    assert need.cache == 2 * 32 * 8 * 128 * 33 * 32  # 1,000 tokens in blocks of 32, and an empty block.


@pytest.mark.parametrize(
    ("memory", "settings", "expected"),
    [
        (80 * GB, {}, (256, 262_144)),
        (24 * GB, {}, (64, 65_536)),  # Does not fit: as without a GPU, and `doctor` says so.
        (36 * GB, {}, (105, 108_224)),  # 3,383 blocks in 90 % of it, beside 16.1 GB of weights and 2 GiB.
        (80 * GB, {"cache_tokens": 100_000}, (97, 100_000)),
        (80 * GB, {"cache_tokens": 4096}, (8, 4096)),
        (80 * GB, {"max_concurrent": 32}, (32, 65_536)),
        (80 * GB, {"max_concurrent": 400, "cache_tokens": 4096}, (400, 4096)),
    ],
)
def test_the_numbers_of_a_replica_with_gpus(memory: int, settings: dict[str, int], expected: tuple[int, int]) -> None:
    chosen = SamplerConfig.model_validate(settings)
    assert replica_limits(chosen, size_from_config(LLAMA_8B), memory=memory) == expected


@pytest.mark.parametrize(
    ("memory", "settings", "expected"),
    [
        (80 * GB, {}, (256, 262_144)),
        (12 * GB, {}, (98, 100_352)),
        (6 * GB, {}, (31, 65_536)),  # Fewer states beside the least cache.
        (4 * GB, {}, (8, 65_536)),
        (12 * GB, {"cache_tokens": 100_000}, (97, 100_000)),
        (8 * GB, {"cache_tokens": 100_000}, (51, 100_000)),
        (12 * GB, {"max_concurrent": 100}, (100, 85_280)),
    ],
)
def test_the_numbers_of_a_replica_with_states(memory: int, settings: dict[str, int], expected: tuple[int, int]) -> None:
    """A hybrid of 75 MB of states for each completion. One more completion does not fit."""
    layers = {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 8}
    states = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 256}
    size = size_from_config({**SMOLLM2, "num_hidden_layers": 32, **layers, **states})
    limits = replica_limits(SamplerConfig.model_validate(settings), size, memory=memory)
    assert limits == expected
    usable, (rows, cache) = REPLICA_USABLE * memory, limits
    assert replica_need(size, limits).total <= usable or rows == 8
    if rows < cache // 1024 and "max_concurrent" not in settings:
        assert replica_need(size, SamplerLimits(rows + 1, cache)).total > usable


H200 = SamplerRoom(left=115 * GB, kept=56 * GB, by_token=98_304, by_row=0, context=8192)
"""One H200 beside a learner of 1.4 billion parameters."""
SMALL = SamplerRoom(left=20 * GB, kept=9 * GB, by_token=98_304, by_row=0, context=8192)
HYBRID = SamplerRoom(left=50 * GB, kept=30 * GB, by_token=24_576, by_row=158_000_000, context=262_144)
STATES = SamplerRoom(left=50 * GB, kept=30 * GB, by_token=0, by_row=100_000_000, context=8192)
FULL = SamplerRoom(left=8 * GB, kept=9 * GB, by_token=98_304, by_row=0, context=8192)


@pytest.mark.parametrize(
    ("room", "settings", "expected"),
    [
        (H200, {}, (512, 59 * GB // 98_304)),
        (SMALL, {}, (64, 11 * GB // 98_304)),  # 109 rows of 1,024 tokens
        (SMALL, {"max_concurrent": 100}, (100, 11 * GB // 98_304)),
        (SMALL, {"cache_tokens": 40_000}, (32, 40_000)),
        (SMALL, {"cache_tokens": 4096}, (8, 4096)),
        (SMALL, {"max_concurrent": 300, "cache_tokens": 4096}, (300, 4096)),
        (HYBRID, {}, (64, (20 * GB - 64 * 158_000_000) // 24_576)),
        (HYBRID, {"cache_tokens": 100_000}, (64, 100_000)),
        (STATES, {}, (128, 128 * 8192)),
        (FULL, {}, (32, 4 * GB // 98_304)),  # Half of what is left.
        (replace(FULL, left=-GB), {}, (8, 8192)),
        (replace(H200, by_token=0), {}, (64, 65_536)),
        (replace(H200, by_token=100), {}, (512, 512 * 8192)),
    ],
)
def test_auto_takes_what_the_memory_holds(
    room: SamplerRoom, settings: dict[str, int], expected: tuple[int, int]
) -> None:
    chosen = SamplerConfig.model_validate(settings)
    assert room.limits(chosen, on_cuda=True) == expected
    assert room.limits(chosen, on_cuda=False) == (
        settings.get("max_concurrent", 64),
        settings.get("cache_tokens", 65_536),
    )
    if room.left > 0:  # The numbers that it chose are not refused.
        room.limits(SamplerConfig(max_concurrent=expected[0], cache_tokens=expected[1]), on_cuda=True)


@pytest.mark.parametrize("on_cuda", [True, False])
@pytest.mark.parametrize(
    ("room", "settings", "message"),
    [
        (H200, {"cache_tokens": 10**7}, "cache_tokens = 10000000 .* holds 600179:"),
        (SMALL, {"max_concurrent": 300}, "max_concurrent = 300 .* holds 109:"),
        (HYBRID, {"max_concurrent": 512, "cache_tokens": 4096}, "max_concurrent = 512 .* holds 125:"),
        (HYBRID, {"max_concurrent": 512}, "max_concurrent = 512 .* holds 109:"),
    ],
)
def test_numbers_that_the_memory_does_not_hold_are_refused(
    room: SamplerRoom, settings: dict[str, int], message: str, on_cuda: bool
) -> None:
    with pytest.raises(ConfigError, match=f"^sampler.{message} lower it, or set it to 'auto'$"):
        room.limits(SamplerConfig.model_validate(settings), on_cuda=on_cuda)


def test_the_rate_of_sampling_has_two_limits() -> None:
    """Llama 3.1 8B on an H100: 64 rows are bound by memory, 1,024 short ones by arithmetic."""
    size = size_from_config(LLAMA_8B)
    need = replica_need(size, SamplerLimits(64, 65_536))
    gpu = {"bandwidth": 3.35e12, "arithmetic": 989e12}
    few, many = (sampling_rate(need, size, **gpu, concurrent=rows, context=100) for rows in (64, 1024))
    assert few == pytest.approx(64 * 3.35e12 / (2 * 8.03e9 + 64 * 100 * 131_072), rel=1e-3)
    assert many == pytest.approx(989e12 / (2 * 8.03e9), rel=1e-3)
    experts = {**LLAMA_8B, "num_experts": 8, "num_experts_per_tok": 2}
    unused = size_from_config(experts).unused_parameters
    assert unused == 6 * 32 * 3 * 4096 * 14336
    few = sampling_rate(need, size_from_config(experts), **gpu, concurrent=10**6, context=0)
    assert few == pytest.approx(989e12 / 2 / (size_from_config(experts).num_parameters - unused))


def test_an_adapter() -> None:
    assert adapter_parameters(size_from_config(SMOLLM2), SMOLLM2, 8) == 30 * 8 * (
        2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)
    )
