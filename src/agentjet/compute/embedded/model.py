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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentjet.compute.embedded.attention import ATTENTION
from agentjet.compute.embedded.branching import why_state_cannot_branch
from agentjet.compute.embedded.card import make_card
from agentjet.compute.embedded.logits import find_logit_shape
from agentjet.compute.embedded.policy import Policy
from agentjet.compute.embedded.resolve import first_line, resolve_device, resolve_dtype, resolve_model, why_not_loaded
from agentjet.config import LoraConfig, ModelConfig
from agentjet.errors import ConfigError

log = logging.getLogger(__name__)

BEGINNING = 0
"""Seed of what is drawn while a model is loaded (adapters): every worker begins alike, or a replay would end elsewhere.
Set after the type was found, which may take draws or not.
"""
NUM_SHOWN = 3


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
    model = _from_files(config.name, folder, dtype).to(device).eval()
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


def _from_files(name: str, folder: str, dtype: torch.dtype) -> Any:
    """Load the weights. Raises `ConfigError` if the files lack some, which the library would draw at random.

    Tied weights and buffers are not missing.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False, output_loading_info=True
    )
    model, loading = loaded
    missing = sorted(set(loading["missing_keys"]) & {name for name, _ in model.named_parameters()})
    if missing:
        shown = ", ".join(missing[:NUM_SHOWN]) + (", …" if len(missing) > NUM_SHOWN else "")
        raise ConfigError(
            f"model.name = {name!r}: its files lack {len(missing)} of the model's weights ({shown}): "
            "use files that hold the whole causal language model"
        )
    return model


def _with_adapters(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    targets = (
        lora.target_modules
        if lora.target_modules == "all-linear"
        else [m.strip() for m in lora.target_modules.split(",")]
    )
    try:
        adapted = get_peft_model(
            model,
            PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"),
            autocast_adapter_dtype=False,
        )
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules = {lora.target_modules!r}: {first_line(error)}") from error
    return cast(nn.Module, adapted.eval())
