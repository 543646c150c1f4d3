"""Models of the benches with random weights and SmolLM2's tokenizer.

By default SmolLM2's layers, four of them, so that the slow baselines of `bench.merge` end. `quick` models have the same
parts in miniature. `SIZES` are other shapes, by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentjet.compute.embedded.policy import BUNDLED, locate_model
from agentjet.rendering import template_for
from agentjet.types import ModelInfo

LAYERS = 4
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
IN_MINIATURE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def _shape(*, hidden: int, inner: int, layers: int, heads: int) -> dict[str, int]:
    names = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**names, "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": hidden // heads}


SIZES: dict[str, dict[str, int]] = {
    "tiny": {**IN_MINIATURE, "num_hidden_layers": 2},
    "0.5B": _shape(hidden=896, inner=4864, layers=24, heads=14),
    "1.4B": _shape(hidden=1536, inner=8960, layers=28, heads=12),
}
"""Settings of a model's config. The layers of the larger ones are those of Qwen2.5-0.5B and 1.5B."""


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


def smollm2_card() -> ModelInfo:
    """The facts about SmolLM2 that the gateway needs to render its conversations."""
    source = Path(locate_model(BUNDLED))
    template, tool_format = template_for(BUNDLED, (source / "chat_template.jinja").read_text(encoding="utf-8"))
    config = AutoConfig.from_pretrained(source)
    return ModelInfo(
        name=BUNDLED,
        tokenizer_path=str(source),
        chat_template=template,
        context_length=config.max_position_embeddings,
        end_tokens=(config.eos_token_id,),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        tool_format=tool_format,
    )
