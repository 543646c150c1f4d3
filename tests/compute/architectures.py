"""Tiny random models of many architectures, as Hugging Face folders with the tokenizer of `tests/tiny.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.compute.every_architecture import make_any
from tests.tiny import SPECIAL, make_tokenizer, tokenizer

BRANCHING = ("llama", "qwen3", "gemma", "gemma3", "granite")
"""Full attention in every layer; q/k norms, scaled embeddings, norms whose weights start at 1, scaled logits."""
MORE = ("qwen2", "phi3", "olmo2", "mixtral", "qwen3_moe")
"""More of the same, with biases, fused projections, other norms, and experts."""
WRAPPERS = ("qwen3_vl", "qwen2_5_vl", "gemma3_vl", "llava", "mistral3", "smolvlm", "internvl", "qwen3_5", "llama4_vl")
"""Models that read images, too; text alone is sampled and learned."""
ATTENTION = ("mistral", "gemma2", "gemma3_window", "gemma3n", "gemma4", "gpt_oss", "deepseek_v3", "llama4")
"""Windows, soft caps, sinks, chunks, keys that layers share, values narrower than keys, layers of different sizes."""
ROWS = (*ATTENTION, "mamba", "lfm2", "qwen3_next", "falcon_h1", "bamba", "recurrent_gemma")
"""The same, and recurrences, convolutions, and mixtures."""
BY_TYPE = (
    *("apertus", "cohere", "cohere2", "ernie4_5", "exaone4", "glm4", "hunyuan_v1_dense"),
    *("ministral3", "olmo3", "seed_oss", "smollm3", "afmoe", "ernie4_5_moe", "glm4_moe", "granitemoe"),
    *("hunyuan_v1_moe", "minimax_m2", "olmoe", "qwen2_moe", "deepseek_v2", "deepseek_v32"),
    *("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "granitemoehybrid", "jamba"),
    *("lfm2_moe", "mamba2", "mimo_v2_flash", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
)
"""Other models that people train, by model type: the library's default config with small sizes."""
EVERY = (*BRANCHING, *MORE, *WRAPPERS, *ROWS, *BY_TYPE)


def make_architecture(folder: Path, kind: str, *, seed: int = 0, **changes: Any) -> Path:
    """A model of any kind listed here, with weights large enough that attention is far from uniform.

    `changes` are settings of its config.
    """
    import torch
    import transformers

    if kind in BY_TYPE:
        return make_any(folder, "AutoModelForCausalLM", kind)
    name, settings = _wrapper(kind) if kind in WRAPPERS else _config(kind)
    settings |= changes
    vocabulary = {
        "vocab_size": tokenizer().get_vocab_size(),
        "bos_token_id": SPECIAL.index("<|endoftext|>"),
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
    }
    if kind in WRAPPERS:
        settings["text_config"].update(vocabulary)
        config = getattr(transformers, f"{name}Config")(**settings)
        model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    else:
        config_name = f"{name}TextConfig" if name in ("Gemma3", "Gemma3n", "Gemma4", "Llama4") else f"{name}Config"
        config = getattr(transformers, config_name)(**vocabulary, **settings)
        model_class = getattr(transformers, f"{name}ForCausalLM")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    path = make_tokenizer(folder)
    model.save_pretrained(path)
    return path


