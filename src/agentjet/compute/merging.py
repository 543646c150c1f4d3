"""Merging of policies that were trained from one base model: RAM and RAM+.

    d_j = theta_j - base,   a weight of model j counts as changed if |d_j| > 1e-5
    merged = base + mean of d_j over the models that changed the weight
           = base + s_j d_j  where only model j changed it

RAM: s_j = 1. RAM+: s_j = 1 + (r - 1) min(1, shared_j / unique_j), with the numbers of weights that model j shares with
another one and of those that it alone changed. Source: github.com/xiangchi-yuan/mrl at e2d930d.

Plain averaging shrinks a weight that one policy alone learned. RAM keeps it whole. Adapters are merged into dense
weights first, because their matrices have no common meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig

from agentjet.compute.policy import (
    copy_tokenizer_files,
    first_line,
    keep_other_tensors,
    load_pretrained,
    locate_model,
    why_not_loaded,
)
from agentjet.errors import ConfigError

CHANGED = 1e-5
"""Smallest difference of a weight that counts as a change."""
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

Weights = Mapping[str, Tensor]


class WeightShares(NamedTuple):
    """Numbers of weights that a model changed."""

    shared: int
    """Weights that another model changed, too."""
    unique: int
    """Weights that it alone changed."""


def merge(
    base: Weights, models: Iterable[Weights], rescale: float = 1.0
) -> tuple[dict[str, Tensor], list[WeightShares]]:
    """Returns the merged weights in the types of `base`, and the shares of each model. `rescale` is r; 1 is RAM.

    `models` are read one after the other. Weights that a model does not have count as unchanged.
    """
    sums = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in base.items()}
    counts = {name: torch.zeros_like(tensor, dtype=torch.int8) for name, tensor in base.items()}
    owners = {name: torch.zeros_like(tensor, dtype=torch.int8) for name, tensor in base.items()}
    num_changed: list[dict[str, Tensor]] = []
    for number, model in enumerate(models):
        changed: dict[str, Tensor] = {}
        for name, tensor in base.items():
            if name in model:
                difference = model[name].float() - tensor.float()
                changed[name] = difference.abs() > CHANGED
                sums[name] += difference.where(changed[name], 0)
                counts[name] += changed[name]
                owners[name].masked_fill_(changed[name], number)
        num_changed.append({name: mask.sum() for name, mask in changed.items()})
    shares = []
    for number, found in enumerate(num_changed):
        unique = sum(int(((counts[name] == 1) & (owners[name] == number)).sum()) for name in base)
        shares.append(WeightShares(sum(map(int, found.values())) - unique, unique))
    scale = torch.tensor([1 + (rescale - 1) * min(1.0, one.shared / one.unique) if one.unique else 1 for one in shares])
    merged = {}
    for name, tensor in base.items():
        alone = counts[name] == 1
        difference = (sums[name] / counts[name].clamp(min=1)).where(~alone, sums[name] * scale[owners[name].long()])
        merged[name] = (tensor.float() + difference).to(tensor.dtype)
    return merged, shares


def merge_folders(out: Path, folders: Sequence[Path], base: str = "", rescale: float = 1.0) -> list[WeightShares]:
    """Writes the merge of Hugging Face or PEFT folders as a Hugging Face folder. Returns the shares of each.

    `base` is a model name; by default that of the adapters. Needs memory for about four models in float32. Raises
    `ConfigError`.
    """
    base = base or base_of(folders)
    place = locate_model(base)
    try:
        model = _load(base, place)
        state = dict(model.state_dict())
        merged, shares = merge(state, (_weights(folder, base, place, state) for folder in folders), rescale)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(merged[name])
        cast(Any, model).save_pretrained(out)
        keep_other_tensors(place, out, model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the models cannot be merged: {why_not_loaded(error)}") from error
    copy_tokenizer_files(place, out)
    return shares


def base_of(folders: Sequence[Path]) -> str:
    """Returns the base model that all adapters name. Raises `ConfigError` if there is not exactly one."""
    found = {_named_base(folder / ADAPTER) for folder in folders if (folder / ADAPTER).exists()}
    if len(found) != 1:
        named = ", ".join(sorted(found)) or "none: whole models do not name it"
        raise ConfigError(f"the base model is unknown (the adapters name {named}): give it with --base")
    return found.pop()


def _named_base(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(f"{file} cannot be read: {why}") from error


def _load(name: str, folder: str, dtype: torch.dtype | None = None) -> nn.Module:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    found = dtype or getattr(config, "dtype", None) or torch.float32
    return cast(nn.Module, load_pretrained(name, folder, config, found).eval())


def _weights(folder: Path, base: str, place: str, state: Weights) -> Weights:
    """Returns the whole weights of a folder in float32.

    Raises `ConfigError` for files that cannot be read, weights that are not finite, and those of another base.
    """
    try:
        if (folder / ADAPTER).exists():
            weights = _adapted(folder, base, place)
        else:
            weights = dict(_load(str(folder), str(folder), torch.float32).state_dict())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be read: {why_not_loaded(error)}") from error
    wrong = [name for name, tensor in state.items() if name not in weights or weights[name].shape != tensor.shape]
    if wrong:
        raise ConfigError(f"{folder} was not trained from {base!r}: it has no {wrong[0]} of that shape")
    broken = [name for name in state if not bool(weights[name].isfinite().all())]
    if broken:
        raise ConfigError(f"{folder}: the weights {broken[0]} are not finite: take an earlier checkpoint")
    return weights


def _adapted(folder: Path, base: str, place: str) -> Weights:
    """Returns the weights of the base with the adapter of a folder."""
    from peft import PeftModel

    if not any((folder / name).exists() for name in ADAPTER_WEIGHTS):  # peft would ask the hub for them.
        raise ConfigError(f"{folder} is an adapter without weights: it has no {ADAPTER_WEIGHTS[0]}")
    model = PeftModel.from_pretrained(cast(Any, _load(base, place, torch.float32)), str(folder))
    return dict(cast(Any, model).merge_and_unload().state_dict())
