"""Checkpoint folders: `policy/` (Hugging Face layout), `trainer.pt` (tensors only), `state.json` with the digests of
both. Written beside, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch

from agentjet.compute.embedded.digests import seal, verified_state
from agentjet.compute.embedded.learner import PolicyLearner
from agentjet.compute.embedded.policy import Policy
from agentjet.errors import CheckpointError, ConfigError


def save(path: Path, policy: Policy, learner: PolicyLearner, state: dict[str, Any]) -> str:
    """Write a checkpoint; returns its digest. What was at `path` before is replaced only once the new one is complete
    on disk.
    """
    digest = ""

    def write(folder: Path) -> None:
        nonlocal digest
        policy.save(folder / "policy", merged=False)
        with (folder / "trainer.pt").open("wb") as file:  # Given its path, torch says of a full disk "unexpected pos".
            torch.save(learner.state(), file)
        digest = seal(folder, {**_identity(policy), **state})

    write_atomically(path, write)
    return digest


def load(path: Path, policy: Policy, learner: PolicyLearner) -> dict[str, Any]:
    """Restore weights and optimiser; returns the saved state.

    Raises `CheckpointError` for every damage, `ConfigError` when it was made under other settings.
    """
    try:
        state = verified_state(path)
        state["policy_version"] = int(state["policy_version"])
        made_with = state | (_saved_adapters(path) if state["adapters"] else {})
        trainer = torch.load(path / "trainer.pt", map_location=policy.device, weights_only=True, mmap=True)
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # The boundary: a damaged file of format 1 may make the libraries raise anything.
        raise CheckpointError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    for key, ours in (_identity(policy) | _adapters(policy)).items():
        if made_with.get(key, ours) != ours:
            raise ConfigError(
                f"checkpoint {path} has {key} = {made_with[key]!r}, this server {ours!r}: "
                "use the settings it was made with, or another server.data_dir"
            )
    try:
        learner.restore(trainer)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # As above.
        raise CheckpointError(f"checkpoint {path} does not fit this model: {type(error).__name__}: {error}") from error
    return state


def export(path: Path, policy: Policy, *, adapter: bool = False) -> None:
    """Write the policy as a plain Hugging Face folder that `transformers` and vLLM load as is, or its `adapter` alone
    as a folder that `peft` loads.
    """
    assert policy.has_adapters or not adapter, "the gateway refuses the adapter of a policy without one"
    write_atomically(path, lambda folder: policy.save(folder, merged=not adapter))


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder beside `path`, flush it to disk, then put it in place. A failure leaves the old one and no
    litter.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        for file in partial.rglob("*"):
            if file.is_file():  # safetensors writes for its user alone; who may read the folder is the umask's to say.
                file.chmod(partial.stat().st_mode & 0o666)
            _flush(file)
        replaced = path.with_name(f".{path.name}.replaced")
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        _flush(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{path} could not be written: {_cause(error)}") from error
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if type(error).__name__ != "SafetensorError":  # its only way of saying that the disk is full
            raise
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _cause(error: BaseException) -> BaseException:
    """What the disk said, where torch says something else while it handles that."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError):
        behind = behind.__context__
    return behind or error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(policy: Policy) -> dict[str, Any]:
    """What a checkpoint must agree on with the policy it is loaded into, besides the settings of its adapters."""
    card = policy.card
    return {
        "parameters": card.num_parameters,
        "model_weights": card.weights,
        "adapters": policy.has_adapters,
        "dtype": card.dtype,
    }


def _adapters(policy: Policy) -> dict[str, Any]:
    """The settings of a policy's adapters, with the modules they stand for; empty where it has none."""
    if not policy.has_adapters:
        return {}
    peft = cast(Any, policy.model).peft_config["default"]
    return _lora(peft.r, peft.lora_alpha, peft.target_modules)


def _saved_adapters(path: Path) -> dict[str, Any]:
    """Of a checkpoint, as `peft` wrote them."""
    saved = json.loads((path / "policy" / "adapter_config.json").read_text())
    return _lora(saved["r"], saved["lora_alpha"], saved["target_modules"])


def _lora(rank: int, alpha: int, modules: Iterable[str]) -> dict[str, Any]:
    return {"model.lora.rank": rank, "model.lora.alpha": alpha, "model.lora.target_modules": sorted(modules)}
