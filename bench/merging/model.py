"""The models of `bench.merge`: SmolLM2's layers, fewer of them, with random weights.

Four layers, so that the slow baselines end. `quick` models have the same parts in miniature.
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


def make_model(folder: Path, vocabulary: int, *, quick: bool = False) -> Path:
    """A random model in `folder`, with SmolLM2's tokenizer; the same arguments, the same weights."""
    source = Path(locate_model(BUNDLED))
    config = AutoConfig.from_pretrained(source)
    config.update({"num_hidden_layers": LAYERS, "vocab_size": vocabulary, "max_position_embeddings": 16384})
    config.update(IN_MINIATURE if quick else {})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
