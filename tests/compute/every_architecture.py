"""Tiny random models of every architecture that `transformers` has: its default config with small sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tiny import dialect, make_tokenizer, tokenizer

SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim decoder_hidden_size attention_hidden_size n_embed "
    "embedding_size hidden_dim word_embed_proj_dim lru_width decoder_embed_dim projection_dim",
    64: "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff decoder_ffn_dim encoder_ffn_dim dim_feedforward "
    "dim_ff ffn_size intermediate_size_mlp shared_expert_intermediate_size dense_intermediate_size "
    "intermediate_dim mlp_dim",
    16: "moe_intermediate_size expert_ffn_hidden_size expert_hidden_size expert_intermediate_size "
    "moe_ffn_hidden_size head_dim attention_head_dim qk_head_dim v_head_dim global_head_dim kv_channels "
    "q_lora_rank kv_lora_rank o_lora_rank mamba_d_head mamba_head_dim mamba_headdim mamba_chunk_size "
    "chunk_size hidden_size_per_layer_input",
    8: "qk_nope_head_dim qk_rope_head_dim state_size mamba_d_state ssm_state_size linear_key_head_dim "
    "linear_value_head_dim linear_head_dim index_n_heads index_head_dim sliding_window sliding_window_size "
    "attention_window_size attention_chunk_size window_size",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts mamba_n_heads "
    "mamba_num_heads time_step_rank mamba_dt_rank",
    2: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads num_encoder_attention_heads num_experts_per_tok num_experts_per_token moe_k "
    "top_k_experts experts_per_token moe_topk moe_top_k linear_num_key_heads linear_num_value_heads "
    "linear_num_heads",
    1: "num_key_value_heads multi_query_group_num kv_heads num_kv_heads n_shared_experts num_shared_experts "
    "moe_num_shared_experts n_group topk_group num_expert_group",
    28: "image_size",
    14: "patch_size",
    512: "max_position_embeddings n_positions max_sequence_length n_ctx max_seq_len max_target_positions",
}
LARGEST = {name: size for size, names in SIZES.items() for name in names.split()}
"""Largest value of a number in a config, by its name."""
LAYERS = [
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "depth"),
    *("num_decoder_layers", "num_encoder_layers", "layers", "num_blocks"),
]
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
MROPE = {"mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0, "rope_type": "default", "rope_theta": 10000.0}
OF_MROPE = {"text_config": {"head_dim": 16, "partial_rotary_factor": 1.0, "rope_parameters": MROPE}}
OF_MLA = {"head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "num_key_value_heads": 2}
NAMED_HEADS = {"head_dim": 16, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "axk1", "axk2", "deepseek_v32", "glm_moe_dsa", "longcat_flash", "youtu"), OF_MLA),
    "glm4_moe_lite": OF_MLA,
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), NAMED_HEADS),
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen2_vl", "glm4v", "glm46v", "glm_ocr", "glmga", "glm4v_moe", "paddleocr_vl"), OF_MROPE
    ),
    **{key: {"text_config": {"head_dim": 8, "num_key_value_heads": 2}} for key in ("kimi_k25", "mistral_large4")},
    "qwen2_5_omni_thinker": OF_MROPE,
    "deepseek_v2": {**OF_MLA, "n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "gemma3n_text": {"intermediate_size": 64, "activation_sparsity_pattern": [0.5, 0.0], "num_kv_shared_layers": 0},
    **{key: {"num_key_value_heads": 2} for key in ("diffllama", "glm4_moe_lite", "kimi_linear", "minicpm3")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "n_head": 4},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""Settings that make a small config consistent, by model type."""
ENDS_OF_REASONING = ("</think>", "<|end|>", "<channel|>")


def model_types() -> Iterator[tuple[str, str]]:
    """Yields every model type with its auto class."""
    from transformers.models.auto import modeling_auto as auto

    for name, types in (
        ("AutoModelForCausalLM", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("AutoModelForImageTextToText", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ):
        yield from ((name, model_type) for model_type in types)


def make_any(folder: Path, auto: str, model_type: str, *, template: str = "chatml", favoured: float = 0.0) -> Path:
    """Writes a tiny model. Any error of the library means that its config cannot be made small so.

    `favoured` is added to the logits of end tokens and of tokens that end reasoning, so that random weights end soon.
    """
    import torch
    import transformers

    defaults = transformers.AutoConfig.for_model(model_type)
    config = type(defaults)(**_joined(_small(defaults), CHANGES.get(model_type, {})))
    own = tokenizer(template)
    ends = [own.token_to_id(end) for end in dialect(template).ends]
    if template != "chatml":
        text = config.get_text_config()
        text.max_position_embeddings, config.tie_word_embeddings, text.tie_word_embeddings = 4096, False, False
        for part in (config, text):
            part.update({name: own.get_vocab_size() for name in VOCABULARIES if hasattr(part, name)})
            part.eos_token_id = ends
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, auto).from_config(config)
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    p.add_(0.05 * torch.randn_like(p))
            if favoured:
                # The first coordinate of each hidden state is large, as it is in all embeddings.
                ends = ends + [id for word in ENDS_OF_REASONING if (id := own.token_to_id(word)) is not None]
                model.get_input_embeddings().weight[:, 0] = 10.0
                head = model.get_output_embeddings().weight
                head[:, 0] = 0
                head[ends, 0] = favoured / head.shape[1] ** 0.5
    make_tokenizer(folder, template)
    model.save_pretrained(folder)
    return folder


def _small(config: Any) -> dict[str, Any]:
    """Returns the settings of a config that differ from its defaults. One layer of each kind stays, two at least."""
    from transformers import PreTrainedConfig

    num_layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept = sorted([*kept, *(i for i in range(2) if i not in kept)][: max(2, len(kept))])
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "id2label", "label2id"):
            continue
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, PreTrainedConfig):
            small[name] = _small(value) | ({"model_type": value.model_type} if value.model_type else {})
        elif name in VOCABULARIES:
            small[name] = tokenizer().get_vocab_size()
        elif name in LAYERS and is_number:
            small[name] = len(kept)
        elif is_number and value > LARGEST.get(name, value):
            small[name] = LARGEST[name]
        elif is_number and name.endswith(("token_id", "token_index")) and value >= tokenizer().get_vocab_size():
            small[name] = 3
        elif isinstance(value, list) and num_layers and len(value) == num_layers > len(kept):
            small[name] = [value[i] for i in kept]
        elif name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            small[name] = {**copy.deepcopy(value), "mrope_section": [4, 2, 2]}
    return small


def _joined(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for name, value in changes.items():
        is_section = isinstance(value, dict) and isinstance(settings.get(name), dict)
        settings[name] = _joined(settings[name], value) if is_section else value
    return settings
