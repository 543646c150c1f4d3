"""Checkpoint folders: `policy/` (Hugging Face layout), `trainer.pt` (tensors only), and `state.json` with digests.

Ranks write `trainer/` (`torch.distributed.checkpoint`) instead of `trainer.pt`: each its part, and any number of ranks
divides it again. All ranks must see the folder. Both backends read both.

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError

from agentjet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from agentjet.compute.group import RankGroup
    from agentjet.compute.learner import PolicyLearner
    from agentjet.compute.policy import Policy

STATE_FILE = "state.json"
TRAINER_FILE = "trainer.pt"
TRAINER_FOLDER = "trainer"
MOVED_REFERENCE = "moved_reference"
"""Key in `state.json`: true if the trainer's state has a reference that has moved."""
FORMAT = 3
"""Version of `state.json`. No other version is read."""


def save(path: Path, learner: PolicyLearner, state: dict[str, Any]) -> str:
    """Write a checkpoint; returns its digest. An old folder at `path` is replaced only by a complete new one.

    Each rank writes its part of masters and moments, rank 0 the other files. An error of one rank is raised on all.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    policy, ranks = learner.policy, learner.ranks
    weights = learner.adapter_weights() if policy.has_adapters else learner.whole_weights()
    with ExitStack() as stack:
        folder = _shared_folder(path, ranks, stack)
        if ranks.mesh is not None:
            try:
                dcp.save(learner.state(), checkpoint_id=folder / TRAINER_FOLDER)  # type: ignore[attr-defined]
            except CheckpointException as error:  # It has the errors of all ranks and is raised on all of them.
                rank, (cause, _) = next(iter(error.failures.items()))
                raise CheckpointError(f"{path} could not be written: rank {rank}: {cause}") from error

        def complete() -> str:
            if ranks.rank != 0:
                return ""
            with _writing(path):
                policy.save(folder / "policy", merged=False, weights=weights)
                if ranks.mesh is None:
                    # With a path, torch reports a full disk as "unexpected pos".
                    with (folder / TRAINER_FILE).open("wb") as file:
                        torch.save(learner.state(), file)
                moved = {MOVED_REFERENCE: True} if learner.reference_moved else {}
                digest = seal(folder, {**identity(policy), **moved, **state})
            stack.close()
            return digest

        return str(ranks.gather(ranks.agreed(complete))[0])


def _shared_folder(path: Path, ranks: RankGroup, stack: ExitStack) -> Path:
    """Returns the new folder of a checkpoint, which all ranks see. Rank 0 completes it with `stack`."""

    def begin() -> str:
        return str(stack.enter_context(atomic_folder(path))) if ranks.rank == 0 else ""

    folder = Path(ranks.gather(ranks.agreed(begin))[0])

    def find() -> None:
        if not folder.is_dir():
            raise CheckpointError(_not_shared(path, ranks))

    ranks.agreed(find)
    return folder


def _not_shared(path: Path, ranks: RankGroup) -> str:
    return (
        f"rank {ranks.rank} does not see {path}: server.data_dir must be on a file system that the gateway and all "
        "ranks mount at the same path"
    )


def load(path: Path, learner: PolicyLearner) -> dict[str, Any]:
    """Restore weights and optimiser; returns the saved state.

    Raises `CheckpointError` for a damaged checkpoint, `ConfigError` for one that was made with other settings, and for
    a folder that a rank does not see.
    """
    ranks = learner.ranks

    def verify() -> dict[str, Any]:
        if ranks.mesh is not None and not path.is_dir():
            raise ConfigError(_not_shared(path, ranks))  # Not damaged: the checkpoint must stay.
        return verified_state(path) if ranks.rank == 0 else {}

    state: dict[str, Any] = ranks.gather(ranks.agreed(verify))[0]
    ranks.agreed(lambda: check_identity(path, state, learner.policy))
    trainer = ranks.agreed(lambda: read_trainer(path, learner, state))
    with fitting(path):
        learner.restore(trainer)
    return state


def check_identity(path: Path, state: dict[str, Any], policy: Policy) -> None:
    """Raises `ConfigError` if a checkpoint was made with other settings."""
    for key, ours in identity(policy).items():
        if state.get(key) != ours:
            raise ConfigError(
                f"checkpoint {path} has {key} = {state.get(key)!r}, this server has {ours!r}: "
                "use the settings of the checkpoint, or another server.data_dir"
            )


def read_trainer(path: Path, learner: PolicyLearner, state: dict[str, Any]) -> dict[str, Any]:
    """Returns masters and moments from `trainer.pt` or `trainer/`. `state` is that of `state.json`. Raises
    `CheckpointError`.
    """
    import torch

    with fitting(path):
        if (path / TRAINER_FILE).exists():
            device = learner.masters()[0].device
            whole: dict[str, Any] = torch.load(path / TRAINER_FILE, map_location=device, weights_only=True, mmap=True)
            return whole
        import torch.distributed.checkpoint as dcp

        trainer = learner.new_state(reference=state.get(MOVED_REFERENCE, False))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(trainer, checkpoint_id=path / TRAINER_FOLDER)  # type: ignore[attr-defined]
        return trainer


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


def export(path: Path, learner: PolicyLearner, *, adapter: bool = False) -> None:
    """Write the policy as a Hugging Face folder (`transformers`, vLLM), or its `adapter` as a folder for `peft`."""
    assert learner.policy.has_adapters or not adapter, "the gateway refuses the adapter of a policy without one"
    weights = learner.adapter_weights() if adapter else learner.whole_weights()

    def write() -> None:
        if learner.ranks.rank == 0:
            with atomic_folder(path) as folder:
                learner.policy.save(folder, merged=not adapter, weights=weights)

    learner.ranks.agreed(write)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path` to fill; then flushes it to disk and renames it to `path`.

    A failure keeps the old folder and removes the partial one. Raises `CheckpointError` if the folder cannot be
    written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with _writing(path):
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises `CheckpointError` for a folder that cannot be written inside the context."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
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
