"""Models of the benches with random weights and SmolLM2's tokenizer.

By default SmolLM2's layers, four of them, so that the slow baselines of `bench.merge` end. `quick` models have the same
parts in miniature. `SIZES` are other shapes, by name, and `KINDS` other architectures.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentjet.compute.policy import BUNDLED, locate_model

LAYERS = 4
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
IN_MINIATURE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


SHAPES = {"0.5B": (896, 4864, 24, 14, 2, 64), "1.4B": (1536, 8960, 28, 12, 2, 128)}
"""Those of Qwen2.5-0.5B and 1.5B: width, inner width, layers, heads, key heads, and the width of a head."""
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "head_dim")
SIZES = {name: dict(zip(NAMES, shape, strict=True)) for name, shape in SHAPES.items()}
SIZES |= {"tiny": {**IN_MINIATURE, "num_hidden_layers": 2, "head_dim": 64}}  # vLLM has no narrower heads on a CPU.

EIGHT = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}
EIGHT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
DELTA = {f"linear_{part}_head_dim": 64 for part in ("key", "value")}
KINDS: dict[str, dict[str, Any]] = {
    "window": {
        **EIGHT,
        "model_type": "gemma3_text",
        "sliding_window": 128,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    },
    "hybrid": {
        **EIGHT,
        **DELTA,
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    },
    "mla": {
        **EIGHT,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 32,
        "first_k_dense_replace": 8,  # Attention is measured: no layer has experts.
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "moe": {
        **EIGHT,
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 192,
    },
    "hybrid of SmolLM2's size": {
        **DELTA,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 24,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "linear_num_key_heads": 9,
        "linear_num_value_heads": 9,
        "tie_word_embeddings": True,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    },
}
"""Settings of architectures by kind: 8 layers of width 256, but for the last."""


def make_kind(folder: Path, kind: str, vocabulary: int) -> Path:
    """A random model of one of `KINDS` in `folder`, in float32."""
    settings = {"vocab_size": vocabulary, "max_position_embeddings": 16384, **KINDS[kind]}
    return _written(folder, AutoConfig.for_model(**settings), torch.float32)


def make_model(folder: Path, vocabulary: int, *, quick: bool = False, size: str = "") -> Path:
    """A random model in `folder`, with SmolLM2's tokenizer; the same arguments, the same weights.

    One of `SIZES` is in bfloat16, the others in float32.
    """
    config = AutoConfig.from_pretrained(locate_model(BUNDLED))
    config.update({"num_hidden_layers": LAYERS, "vocab_size": vocabulary, "max_position_embeddings": 16384})
    config.update(SIZES[size] if size else IN_MINIATURE if quick else {})
    return _written(folder, config, torch.bfloat16 if size else torch.float32)


def _written(folder: Path, config: Any, dtype: torch.dtype) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    for name in FILES:
        shutil.copyfile(Path(locate_model(BUNDLED)) / name, folder / name)
    return folder
