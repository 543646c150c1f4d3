"""Checkpoint folders: `policy/` (Hugging Face layout), `trainer.pt` (tensors only), and `state.json` with digests.

Ranks write `trainer/` (`torch.distributed.checkpoint`) instead of `trainer.pt`. Both backends read both.

A folder is written beside its final place, then renamed. `state.json` names every other file with its size and
SHA-256, and ends with a digest of itself. The command line verifies checkpoints without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError

from agentjet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.policy import Policy

STATE_FILE = "state.json"
TRAINER_FILE = "trainer.pt"
TRAINER_FOLDER = "trainer"
FORMAT = 3
"""Version of `state.json`. No other version is read."""


def save(path: Path, policy: Policy, learner: PolicyLearner, state: dict[str, Any]) -> str:
    """Write a checkpoint; returns its digest. An old folder at `path` is replaced only by a complete new one."""
    import torch

    with atomic_folder(path) as folder:
        policy.save(folder / "policy", merged=False)
        with (folder / TRAINER_FILE).open("wb") as file:  # With a path, torch reports a full disk as "unexpected pos".
            torch.save(learner.state(), file)
        return seal(folder, {**identity(policy), **state})


def load(path: Path, policy: Policy, learner: PolicyLearner) -> dict[str, Any]:
    """Restore weights and optimiser; returns the saved state.

    Raises `CheckpointError` for a damaged checkpoint, `ConfigError` for one that was made with other settings.
    """

    state = verified_state(path)
    check_identity(path, state, policy)
    with fitting(path):
        learner.restore(read_trainer(path, learner))
    return state


def check_identity(path: Path, state: dict[str, Any], policy: Policy) -> None:
    """Raises `ConfigError` if a checkpoint was made with other settings."""
    for key, ours in identity(policy).items():
        if state.get(key) != ours:
            raise ConfigError(
                f"checkpoint {path} has {key} = {state.get(key)!r}, this server has {ours!r}: "
                "use the settings of the checkpoint, or another server.data_dir"
            )


def read_trainer(path: Path, learner: PolicyLearner) -> dict[str, Any]:
    """Returns masters and moments from `trainer.pt` or `trainer/`. Raises `CheckpointError`."""
    import torch

    with fitting(path):
        if (path / TRAINER_FILE).exists():
            device = learner.masters()[0].device
            whole: dict[str, Any] = torch.load(path / TRAINER_FILE, map_location=device, weights_only=True, mmap=True)
            return whole
        import torch.distributed.checkpoint as dcp

        state = learner.new_state()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(state, checkpoint_id=path / TRAINER_FOLDER)  # type: ignore[attr-defined]
        return state


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Raises `CheckpointError` for an error inside the context.

    Boundary: torch and the optimiser raise any error for tensors of another model.
    """
    import torch

    try:
        yield
    except (torch.OutOfMemoryError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} does not fit this model: {type(error).__name__}: {error}") from error


def export(path: Path, policy: Policy, *, adapter: bool = False) -> None:
    """Write the policy as a Hugging Face folder (`transformers`, vLLM), or its `adapter` as a folder for `peft`."""
    assert policy.has_adapters or not adapter, "the gateway refuses the adapter of a policy without one"
    with atomic_folder(path) as folder:
        policy.save(folder, merged=not adapter)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path` to fill; then flushes it to disk and renames it to `path`.

    A failure keeps the old folder and removes the partial one. Raises `CheckpointError` if the folder cannot be
    written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():  # safetensors ignores the umask: it writes files that only their owner can read.
                file.chmod(partial.stat().st_mode & 0o666)
            _flush(file)
        replaced = path.with_name(f".{path.name}.replaced")
        if path.exists():
            path.rename(replaced)
        partial.rename(path)
        _flush(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except CheckpointError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = error.__context__ or error  # Of a full disk, torch reports a RuntimeError after the OSError.
        raise CheckpointError(f"{path} could not be written: {cause}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def identity(policy: Policy) -> dict[str, Any]:
    """Returns the facts that a checkpoint and its policy must share."""
    info = policy.info
    facts = {
        "parameters": info.num_parameters,
        "model_weights": info.weights,
        "adapters": policy.has_adapters,
        "dtype": info.dtype,
    }
    if policy.has_adapters:
        lora = cast(Any, policy.model).peft_config["default"]
        facts |= {
            "model.lora.rank": lora.r,
            "model.lora.alpha": lora.lora_alpha,
            "model.lora.target_modules": sorted(lora.target_modules),
        }
    return facts


def seal(folder: Path, state: dict[str, Any]) -> str:
    """Write `state.json` beside the files of a new checkpoint; returns the checkpoint's digest.

    Equal files and equal states give equal digests.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / STATE_FILE]
    files = {path.relative_to(folder).as_posix(): _described(path) for path in paths}
    content = {"format": FORMAT, **state, "files": files}
    digest = _digest_of(content)
    (folder / STATE_FILE).write_text(json.dumps({**content, "digest": digest}, indent=2))
    return digest


def verified_state(folder: Path) -> dict[str, Any]:
    """Verify the digest of every file; returns the content of `state.json`.

    Raises `CheckpointError` with the name of the first file that does not match.
    """
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read: it has format {found!r} instead of {FORMAT}; "
            "export it with the AgentJet that wrote it"
        )
    if state.get("digest") != _digest_of({key: value for key, value in state.items() if key != "digest"}):
        raise _damaged(folder, STATE_FILE, "its content does not agree with its digest")
    for name, expected in state["files"].items():
        try:
            described = _described(folder / name)
        except OSError as error:
            raise _damaged(folder, name, error.strerror or str(error)) from error
        if described["bytes"] != expected["bytes"]:
            raise _damaged(folder, name, f"it has {described['bytes']} bytes instead of {expected['bytes']}")
        if described != expected:
            raise _damaged(folder, name, "its content does not agree with its digest")
    return cast(dict[str, Any], state)


def _described(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged: {name}: {why}")
