"""Loading of a policy: the model on its device, its adapters, its `ModelInfo`, and the test for prefix sharing.

A model shares prefixes if one prefix can be computed once for several continuations. Both conditions must hold:

* By its config, every layer is full attention. A window that is not shorter than the context counts as full.
* A forward pass over a small forest under an attention plan gives the same result as the model row by row. The pass
  finds what a config does not show: soft caps, sinks, biases, convolutions, unusual key and value sizes.

Any other model samples and learns one row per timeline with its own attention. The result is the same, the cost higher.

`make_random_model` writes a tiny model of random weights, for studies of training without a download.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from agentjet.compute.embedded.adapters import copied_modules, mixable_layers
from agentjet.compute.embedded.attention import ATTENTION, AttentionPlan, flat_forward
from agentjet.compute.embedded.forest_attention import forest_plan
from agentjet.compute.embedded.policy import (
    Policy,
    find_logit_transform,
    first_line,
    load_pretrained,
    locate_model,
    model_fingerprint,
    probe_tokens,
    resolve_device,
    resolve_dtype,
    save_once,
    tolerance,
    why_not_loaded,
)
from agentjet.config import LoraConfig, ModelConfig
from agentjet.config.loader import cache_dir
from agentjet.errors import ConfigError
from agentjet.rendering import template_for
from agentjet.timeline.forest import Row, build_forest
from agentjet.types import ModelInfo

log = logging.getLogger(__name__)

LOADING_SEED = 0
"""Seed of the adapters' random weights. Every worker starts with equal weights, because a replay must end with equal
weights. The seed is set after the type was chosen, because that may draw random numbers.
"""


class BaseModel:
    """A loaded model: a policy that trains all of its weights, or the base of any number of adapters."""

    def __init__(self, config: ModelConfig) -> None:
        """Load the configured model on its device; raises `ConfigError` naming what is wrong and the way out."""
        self._config = config
        if config.threads:
            torch.set_num_threads(config.threads)
        device = resolve_device(config.device)
        folder = locate_model(config.name)
        try:
            hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.name = {config.name!r}: {why_not_loaded(error)}") from error
        dtype = resolve_dtype(config.dtype, device)
        torch.manual_seed(LOADING_SEED)
        model: Any = load_pretrained(config.name, folder, hf_config, dtype)
        self._random_state = torch.get_rng_state()
        model = model.to(device).eval()
        _freeze_towers(model)
        self._folder = folder
        self.policy = Policy(model, make_model_info(config, folder, model), folder)
        """The model without adapters."""
        self.policy.logit_transform = find_logit_transform(self.policy)
        reason = prefix_sharing_obstacle(self.policy)
        if reason is None:
            cast(Any, self.policy.decoder.config)._attn_implementation = ATTENTION
            self.policy.info = dataclasses.replace(self.policy.info, shares_prefixes=True)
        else:
            log.warning("%s: prefixes are not shared (%s): one row per timeline", config.name, reason)

    def adapted(self, lora: LoraConfig) -> Policy:
        """Returns a new policy: an adapter over the weights of this model. Raises `ConfigError`.

        The policy has separate modules and shares the weights below them. So adapters do not depend on each other. Each
        starts with the same random weights.
        """
        modules = copied_modules(self.policy.model)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random_state)
            policy = Policy(_with_adapters(modules, lora), self.policy.info, self._folder)
        policy.logit_transform = self.policy.logit_transform
        policy.mixable_layers = mixable_layers(policy)
        return policy

    def difference(self, config: ModelConfig) -> str:
        """Returns why this model is not the base of an adapter with these settings; empty if it is."""
        ours, dtype = self._config, self.policy.info.dtype
        pairs = [("model.name", config.name, ours.name), ("model.dtype", config.dtype, dtype)]
        pairs += [
            (f"model.{name}", getattr(config, name), getattr(ours, name)) for name in ("device", "context_length")
        ]
        for key, theirs, known in pairs:
            if theirs != known and (key, theirs) != ("model.dtype", "auto"):
                return f"{key} = {theirs!r} differs from the {known!r}"
        return ""


def load_policy(config: ModelConfig) -> Policy:
    """Load the configured model with its adapter, if any; raises `ConfigError`."""
    base = BaseModel(config)
    return base.adapted(config.lora) if config.lora.rank else base.policy


WITHOUT_OUT_PROJ = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose kernels read `out_proj.weight` directly and would skip an adapter; peft refuses one there."""


def _freeze_towers(model: Any) -> None:
    """Freeze the vision and audio parts of a wrapper: only the language model learns."""
    learns = {id(p) for part in (model.get_decoder(), model.get_output_embeddings()) for p in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in learns)


def _with_adapters(model: PreTrainedModel, lora: LoraConfig) -> nn.Module:
    """Add an adapter to every linear layer of the language model, or to those that the settings name."""
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
    """Returns the modules that hold all experts in one tensor, where peft adds no adapter."""
    return [
        name.removeprefix("base_model.model.")
        for name, part in adapted.named_modules()
        if name.endswith("experts") and any(p.ndim == 3 for p in part.parameters(recurse=False))
    ]


RECURRENT_CONTEXT = 8192
"""Context length of recurrent models, which have no limit, if the settings name none."""


def make_model_info(config: ModelConfig, folder: str, model: PreTrainedModel) -> ModelInfo:
    """Returns the info of a loaded model, with `shares_prefixes` False.

    Raises `ConfigError` if chats cannot be rendered.
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
    return ModelInfo(
        name=config.name,
        tokenizer_path=_tokenizer_folder(folder, tokenizer),
        chat_template=template,
        context_length=config.context_length or context or RECURRENT_CONTEXT,
        end_tokens=_end_tokens(model, tokenizer),
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        shares_prefixes=False,
        num_parameters=model.num_parameters(),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        tool_format=tool_format,
        weights=model_fingerprint(model),
        threads=torch.get_num_threads() if model.device.type == "cpu" else 0,
    )


def _context_length(model: PreTrainedModel) -> int | None:
    """Returns the longest context that the model was made for; None for a recurrent model."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(longest) if longest else None


