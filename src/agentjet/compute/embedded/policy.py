"""The policy: a stock `transformers` causal language model, and what sampler and learner do with it.

Sampler and learner share this one copy of the weights. A policy whose state can branch runs under an attention plan
(`attention.py`); any other keeps its own attention. `model.load_policy` makes one.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from agentjet.compute.embedded.resolve import load_pretrained
from agentjet.types import ModelCard

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model's folder that belong to an exported one as they are: tokenizer, chat template, processor."""

LogitShape = Callable[[Tensor], Tensor]
"""What a model does to the product of hidden states and output embeddings: nothing, a scale, a soft cap."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes the sampler's cache needs; of models whose layers all keep the same keys and values."""

    layers: int
    kv_heads: int
    head_dim: int


class Policy:
    """The model with its adapters."""

    def __init__(self, model: nn.Module, card: ModelCard, folder: str) -> None:
        """`folder` is the folder or hub id that the weights came from."""
        self.model = model
        self._folder = folder
        self.card = card
        base: Any = cast(Any, model).get_base_model() if hasattr(model, "peft_config") else model
        self.decoder: nn.Module = base.get_decoder()
        self._head: nn.Module = cast(nn.Module, base.get_output_embeddings())
        self.logit_shape: LogitShape = lambda logits: logits
        self.config: Any = base.config.get_text_config()
        self.end_tokens = frozenset(card.end_tokens)

    @property
    def shape(self) -> Shape:
        heads = int(self.config.num_attention_heads)
        return Shape(
            layers=int(self.config.num_hidden_layers),
            kv_heads=int(getattr(self.config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(self.config, "head_dim", None) or self.config.hidden_size // heads),
        )

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def vocabulary(self) -> int:
        """Number of token ids the model knows."""
        return int(cast(Any, self.decoder).get_input_embeddings().num_embeddings)

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states, which some models keep in float32 beside narrower weights."""
        return self.logit_shape(cast(Tensor, self._head(hidden.to(self.dtype))))

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Run under another attention function of `transformers`' registry for a while."""
        config: Any = self.decoder.config
        before, config._attn_implementation = config._attn_implementation, name
        try:
            yield
        finally:
            config._attn_implementation = before

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name, each tied weight once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def original_weights(self) -> dict[str, Tensor]:
        """The trainable weights as they were at version 0, read again: the reference of a KL penalty."""
        hf_config = AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        original = load_pretrained(self.card.name, self._folder, hf_config, self.dtype)
        return {name: p.detach().to(self.device) for name, p in original.named_parameters()}

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """The reference policy of a LoRA run: the same weights without the adapters."""
        with cast(Any, self.model).disable_adapter():
            yield

    def save(self, path: Path, *, merged: bool) -> None:
        """Write a Hugging Face folder; `merged` folds adapters into the weights, otherwise they stay apart."""
        model: Any = self.model
        if self.has_adapters and merged:
            model = copy.deepcopy(model).merge_and_unload()
        model.save_pretrained(path)
        for name in COMPANIONS:
            if source := cached_file(self._folder, name, _raise_exceptions_for_missing_entries=False):
                shutil.copyfile(source, path / name)
        if not (path / "tokenizer.json").exists():
            shutil.copyfile(Path(self.card.tokenizer_path) / "tokenizer.json", path / "tokenizer.json")
