"""The model card: what the gateway must know of a model without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedModel

from agentjet.compute.embedded.fingerprint import model_fingerprint
from agentjet.compute.embedded.resolve import why_not_loaded
from agentjet.config import ModelConfig
from agentjet.config.paths import cache_dir
from agentjet.errors import ConfigError
from agentjet.rendering import template_for
from agentjet.types import ModelCard

UNBOUNDED_CONTEXT = 8192
"""Context length of models that know no limit (recurrent ones) where the settings name none."""


def make_card(config: ModelConfig, folder: str, model: PreTrainedModel) -> ModelCard:
    """The card of a loaded model; raises `ConfigError` when a chat cannot be rendered for it. `can_branch` is False
    until somebody has looked.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name = {config.name!r} has no tokenizer: {why_not_loaded(error)}") from error
    template, tool_format = template_for(config.name, tokenizer.chat_template or "")
    if not template:
        raise ConfigError(
            f"model.name = {config.name!r} has no chat template: "
            "use an instruct model, or add chat_template.jinja to its folder"
        )
    context = _context_length(model)
    if context and config.context_length > context:
        raise ConfigError(
            f"model.context_length = {config.context_length} is above the {context} that {config.name!r} was made for"
        )
    return ModelCard(
        name=config.name,
        tokenizer_path=_tokenizer_folder(folder, tokenizer),
        chat_template=template,
        context_length=config.context_length or context or UNBOUNDED_CONTEXT,
        end_tokens=_end_tokens(model, tokenizer),
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        can_branch=False,
        num_parameters=model.num_parameters(),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        tool_format=tool_format,
        weights=model_fingerprint(model),
        threads=torch.get_num_threads() if model.device.type == "cpu" else 0,
    )


def _context_length(model: PreTrainedModel) -> int | None:
    """The longest context the model was made for; None for a recurrent model."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(longest) if longest else None


def _tokenizer_folder(folder: str, tokenizer: Any) -> str:
    """A local folder with the `tokenizer.json` that `transformers` tokenises with.

    Some tokenizer classes (Llama's) rebuild the pipeline, so that it may differ from the file in the model's folder.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(
            f"{folder}: its tokenizer {type(tokenizer).__name__} is not backed by the tokenizers library: "
            "add a tokenizer.json to the model's folder"
        )
    text = backend.to_str()
    own = Path(folder) / "tokenizer.json"
    if own.exists() and _pipeline(Tokenizer.from_file(str(own)).to_str()) == _pipeline(text):
        return str(own.parent.resolve())
    target = cache_dir() / f"tokenizer-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    tokenizer.save_pretrained(target)
    return str(target)


def _pipeline(text: str) -> dict[str, Any]:
    """A `tokenizer.json` without what changes no token of a text."""
    return {key: value for key, value in json.loads(text).items() if key not in ("truncation", "padding", "decoder")}


def _end_tokens(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    ends: set[int] = set()
    for source in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(model.config.get_text_config(), "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if source is not None:
            ends.update(source if isinstance(source, list | tuple) else [source])
    return tuple(sorted(int(token) for token in ends))
