"""Whether a checkpoint belongs to a journal. The server asks before it loads one, a rollback or a branch before it
copies one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentjet.errors import CheckpointError, ConfigError
from agentjet.swarm.journal import Journal
from agentjet.types import CheckpointStamp

WAY_OUT = (
    "Restore journal.sqlite together with its -wal and -shm files, or move only checkpoints/ to a new server.data_dir."
)
"""For a data dir whose journal lost its end."""


def check(journal: Journal, stamp: CheckpointStamp) -> None:
    """Raises `CheckpointError` unless the checkpoint belongs to the journal, and `ConfigError` where it is rather the
    journal that is wrong, because it ends before the checkpoint.

    It belongs if the journal recorded its digest, if the journal is empty or begins at it, or if AgentJet 0.1 wrote it.
    """
    version, recorded = stamp.policy_version, journal.checkpoint_digest(stamp.policy_version)
    if recorded is not None and recorded != stamp.digest:
        raise CheckpointError(
            f"The checkpoint of policy version {version} has another digest than the one in the journal."
        )
    if journal.is_empty():
        return
    if version > (end := journal.policy_version()):
        raise ConfigError(
            f"The checkpoint of policy version {version} is newer than the journal, which ends at {end}. If another "
            f"run wrote the checkpoint, move it away. Otherwise the journal lost its end. {WAY_OUT}"
        )
    if recorded is None and not _may_adopt(journal, stamp):
        raise CheckpointError(
            f"The journal did not record a checkpoint of policy version {version}: they belong to different runs."
        )


def _may_adopt(journal: Journal, stamp: CheckpointStamp) -> bool:
    """Whether a checkpoint that the journal did not record may be loaded all the same."""
    if journal.began_at(stamp.policy_version):
        return True
    return not stamp.digest and stamp.policy_version <= journal.undigested_until()


def check_origin(journal: Journal, state: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a checkpoint's state has another origin than the journal, as far as both know it."""
    origin = journal.origin
    recorded = {"model_weights": origin.get("model_weights"), "dtype": origin.get("model.dtype")}
    if "model.lora.rank" in origin:
        recorded["adapters"] = bool(origin["model.lora.rank"])
    for key, ours in recorded.items():
        if ours is not None and (theirs := state.get(key, ours)) != ours:
            raise ConfigError(
                f"The checkpoint of policy version {state['policy_version']} has {key} = {theirs!r}, its journal "
                f"{ours!r}: they belong to different runs. Take a checkpoint that this run wrote."
            )
