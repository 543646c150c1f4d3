"""Models of the benches with random weights and SmolLM2's tokenizer.

By default SmolLM2's layers, four of them, so that the slow baselines of `bench.merge` end. `quick` models have the same
parts in miniature. `SIZES` are other shapes, by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

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
SIZES |= {"tiny": {**IN_MINIATURE, "num_hidden_layers": 2}}


def make_model(folder: Path, vocabulary: int, *, quick: bool = False, size: str = "") -> Path:
    """A random model in `folder`, with SmolLM2's tokenizer; the same arguments, the same weights.

    One of `SIZES` is in bfloat16, the others in float32.
    """
    source = Path(locate_model(BUNDLED))
    config = AutoConfig.from_pretrained(source)
    config.update({"num_hidden_layers": LAYERS, "vocab_size": vocabulary, "max_position_embeddings": 16384})
    config.update(SIZES[size] if size else IN_MINIATURE if quick else {})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if size else torch.float32)
    model.save_pretrained(folder)
    for name in FILES:
        shutil.copyfile(source / name, folder / name)
    return folder
