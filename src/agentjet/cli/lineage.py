"""Going back and branching: a stopped server's data dir at an earlier version, a new one that begins at a version."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentjet.cli.data_dir import JOURNAL, METRICS
from agentjet.compute.embedded.checkpoint import seal, verified_state
from agentjet.config import JobConfig
from agentjet.errors import CheckpointError, ConfigError
from agentjet.gateway.checkpoints import CheckpointStore, flush
from agentjet.gateway.observability import MetricsFile
from agentjet.swarm import Journal, SwarmState
from agentjet.swarm.batches import Rollback, check_rollback, check_stamp, check_state_origin
from agentjet.types import CheckpointStamp

SEAL_KEYS = frozenset({"format", "files", "digest"})
"""Keys of a checkpoint's state that `seal` writes."""


def roll_back(data_dir: Path, version: str) -> tuple[Rollback, JobConfig]:
    """Take a stopped server's policy back to a checkpoint, by policy version or tag; returns what that did, and the job
    settings in force.

    Raises `ConfigError` when a server is using the data dir, its journal lost its end, or the checkpoint has another
    origin, `CheckpointError` for a checkpoint that is missing, damaged, not the journal's, or not an ancestor of the
    present weights. Nothing is changed then.
    """
    _check_journal(data_dir)
    store = CheckpointStore(data_dir)
    journal = Journal.open(data_dir / JOURNAL)
    try:
        held = journal.job_settings()
        if held is None:
            raise ConfigError(f"{str(data_dir)!r} has no job settings: its server was never started by this AgentJet")
        MetricsFile(data_dir / METRICS).check_journal(journal.policy_version())
        target = find_checkpoint(store, version)
        check_rollback(journal, target)
        state = _verified(store, journal, target)
        swarm = SwarmState(journal, held.given)
        new = swarm.policy_version + 1
        with _copied(store.path(target), store.path(new)) as copy:
            stamp = CheckpointStamp(new, _sealed(copy, {**state, "policy_version": new, "metrics": {}}))
            return swarm.batches.roll_back(target, stamp), held.job
    finally:
        journal.close()


def branch(source: Path, version: str, data_dir: Path) -> int:
    """Begin a new data dir at a checkpoint of another, by policy version or tag; returns the policy version.

    The source is only read. Raises `ConfigError` for a data dir that exists and for a checkpoint of another origin,
    `CheckpointError` for one that is missing, damaged, or not the journal's.
    """
    _check_journal(source)
    if data_dir.exists():
        raise ConfigError(f"{str(data_dir)!r} exists: name a folder that does not")
    store = CheckpointStore(source)
    original = Journal.open_read_only(source / JOURNAL)
    try:
        target = find_checkpoint(store, version)
        state, origin = _verified(store, original, target), original.origin
    finally:
        original.close()
    partial = None
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{data_dir.name}.", dir=data_dir.parent))
        begun = CheckpointStore(partial)
        begun.folder.mkdir()
        with _copied(store.path(target), begun.path(target)) as copy:
            stamp = CheckpointStamp(target, _sealed(copy, state))
        journal = Journal.open(partial / JOURNAL)
        try:
            with journal.transaction():
                journal.set_base_version(target)
                journal.put_checkpoint(stamp)
                journal.branch(origin, f"{source.resolve()}@{target}")
        finally:
            journal.close()
        partial.rename(data_dir)
    except OSError as error:
        raise ConfigError(f"{str(data_dir)!r} could not be written: {error}") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def find_checkpoint(store: CheckpointStore, version: str) -> int:
    """The policy version of a checkpoint by its number or tag. Raises `CheckpointError` naming those there are."""
    tags = store.tags.read()
    found = [info.policy_version for info in store.listing()]
    wanted = int(version) if version.isdecimal() else tags.get(version)
    if wanted not in found:
        named = [f"{name} ({version})" for name, version in sorted(tags.items()) if version in found]
        raise CheckpointError(
            f"{str(store.data_dir)!r} has no checkpoint {version!r}; it has versions "
            f"{', '.join(map(str, found)) or 'none'} and tags {', '.join(named) or 'none'}"
        )
    return wanted


def _check_journal(data_dir: Path) -> None:
    if not (data_dir / JOURNAL).is_file():
        raise ConfigError(f"{str(data_dir)!r} is not a data dir of AgentJet: it has no {JOURNAL}")


def _verified(store: CheckpointStore, journal: Journal, version: int) -> dict[str, object]:
    """The state of a whole checkpoint that belongs to its journal, without what `seal` writes."""
    state = verified_state(store.path(version))
    if state["policy_version"] != version:
        raise CheckpointError(f"checkpoint {store.path(version)} is damaged: it has version {state['policy_version']}")
    check_stamp(journal, CheckpointStamp(version, state.get("digest", "")))
    check_state_origin(journal, state)
    return {key: value for key, value in state.items() if key not in SEAL_KEYS}


@contextmanager
def _copied(source: Path, target: Path) -> Iterator[Path]:
    """A copy of a checkpoint that takes its name at the end, once it is on disk; a failure leaves nothing."""
    copy = target.with_name(f".{target.name}.new")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is no checkpoint of this run: move it away")
    try:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy)
        yield copy
        copy.rename(target)
        flush(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _sealed(copy: Path, state: dict[str, object]) -> str:
    """Seal a copy and have it on disk, before the journal names it; returns the digest."""
    digest = seal(copy, state)
    for path in (*copy.rglob("*"), copy):
        flush(path)
    return digest
