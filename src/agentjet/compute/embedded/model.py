"""Loading the policy: the configured model on its device, under a plan where its state can branch.

Whether it can is looked up in the model's config, then tried (`branching.py`). A model that cannot is sampled and
taught one row per timeline, with its own attention, which costs speed only.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from agentjet.compute.embedded.attention import ATTENTION
from agentjet.compute.embedded.branching import why_state_cannot_branch
from agentjet.compute.embedded.card import make_card
from agentjet.compute.embedded.logits import find_logit_shape
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.resolve import (
    first_line,
    load_pretrained,
    resolve_device,
    resolve_dtype,
    resolve_model,
    why_not_loaded,
)
from agentjet.config import LoraConfig, ModelConfig
from agentjet.errors import ConfigError

log = logging.getLogger(__name__)

BEGINNING = 0
"""Seed of what is drawn while a model is loaded (adapters): every worker begins alike, or a replay would end elsewhere.
Set after the type was found, which may take draws or not.
"""


def load_policy(config: ModelConfig) -> Policy:
    """Load the configured model on its device; raises `ConfigError` naming what is wrong and the way out."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    folder = resolve_model(config.name)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name = {config.name!r}: {why_not_loaded(error)}") from error
    dtype = resolve_dtype(config.dtype, device, hf_config)
    torch.manual_seed(BEGINNING)
    model: Any = load_pretrained(config.name, folder, hf_config, dtype)
    model = model.to(device).eval()
    _freeze_towers(model)
    card = make_card(config, folder, model)
    if config.lora.rank:
        model = _with_adapters(model, config.lora)
    policy = Policy(model, card, folder)
    policy.logit_shape = find_logit_shape(policy)
    reason = why_state_cannot_branch(policy)
    if reason is None:
        cast(Any, policy.decoder.config)._attn_implementation = ATTENTION
        policy.card = dataclasses.replace(card, can_branch=True)
    else:
        log.warning("%s: state cannot branch (%s): one row per timeline", config.name, reason)
    return policy


WITHOUT_OUT_PROJ = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose kernels read `out_proj.weight` past its adapter: peft refuses one there."""


def _freeze_towers(model: Any) -> None:
    """Vision and audio parts of a wrapper get no gradient from text: only the language model learns."""
    learns = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learns)


def _with_adapters(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """The model with an adapter on every linear layer of its language model, or on those that the settings name."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    targets: str | list[str] = "all-linear"
    excluded: list[str] = []
    if lora.target_modules == targets:
        decoder = set(cast(Any, model).get_decoder().modules())
        excluded = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part not in decoder]
        excluded += ["out_proj"] * (model.config.model_type in WITHOUT_OUT_PROJ)
    else:
        targets = [m.strip() for m in lora.target_modules.split(",")]
    try:
        adapted = get_peft_model(
            model,
            PeftConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=targets,
                exclude_modules=excluded or None,
                task_type="CAUSAL_LM",
            ),
            autocast_adapter_dtype=False,
        )
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules = {lora.target_modules!r}: {first_line(error)}") from error
    if experts := _experts_without_adapters(adapted):
        log.warning("routed experts get no adapter, their weights stay as they are: %s", ", ".join(experts))
    return cast(nn.Module, adapted.eval())


def _experts_without_adapters(adapted: nn.Module) -> list[str]:
    """Modules that hold the weights of all their experts in one tensor and that peft left alone."""
    return [
        name.removeprefix("base_model.model.")
        for name, part in adapted.named_modules()
        if name.endswith("experts") and any(p.ndim == 3 for p in part.parameters(recurse=False))
    ]