def _config(kind: str) -> tuple[str, dict[str, Any]]:
    """Class name and settings."""
    common = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    heads = {**common, "head_dim": 16}
    mixed = ["sliding_attention", "full_attention"]
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }
    experts = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    mamba_heads = {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 0.4,
    }
    of_llama4 = {
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
    }
    of_mla = {
        "num_key_value_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    sharing = {
        "sliding_window": 8,
        "num_hidden_layers": 4,
        "layer_types": mixed * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": tokenizer().get_vocab_size(),
    }
    of_gemma3n = {**sharing, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}
    wide = {"head_dim": 32, "num_key_value_heads": 2}
    of_gpt_oss = {"num_local_experts": 2, "num_experts_per_tok": 1}
    of_mamba = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 4}
    of_bamba = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
        "attn_layer_indices": [1],
    }
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", common),
        "qwen3": ("Qwen3", heads),
        "qwen2": ("Qwen2", common),
        "phi3": ("Phi3", common),
        "olmo2": ("Olmo2", common),
        "mixtral": ("Mixtral", {**common, "num_local_experts": 2, "num_experts_per_tok": 1}),
        "qwen3_moe": ("Qwen3Moe", {**heads, **experts}),
        "gemma": ("Gemma", heads),
        "gemma3": ("Gemma3", {**heads, "layer_types": ["full_attention"] * 2}),
        "gemma3_window": ("Gemma3", {**heads, "sliding_window": 8, "layer_types": mixed}),
        "gemma3n": ("Gemma3n", {**heads, **of_gemma3n}),
        "gemma4": ("Gemma4", {**heads, **sharing, "per_layer_config": {"01": wide, "03": wide}}),
        "deepseek_v3": ("DeepseekV3", {**common, **of_mla}),
        "gemma2": ("Gemma2", {**heads, "layer_types": ["full_attention"] * 2, "attn_logit_softcapping": 5.0}),
        "granite": ("Granite", {**common, "logits_scaling": 3.0}),
        "mistral": ("Mistral", {**heads, "sliding_window": 8}),
        "gpt_oss": ("GptOss", {**heads, "layer_types": ["full_attention"] * 2, **of_gpt_oss}),
        "mamba": ("Mamba", of_mamba),
        "llama4": ("Llama4", {**heads, **of_llama4}),
        "recurrent_gemma": ("RecurrentGemma", {**common, "num_hidden_layers": 3, "attention_window_size": 8}),
        "lfm2": ("Lfm2", {**common, "full_attn_idxs": [1]}),
        "qwen3_next": ("Qwen3Next", {**heads, **linear, **experts}),
        "bamba": ("Bamba", {**common, **of_bamba}),
        "falcon_h1": ("FalconH1", {**common, **mamba_heads}),
    }
    return kinds[kind]


def _wrapper(kind: str) -> tuple[str, dict[str, Any]]:
    """Class name and settings of a model that reads images, too."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    sections = {"rope_type": "default", "mrope_section": [4, 2, 2]}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    qwen = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    kinds: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "qwen3_vl": (
            "Qwen3VL",
            {"rope_parameters": {**sections, "mrope_interleaved": True}},
            {**qwen, "patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        ),
        "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": sections}, {**qwen, "fullatt_block_indexes": [0]}),
        "gemma3_vl": ("Gemma3", {"layer_types": ["full_attention"] * 2}, vision),
        "llava": (
            "Llava",
            {"model_type": "llama"},
            {**vision, "model_type": "clip_vision_model", "projection_dim": 16},
        ),
        "mistral3": (
            "Mistral3",
            {"model_type": "mistral", "sliding_window": None},
            {**vision, "model_type": "pixtral", "head_dim": 8},
        ),
        "smolvlm": ("SmolVLM", {"model_type": "llama"}, vision),
        "qwen3_5": (
            "Qwen3_5",
            {
                "rope_parameters": {**sections, "mrope_interleaved": True},
                **{f"linear_num_{part}_heads": 2 for part in ("key", "value")},
                **{f"linear_{part}_head_dim": 8 for part in ("key", "value")},
                "layer_types": ["linear_attention", "full_attention"],
            },
            {**qwen, "patch_size": 4, "num_position_embeddings": 16},
        ),
        "llama4_vl": (
            "Llama4",
            {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
            {
                **vision,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        ),
        "internvl": (
            "InternVL",
            {"model_type": "qwen2"},
            {**vision, "image_size": [28, 28], "patch_size": [14, 14]},
        ),
    }
    name, of_text, of_vision = kinds[kind]
    return name, {"text_config": {**text, **of_text}, "vision_config": of_vision}
