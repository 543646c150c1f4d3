"""The bytes of a replica's cache: those that `doctor` counts are those that vLLM gets, and it plans its blocks in them.

1. vLLM's planner uses all the bytes, except less than one block. The figures are those of vLLM 0.32.
2. Blocks hold `cache_tokens` tokens of every layer, and the states of all completions.
3. A model with keys in all layers has as many blocks as its tokens need, and an empty one.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoConfig

from agentjet.compute.memory import CacheSize, cache_size, replica_need, size_from_config
from agentjet.compute.samplers import REPLICA_PATH, with_cause
from agentjet.config import SamplerLimits
from agentjet.errors import ConfigError
from tests.cluster.local_replica import sampler_python
from tests.compute.architectures import make_architecture

LIMITS = SamplerLimits(64, 65_536)
HYBRID = ["attention" if number % 10 == 5 else "mamba" for number in range(40)]


class Case(NamedTuple):
    kind: str
    """Model type: the other sizes are the defaults of transformers."""
    architecture: str
    config: dict[str, Any]
    figures: tuple[int, int, int]
    """Bytes of vLLM's blocks for `LIMITS`, their number, and the tokens of one."""
    tensor_parallel: int = 1
    context: int = 65_536


def grouped(layers: int, hidden: int, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": kv_heads, "head_dim": hidden // heads, **changes}


HEADS = {"mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
CASES = {
    "dense": Case("llama", "LlamaForCausalLM", grouped(32, 4096, 32, 8), (8_594_128_896, 2049, 32)),
    "two GPUs": Case("llama", "LlamaForCausalLM", grouped(32, 4096, 32, 8), (4_297_064_448, 2049, 32), 2),
    "more GPUs than heads": Case("qwen2", "Qwen2ForCausalLM", grouped(28, 2048, 16, 2), (939_982_848, 2049, 32), 4),
    "other names": Case("gpt2", "GPT2LMHeadModel", {}, (2_417_098_752, 2049, 32), context=1024),
    "MLA": Case("deepseek_v3", "DeepseekV3ForCausalLM", {}, (4_607_594_496, 2049, 32), 8),
    "experts": Case("mixtral", "MixtralForCausalLM", {}, (8_594_128_896, 2049, 32)),
    "windows": Case("mistral", "MistralForCausalLM", {"sliding_window": 4096}, (8_598_323_200, 2050, 32)),
    "some windows": Case(
        "gemma3_text", "Gemma3ForCausalLM", grouped(26, 1152, 4, 1, head_dim=256), (1_879_965_696, 14_343, 32)
    ),
    "half windows": Case("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 24}, (3_222_798_336, 4098, 32)),
    "chunks": Case("llama4_text", "Llama4ForCausalLM", {}, (12_891_193_344, 8196, 32)),
    "states": Case("qwen3_next", "Qwen3NextForCausalLM", {}, (12_223_512_576, 471, 1056)),
    "states on two GPUs": Case("qwen3_next", "Qwen3NextForCausalLM", {}, (6_111_756_288, 471, 1056), 2),
    "states in each layer": Case(
        "falcon_h1",
        "FalconH1ForCausalLM",
        grouped(36, 1024, 8, 2, head_dim=64, mamba_d_ssm=1536, **HEADS),
        (5_115_543_552, 177, 1568),
    ),
    "states and experts": Case(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        grouped(40, 1536, 12, 4, layer_types=HYBRID, num_local_experts=64, **HEADS | {"mamba_n_heads": 48}),
        (8_329_625_600, 1271, 800),
    ),
    "states alone": Case(
        "mamba2",
        "Mamba2ForCausalLM",
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_heads": 64, "n_groups": 1},
        (13_656_834_048, 134, 32),
    ),
}


def sizes(case: Case) -> dict[str, Any]:
    config = AutoConfig.for_model(case.kind, **case.config)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return config.to_dict() | {name: getattr(config, name) for name in names if hasattr(config, name)}


@pytest.mark.parametrize("name", CASES)
def test_vllm_plans_its_blocks_in_the_bytes_that_are_counted(name: str) -> None:
    case = CASES[name]
    taken, blocks, tokens = case.figures
    size = cache_size(sizes(case))
    given = size.bytes(LIMITS, tensor_parallel=case.tensor_parallel)
    assert taken <= given < taken * (1 + 1 / blocks)
    if not size.recurrent_layers:
        assert given == taken and tokens == 32
    if not (size.recurrent_layers or size.window_layers):
        assert blocks == LIMITS.cache_tokens // 32 + 1


def planned(program: str, folder: Path, jobs: list[tuple[str, int, int, SamplerLimits]]) -> list[tuple[int, int, int]]:
    """Returns what `cache_planner.py` prints about these jobs."""
    command = [str(sampler_python()), str(Path(__file__).with_name("cache_planner.py")), program, json.dumps(jobs)]
    environment = {"PYTHONPATH": str(REPLICA_PATH), "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(size, blocks, tokens) for size, blocks, tokens in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.needs("vllm")
def test_the_figures_are_those_of_vllm(tmp_path: Path) -> None:
    jobs = []
    for number, case in enumerate(CASES.values()):
        config = AutoConfig.for_model(case.kind, **case.config)
        config.architectures = [case.architecture]
        config.save_pretrained(folder := tmp_path / str(number))
        jobs.append((str(folder), case.tensor_parallel, case.context, LIMITS))
    found = planned("plan", tmp_path, jobs)
    assert dict(zip(CASES, found, strict=True)) == {name: case.figures for name, case in CASES.items()}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.needs("vllm")
@pytest.mark.parametrize(
    ("kind", "changes", "expected_tokens"),
    [
        ("falcon_h1", {"mamba_d_state": 256, "mamba_d_head": 16, "mamba_d_ssm": 64}, 288),
        ("gemma3_window", {}, 32),
        ("gemma4", {}, 32),
        ("llama", {}, 32),
    ],
)
def test_an_engine_allocates_what_is_counted(
    kind: str, changes: dict[str, Any], expected_tokens: int, tmp_path: Path
) -> None:
    """Also for a context as long as the whole cache."""
    folder = make_architecture(tmp_path / "model", kind, hidden_size=64, head_dim=32, **changes)
    limits = SamplerLimits(8, 4096)
    ((allocated, blocks, tokens),) = planned("allocate", tmp_path, [(str(folder), 1, 4096, limits)])
    given = cache_size(json.loads((folder / "config.json").read_text())).bytes(limits, value_bytes=4)
    assert allocated <= given < allocated * (1 + 1 / blocks) and tokens == expected_tokens


def test_what_is_given_is_what_is_counted() -> None:
    """Hand arithmetic of Qwen3-Next: blocks of 1,056 tokens, which hold a state, in 4 groups of 12 layers."""
    size = size_from_config(sizes(CASES["states"]))
    assert size.replica_cache == CacheSize(12, 0, 36, 2, 512, 2, 512, 32 * 128 * 128 + 3 * 8192)
    page = 4 * size.replica_cache.state_values
    tokens = 32 * -(-page // (32 * 2048))
    blocks = -(-65_536 // tokens) + 3 * 2 * (64 + 2) + 1
    assert replica_need(size, LIMITS).cache == blocks * 12 * tokens * 2048
    assert replica_need(size, LIMITS).cache < 53e9 / 4, "as many blocks as for 32 tokens would take 53 GB"


def test_mla_in_both_backends() -> None:
    """DeepSeek-V3: vLLM keeps one latent vector of a token, the embedded backend the keys and values of 128 heads."""
    size = size_from_config(sizes(CASES["MLA"]))
    assert size.replica_cache.token_values == 61 * (512 + 64)
    assert size.cache_values == 61 * 128 * (128 + 64 + 128)
    assert size.num_parameters == pytest.approx(671.03e9, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("mixtral", 46.70e9), ("glm4_moe", 106.85e9), ("qwen3_next", 79.67e9)],
)
def test_parameters_of_experts(kind: str, parameters: float) -> None:
    """As the library builds them with these defaults."""
    changes = {"head_dim": 128} if kind == "glm4_moe" else {}
    assert size_from_config(AutoConfig.for_model(kind, **changes).to_dict()).num_parameters == pytest.approx(
        parameters, rel=0.01
    )


@pytest.mark.parametrize(
    ("cause", "on_gpu", "expected"),
    [
        (
            "ValueError: To serve at least one request with the model's max seq len (65536), (1.55 GiB KV cache is",
            True,
            r"^sampler.cache_tokens: .* no sequence of 65536 tokens .*: lower model.context_length below 65536, or",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory",  # Of the weights, or of the cache.
            True,
            r"does not hold the model and its cache .*If the model fits, lower sampler.cache_tokens .* a smaller model "
            r"or, with more GPUs, raise compute.tensor_parallel$",
        ),
        (
            "ValueError: KV cache allocation of 94489280512 bytes failed",
            False,
            "If the model fits, lower sampler.cache_tokens .* a smaller model or a machine with more memory$",
        ),
        (
            "ValueError: Model architectures ['Foo'] are not supported.",
            True,
            "^refused; the first error in its log: ValueErr",
        ),
    ],
)
def test_a_cache_that_is_too_small_or_too_large_names_its_settings(cause: str, on_gpu: bool, expected: str) -> None:
    refused = with_cause(ConfigError("refused"), cause, on_gpu=on_gpu)
    with pytest.raises(ConfigError, match=expected):
        raise refused
