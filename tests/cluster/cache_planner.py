"""A program for vLLM's interpreter: what vLLM makes of the bytes that a replica gives it for its cache.

`python cache_planner.py plan JOBS` prints a JSON list, with a list for each model: the bytes of all blocks by vLLM's
planner, the number of blocks, and the tokens of one. Models are built without memory, in one process: a GPU's part of a
model with `tensor_parallel` is built by the size of the group alone.

`python cache_planner.py allocate JOBS` starts an engine with the one model, and prints the bytes that it allocated.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The tensors of an engine are in this process.

import torch
import vllm.distributed.parallel_state as groups
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, get_kv_cache_configs

from agentjet.compute.vllm.engine import _has_states, engine_settings, set_environment
from agentjet.config import ComputeConfig, ModelConfig, SamplerLimits
from agentjet.types import ModelInfo


def plan(folder: str, tensor_parallel: int, context: int, limits: SamplerLimits) -> tuple[int, int, int]:
    model = ModelConfig(name=folder, device="cpu")
    info = ModelInfo("", "", "", context, (), dtype="bfloat16")
    settings = engine_settings(model, info, limits, ComputeConfig(tensor_parallel=tensor_parallel))
    given = settings["kv_cache_memory_bytes"]
    arguments = AsyncEngineArgs(**settings | {"tensor_parallel_size": 1}, load_format="dummy")
    if _has_states(arguments.create_model_config()):
        arguments.enable_prefix_caching = False
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not groups.model_parallel_is_initialized():
            groups.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            groups.initialize_model_parallel(1, 1)
            groups._EP = groups.get_tp_group()
        groups.get_tp_group().world_size = tensor_parallel
        vars(config.parallel_config)["tensor_parallel_size"] = tensor_parallel
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            initialize_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        layers = config.compilation_config.static_forward_context
        specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items() if _has_cache(layer)}
        config.cache_config.kv_cache_layout = "LBNHC"
        (planned,) = get_kv_cache_configs(config, [specs], [given])
        layout = config.cache_config.get_resolved_kv_cache_layout()
        size = _get_kv_cache_bytes_per_block(planned.kv_cache_groups, layout)
    return planned.num_blocks * size, planned.num_blocks, config.cache_config.block_size


def _has_cache(layer: Any) -> bool:
    return hasattr(layer, "get_kv_cache_spec")


def allocate(folder: str, tensor_parallel: int, context: int, limits: SamplerLimits) -> tuple[int, int, int]:
    """As `plan`, of an engine that serves sequences of `context` tokens in float32."""
    info = ModelInfo("", "", "", context, (), dtype="float32")
    compute = ComputeConfig(tensor_parallel=tensor_parallel)
    settings = engine_settings(ModelConfig(name=folder, device="cpu"), info, limits, compute)
    engine = LLM(**settings, load_format="dummy", enable_prefix_caching=False).llm_engine
    config = engine.vllm_config.cache_config
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    storages = [one.untyped_storage() for layer in layers if _has_cache(layer) for one in _tensors(layer.kv_cache)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values()), config.num_gpu_blocks, config.block_size


def _tensors(cache: Any) -> list[torch.Tensor]:
    return [cache] if isinstance(cache, torch.Tensor) else [one for part in cache for one in _tensors(part)]


def main() -> None:
    set_environment(ModelConfig(device="cpu", threads=1), ComputeConfig())
    program = {"plan": plan, "allocate": allocate}[sys.argv[1]]
    print(json.dumps([program(*job, SamplerLimits(*limits)) for *job, limits in json.loads(sys.argv[2])]))


if __name__ == "__main__":
    main()
