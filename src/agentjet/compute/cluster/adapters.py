"""Adapters as publications: a LoRA policy sends its adapter, and the replicas have the base model. No torch.

A replica loads the base from the model's own files and reads new adapter weights into the one adapter that it has. A
policy that vLLM cannot hold so publishes merged weights instead. Both ends decide by the names in `publishes_adapter`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentjet.config import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose adapters were compared between vLLM and the learner."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Their linear layers, which `all-linear` stands for."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of an adapter in vLLM. A smaller one is padded."""
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""Files of an adapter in the format of `peft`."""


def publishes_adapter(lora: LoraConfig, architectures: Sequence[str] | None) -> bool:
    """True if a policy with these settings publishes its adapter. `architectures`: from the model's `config.json`."""
    modules = [module.strip() for module in lora.target_modules.split(",")]
    return (
        0 < lora.rank <= RANKS[-1]
        and (lora.target_modules == "all-linear" or set(modules) <= set(MODULES))
        and bool(architectures)
        and set(architectures or ()) <= set(ARCHITECTURES)
    )


def write_adapter(model: Any, weights: dict[str, Tensor] | None, path: Path) -> str:
    """Write a `peft` model's adapter to a safetensors file; returns its config in JSON.

    `weights` are those to write, for a model whose own are elsewhere.
    """
    folder = path.with_suffix("")
    model.save_pretrained(folder, state_dict=weights)
    (folder / WEIGHTS_FILE).rename(path)
    config = (folder / CONFIG_FILE).read_text()
    shutil.rmtree(folder)
    return config


def as_folder(path: Path, config: str) -> Path:
    """Returns the folder of an adapter's file, as `peft` reads it."""
    (path.parent / CONFIG_FILE).write_text(config)
    (path.parent / WEIGHTS_FILE).hardlink_to(path)
    return path.parent


def size_in_engine(rank: int) -> int:
    """Returns the size that vLLM reserves for an adapter of that rank."""
    return next(size for size in RANKS if size >= rank)
