"""Checkpoint folders: `policy/` (Hugging Face layout), `trainer.pt` (tensors only), and `state.json` with digests.

A folder is written beside its final place, then renamed. `state.json` names every other file with its size and
SHA-256, and ends with a digest of itself. Nothing here imports torch at the top: the command line verifies checkpoints
without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentjet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from agentjet.compute.embedded.learner import PolicyLearner
    from agentjet.compute.embedded.policy import Policy

STATE_FILE = "state.json"
FORMAT = 2
"""Version of `state.json`. Format 1, of AgentJet 0.1, has no digests."""


def save(path: Path, policy: Policy, learner: PolicyLearner, state: dict[str, Any]) -> str:
    """Write a checkpoint; returns its digest. An old folder at `path` is replaced only by a complete new one."""
    import torch

    digest = ""

    def write(folder: Path) -> None:
        nonlocal digest
        policy.save(folder / "policy", merged=False)
        with (folder / "trainer.pt").open("wb") as file:  # With a path, torch reports a full disk as "unexpected pos".
            torch.save(learner.state(), file)
        digest = seal(folder, {**_identity(policy), **state})

    write_atomically(path, write)
    return digest


def load(path: Path, policy: Policy, learner: PolicyLearner) -> dict[str, Any]:
    """Restore weights and optimiser; returns the saved state.

    Raises `CheckpointError` for a damaged checkpoint, `ConfigError` for one that was made with other settings.
    """
    import torch

    try:
        state = verified_state(path)
        state["policy_version"] = int(state["policy_version"])
        made_with = state | (_saved_adapters(path) if state["adapters"] else {})
        trainer = torch.load(path / "trainer.pt", map_location=policy.device, weights_only=True, mmap=True)
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # Boundary: a damaged file of format 1 can make the libraries raise any error.
        raise CheckpointError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
    for key, ours in (_identity(policy) | _adapters(policy)).items():
        if made_with.get(key, ours) != ours:
            raise ConfigError(
                f"checkpoint {path} has {key} = {made_with[key]!r}, this server has {ours!r}: "
                "use the settings of the checkpoint, or another server.data_dir"
            )
    try:
        learner.restore(trainer)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # As above.
        raise CheckpointError(f"checkpoint {path} does not fit this model: {type(error).__name__}: {error}") from error
    return state


def export(path: Path, policy: Policy, *, adapter: bool = False) -> None:
    """Write the policy as a Hugging Face folder (`transformers`, vLLM), or its `adapter` as a folder for `peft`."""
    assert policy.has_adapters or not adapter, "the gateway refuses the adapter of a policy without one"
    write_atomically(path, lambda folder: policy.save(folder, merged=not adapter))


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder beside `path`, flush it to disk, then rename it to `path`.

    A failure keeps the old folder and removes the partial one.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
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
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{path} could not be written: {_cause(error)}") from error
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if type(error).__name__ != "SafetensorError":  # reports a full disk
            raise
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _cause(error: BaseException) -> BaseException:
    """Returns the `OSError` behind an error of torch, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(policy: Policy) -> dict[str, Any]:
    """Returns the facts that a checkpoint and its policy must share, besides the settings of adapters."""
    info = policy.info
    return {
        "parameters": info.num_parameters,
        "model_weights": info.weights,
        "adapters": policy.has_adapters,
        "dtype": info.dtype,
    }


def _adapters(policy: Policy) -> dict[str, Any]:
    """Returns the settings of a policy's adapters, with the adapted modules; empty without adapters."""
    if not policy.has_adapters:
        return {}
    peft = cast(Any, policy.model).peft_config["default"]
    return _lora(peft.r, peft.lora_alpha, peft.target_modules)


def _saved_adapters(path: Path) -> dict[str, Any]:
    """Returns the settings of a checkpoint's adapters, as `peft` wrote them."""
    saved = json.loads((path / "policy" / "adapter_config.json").read_text())
    return _lora(saved["r"], saved["lora_alpha"], saved["target_modules"])


def _lora(rank: int, alpha: int, modules: Iterable[str]) -> dict[str, Any]:
    return {"model.lora.rank": rank, "model.lora.alpha": alpha, "model.lora.target_modules": sorted(modules)}


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
    """Verify the digest of every file; returns the content of `state.json`. Format 1 has no digests to verify.

    Raises `CheckpointError` with the name of the first file that does not match.
    """
    state = _read(folder / STATE_FILE)
    if state.get("format") == 1 and not {"digest", "files"} & state.keys():
        return state
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {folder} cannot be read: it has format {state.get('format')!r}")
    if state.get("digest") != _digest_of({key: value for key, value in state.items() if key != "digest"}):
        raise _damaged(folder, STATE_FILE, "its content does not agree with its digest")
    for name, expected in state["files"].items():
        try:
            size = (folder / name).stat().st_size
            if size != expected["bytes"]:
                raise _damaged(folder, name, f"it has {size} bytes instead of {expected['bytes']}")
            if _described(folder / name) != expected:
                raise _damaged(folder, name, "its content does not agree with its digest")
        except OSError as error:
            raise _damaged(folder, name, error.strerror or str(error)) from error
    return state


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path.parent} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise _damaged(path.parent, STATE_FILE, "it is not a JSON object")
    return state


def _described(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(folder: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {folder} is damaged: {name}: {why}")
