"""Checkpoints and exports of several ranks: the folders of `embedded.checkpoint`, with `trainer/` for `trainer.pt`.

Each rank writes its part of masters and moments with `torch.distributed.checkpoint`, which divides them again for
another number of ranks. Rank 0 writes the other files. All ranks must see the folder. An error of one rank is raised on
all.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from agentjet.compute.cluster.group import RankGroup
from agentjet.compute.cluster.learner import RankLearner
from agentjet.compute.embedded import checkpoint
from agentjet.errors import CheckpointError, ConfigError


def save(path: Path, learner: RankLearner, group: RankGroup, state: dict[str, Any]) -> str:
    """Write a checkpoint; returns its digest. Raises `CheckpointError`."""
    policy, is_first = learner.policy, group.rank == 0
    weights = learner.adapter_weights() if policy.has_adapters else learner.whole_weights()
    with ExitStack() as stack:
        folder = _shared_folder(path, group, stack)
        try:
            dcp.save(learner.state_by_name(), checkpoint_id=folder / checkpoint.TRAINER_FOLDER)  # type: ignore[attr-defined]
        except CheckpointException as error:  # It has the errors of all ranks and is raised on all of them.
            raise CheckpointError(f"{path} could not be written: {_first(error)}") from error

        def complete() -> str:
            if not is_first:
                return ""
            policy.save(folder / "policy", merged=False, weights=weights)
            digest = checkpoint.seal(folder, {**checkpoint.identity(policy), **state})
            stack.close()
            return digest

        return str(group.gather(group.agreed(complete))[0])


def load(path: Path, learner: RankLearner, group: RankGroup) -> dict[str, Any]:
    """Restore weights and optimiser; returns the saved state. See `embedded.checkpoint.load`."""

    def verify() -> dict[str, Any]:
        if not path.is_dir():
            raise ConfigError(_not_shared(path, group))  # Not damaged: the checkpoint must stay.
        return checkpoint.verified_state(path) if group.rank == 0 else {}

    state: dict[str, Any] = group.gather(group.agreed(verify))[0]
    group.agreed(lambda: checkpoint.check_identity(path, state, learner.policy))
    trainer = group.agreed(lambda: checkpoint.read_trainer(path, learner))
    with checkpoint.fitting(path):
        learner.restore(trainer)
    return state


def export(path: Path, learner: RankLearner, group: RankGroup, *, adapter: bool) -> None:
    """Write the policy as a Hugging Face folder, or its `adapter` as a folder for `peft`, on rank 0."""
    weights = learner.adapter_weights() if adapter else learner.whole_weights()

    def write() -> None:
        if group.rank == 0:
            with checkpoint.atomic_folder(path) as folder:
                learner.policy.save(folder, merged=not adapter, weights=weights)

    group.agreed(write)


def _shared_folder(path: Path, group: RankGroup, stack: ExitStack) -> Path:
    """Returns the new folder of a checkpoint, which all ranks see. Rank 0 completes it with `stack`."""

    def begin() -> str:
        return str(stack.enter_context(checkpoint.atomic_folder(path))) if group.rank == 0 else ""

    folder = Path(group.gather(group.agreed(begin))[0])

    def find() -> None:
        if not folder.is_dir():
            raise CheckpointError(_not_shared(path, group))

    group.agreed(find)
    return folder


def _not_shared(path: Path, group: RankGroup) -> str:
    return (
        f"rank {group.rank} does not see {path}: server.data_dir must be on a file system that the gateway and all "
        "ranks mount at the same path"
    )


def _first(error: CheckpointException) -> str:
    """Returns the first rank's error."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {cause}"
