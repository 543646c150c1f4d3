"""Checkpoint folders: `policy/` (Hugging Face layout), `trainer.pt` (tensors only), `state.json`. Written beside,
then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentjet.compute.embedded.learner import Learner
from agentjet.compute.embedded.policy import Policy
from agentjet.errors import CheckpointError

FORMAT = 1


def save(path: Path, policy: Policy, learner: Learner, state: dict[str, Any]) -> None:
    """Write a checkpoint; what was at `path` before is replaced only once the new one is complete on disk."""

    def write(folder: Path) -> None:
        policy.save(folder / "policy", merged=False)
        with (folder / "trainer.pt").open("wb") as file:  # Given its path, torch says of a full disk "unexpected pos".
            torch.save(learner.state(), file)
        (folder / "state.json").write_text(json.dumps({"format": FORMAT, **_identity(policy), **state}, indent=2))

    write_atomically(path, write)


def load(path: Path, policy: Policy, learner: Learner) -> dict[str, Any]:
    """Restore weights and optimiser; returns the saved state. Raises `CheckpointError` when it is another model's."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        trainer = torch.load(path / "trainer.pt", map_location=policy.device, weights_only=True, mmap=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    for key, ours in _identity(policy).items():
        if state.get(key) != ours:
            raise CheckpointError(
                f"checkpoint {path} has {key} = {state.get(key)!r}, this server {ours!r}: "
                "use the settings it was made with"
            )
    learner.restore(trainer)
    return state


def export(path: Path, policy: Policy) -> None:
    """Write the policy as a plain Hugging Face folder that `transformers` and vLLM load as is."""
    write_atomically(path, lambda folder: policy.save(folder, merged=True))


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
    """What a checkpoint must agree on with the policy it is loaded into."""
    return {"parameters": policy.card.num_parameters, "adapters": policy.has_adapters, "dtype": policy.card.dtype}