def _tokenizer_folder(folder: str, tokenizer: Any) -> str:
    """Returns a local folder with the `tokenizer.json` that `transformers` uses.

    Some tokenizer classes (Llama's) rebuild the pipeline, so it may differ from the file in the model's folder.
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
    if not target.exists():
        save_once(target, tokenizer)
    return str(target)


def _pipeline(text: str) -> dict[str, Any]:
    """Returns the parts of a `tokenizer.json` that change the tokens of a text."""
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


FULL = "full_attention"
WINDOW_SETTING = re.compile(r"window_(size|len)|index_topk")
"""Settings of layers with a limited view, in configs that do not list their layers."""
PROBE_TRUNK, PROBE_BRANCH = 8, 5


def prefix_sharing_obstacle(policy: Policy) -> str | None:
    """Returns the reason why a model does not share prefixes; None if it does.

    Boundary: any exception of the model's code under an attention plan becomes a reason.
    """
    try:
        return _by_config(policy.config, policy.info.context_length) or _by_trial(policy)
    except Exception as error:
        return f"it does not run under an attention plan: {type(error).__name__}: {first_line(error)}"


def _by_config(config: Any, context: int) -> str | None:
    kinds: set[str] = set()
    for kind, arguments in zip(*get_layer_types_and_kwargs(config), strict=True):
        window = arguments.get("sliding_window")
        if kind == FULL or (kind == "sliding_attention" and window and window >= context):
            continue
        kinds.add(f"{kind} of {window} in a context of {context}" if window else kind)
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))}"
    short = sorted(key for key, value in config.to_dict().items() if value and WINDOW_SETTING.search(key))
    return f"its config has {', '.join(short)}" if short else None


@torch.inference_mode()
def _by_trial(policy: Policy) -> str | None:
    """Compare two rows with a common prefix: as one forest under a plan, and row by row by the model itself."""
    tokens = probe_tokens(policy, PROBE_TRUNK + 2 * PROBE_BRANCH).cpu().numpy().astype(np.int32)
    rows = [
        tokens[: PROBE_TRUNK + PROBE_BRANCH],
        np.concatenate([tokens[:PROBE_TRUNK], tokens[PROBE_TRUNK + PROBE_BRANCH :]]),
    ]
    forest = build_forest([Row(row, slice(0), {}) for row in rows])
    assert forest.num_nodes == len(tokens), "the vocabulary is smaller than the probe"
    plan = _RecordingPlan(forest_plan(forest, policy.device))
    with policy.attention(ATTENTION):
        hidden = flat_forward(
            policy.decoder,
            torch.from_numpy(forest.tokens.astype(np.int64)).to(policy.device),
            torch.from_numpy(forest.depth.astype(np.int64)).to(policy.device),
            plan,
        )
    if (mismatch := plan.mismatch(policy)) is not None:
        return mismatch
    ours = policy.head(hidden).float().log_softmax(-1)
    for row in rows:
        ids = torch.from_numpy(row.astype(np.int64)).to(policy.device)
        logits = cast(Any, policy.model)(input_ids=ids[None], use_cache=False).logits[0].float()
        theirs = logits.log_softmax(-1)
        branch = np.flatnonzero(np.isin(forest.tokens, row))
        difference = float((ours[torch.from_numpy(branch).to(policy.device)] - theirs).abs().max())
        if not difference <= tolerance(policy.dtype, logits):
            return f"its attention differs from plain attention by {difference:.3f} in log-probability"
    return None


class _RecordingPlan:
    """Delegates to a plan and records the layers and their key and value sizes."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._layers: list[int] = []
        self._sizes: set[tuple[int, ...]] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `AttentionPlan`."""
        self._layers.append(layer)
        self._sizes |= {tuple(key.shape[1:]), tuple(value.shape[1:])}
        return self._plan.attend(layer, query, key, value, scale)

    def mismatch(self, policy: Policy) -> str | None:
        """Returns how the layers differ from the sampler's cache layout; None if they match."""
        shape = policy.shape
        if sorted(self._layers) != list(range(shape.layers)):
            return f"{len(set(self._layers))} of its {shape.layers} layers attend through the library's interface"
        if self._sizes != {(shape.kv_heads, shape.head_dim)}:
            return f"its keys and values have the sizes {sorted(self._sizes)}"
        return None


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Token ids 0, 1, 2. The 256 bytes follow."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RANDOM_MODEL_CONTEXT = 1024


def make_random_model(folder: Path, *, layers: int = 2, width: int = 32, seed: int = 0) -> Path:
    """Write a two-layer model over bytes to a new `folder`. The same seed gives the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = byte_vocabulary()
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer(vocabulary)), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "model_max_length": RANDOM_MODEL_CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=RANDOM_MODEL_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def byte_vocabulary() -> dict[str, int]:
    """Returns the special tokens, then the 256 bytes in the spelling of byte-level tokenizers (Radford et al. 2019).

    Printable bytes are spelled as themselves, the others as the characters from 256 on, in order.
    """
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    spelled = [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
    return {token: number for number, token in enumerate((*SPECIAL, *spelled))}


def byte_tokenizer(vocabulary: dict[str, int]) -> dict[str, object]:
    """Returns the content of `tokenizer.json`: a byte-level BPE without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
