"""The model of `agentjet research demo`: a tiny Llama of random weights over bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0, 1, 2. The 256 bytes follow."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RANDOM_MODEL_CONTEXT = 1024


def make_random_model(folder: Path, seed: int = 0, **shape: Any) -> None:
    """Write a two-layer model over bytes to a new `folder`. The same arguments give the same weights.

    `shape` are settings of `LlamaConfig` that differ, such as `hidden_size`.
    """
    tokens = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        model_max_length=RANDOM_MODEL_CONTEXT,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    default = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": RANDOM_MODEL_CONTEXT,
        "tie_word_embeddings": True,
    }
    config = LlamaConfig(vocab_size=len(tokens), bos_token_id=0, eos_token_id=2, pad_token_id=0, **{**default, **shape})
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
