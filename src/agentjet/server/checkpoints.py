"""Checkpoints of a run: the folders `checkpoints/step_000123/`, their tags, exports and scores.

A checkpoint has all policies of the run. In a run with named policies it has a folder for each. The worker writes the
folders; `CheckpointStore` finds, names and removes them. Invariants:
* a checkpoint gets its name once it is complete on disk and the journal has recorded its digest;
* a checkpoint is good once this server has written or loaded it. Only good ones displace older ones;
* a checkpoint with a tag is never removed. One that only its tag keeps does not serve recovery;
* an unusable checkpoint is renamed to `unusable_000123` and kept for the operator;
* a folder loses its name before its files are removed, in a thread: no reader finds half of a checkpoint.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentjet.errors import CheckpointError, NotFound
from agentjet.protocol import CheckpointInfo, EvaluationView, newest_held_out
from agentjet.types import SOLE_POLICY, CheckpointStamp

log = logging.getLogger(__name__)

NAME = re.compile(r"step_(\d{6,})")
UNUSABLE = "unusable_"


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints under `run_folder`."""

    run_folder: Path
    good_versions: set[int] = field(default_factory=set)
    """Policy versions of the checkpoints that this server has written or loaded."""

    @property
    def folder(self) -> Path:
        return self.run_folder / "checkpoints"

    def path(self, policy_version: int) -> Path:
        return self.folder / f"step_{policy_version:06d}"

    @property
    def tags(self) -> Tags:
        return Tags(self.folder / "tags.json")

    def check_exists(self, policy_version: int) -> None:
        """Raises `NotFound` if the version has no checkpoint."""
        found = [info.policy_version for info in self.listing()]
        if policy_version not in found:
            raise NotFound(
                f"There is no checkpoint of policy version {policy_version}; there are: "
                f"{', '.join(map(str, found)) or 'none'}.",
                code="checkpoint_not_found",
            )

    def listing(self) -> list[CheckpointInfo]:
        """Returns all checkpoints, oldest first."""
        named = [(path, NAME.fullmatch(path.name)) for path in self.folder.glob("step_*") if path.is_dir()]
        found = [
            CheckpointInfo(policy_version=int(name[1]), path=str(path), created=path.stat().st_mtime)
            for path, name in named
            if name
        ]
        return sorted(found, key=lambda info: info.policy_version)

    def scored(self, evaluations: Sequence[EvaluationView]) -> list[CheckpointInfo]:
        """Returns all checkpoints, oldest first, with their tags and scores of the newest one's tasks. Raises
        `CheckpointError`.
        """
        scores = {evaluation.policy_version: evaluation.score for evaluation in newest_held_out(evaluations)}
        tags = self.tags.read()
        return [
            info.model_copy(
                update={
                    "tags": sorted(name for name, version in tags.items() if version == info.policy_version),
                    "score": scores.get(info.policy_version),
                }
            )
            for info in self.listing()
        ]

    def find(self, version: str) -> int:
        """Returns the policy version of a checkpoint by its number or tag. Raises `CheckpointError` with the existing
        ones.
        """
        tags = self.tags.read()
        found = [info.policy_version for info in self.listing()]
        wanted = int(version) if version.isdecimal() else tags.get(version)
        if wanted not in found:
            named = [f"{name} ({version})" for name, version in sorted(tags.items()) if version in found]
            raise CheckpointError(
                f"{str(self.run_folder)!r} has no checkpoint {version!r}; it has versions "
                f"{', '.join(map(str, found)) or 'none'} and tags {', '.join(named) or 'none'}"
            )
        return wanted

    def newest(self) -> int | None:
        """Returns the policy version of the newest checkpoint, or None."""
        return max((info.policy_version for info in self.listing()), default=None)

    def good(self, policy_version: int) -> CheckpointInfo | None:
        """Returns the checkpoint of that version if it is good."""
        known = {info.policy_version: info for info in self.listing() if info.policy_version in self.good_versions}
        return known.get(policy_version)

    def covers(self, keep: int) -> int | None:
        """Returns the policy version of the oldest checkpoint that serves recovery. The journal needs nothing older.

        None until there are two good checkpoints, or `keep` if that is less: one damaged checkpoint must not lose the
        run.
        """
        if len(self.good_versions) < min(keep, 2):
            return None
        return self._oldest_for_recovery(keep) or self.listing()[0].policy_version

    async def write(
        self,
        policy_version: int,
        save: Callable[[Path], Awaitable[CheckpointStamp]],
        record: Callable[[CheckpointStamp], Awaitable[None]],
        *,
        keep: int,
    ) -> CheckpointInfo:
        """Writes a checkpoint with `save`, journals it with `record`, then removes all but `keep` good ones.

        A folder of the same name is renamed. Raises `CheckpointError`; the older checkpoints are then untouched.
        """
        path = self.path(policy_version)
        unnamed = path.with_name(f".{path.name}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stamp = await save(unnamed)
            if stamp.policy_version != policy_version:  # The journal refused to record the batch that was published.
                raise CheckpointError(
                    f"{path} was not written: the worker has policy version {stamp.policy_version}, which the journal "
                    "has not recorded yet"
                )
            await record(stamp)
            if path.exists():
                self.quarantine(policy_version)
            unnamed.rename(path)
            flush(self.folder)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        finally:
            if unnamed.exists():
                await asyncio.to_thread(shutil.rmtree, unnamed, ignore_errors=True)
        self.good_versions.add(policy_version)
        self.rotate(keep)
        return self.listing()[-1]

    def rotate(self, keep: int) -> None:
        """Removes untagged checkpoints older than the newest `keep` good ones, if there are so many."""
        try:
            tagged = set(self.tags.read().values())
        except CheckpointError as error:
            log.error("no checkpoint is removed: %s", error)
            return
        oldest = self._oldest_for_recovery(keep) or 0
        for old in self.listing():
            if old.policy_version < oldest and old.policy_version not in tagged:
                self.good_versions.discard(old.policy_version)
                self._remove(Path(old.path))

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint at once by its name. A thread removes its files; `sweep` those that a stop leaves."""
        unnamed = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            path.rename(unnamed)
        except OSError as error:
            log.error("%s is not needed any more and could not be removed: %s", path, error)
            return
        asyncio.get_running_loop().run_in_executor(None, partial(shutil.rmtree, unnamed, ignore_errors=True))

    def _oldest_for_recovery(self, keep: int) -> int | None:
        """Returns the oldest version of the newest `keep` good checkpoints, or None if there are fewer."""
        good = [info.policy_version for info in self.listing() if info.policy_version in self.good_versions]
        return good[-keep] if len(good) >= keep else None

    def quarantine(self, policy_version: int) -> Path:
        """Renames an unusable checkpoint and returns its new path. Raises `CheckpointError` if that fails."""
        path, target, number = self.path(policy_version), self.folder / f"{UNUSABLE}{policy_version:06d}", 1
        while target.exists():
            number += 1
            target = self.folder / f"{UNUSABLE}{policy_version:06d}-{number}"
        try:
            path.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"{path} is unusable and could not be renamed ({error.strerror}): move it to another folder"
            ) from error
        self.good_versions.discard(policy_version)
        return target

    def unusable(self) -> list[Path]:
        """Returns the renamed unusable checkpoints that the operator has not removed."""
        return sorted(self.folder.glob(f"{UNUSABLE}*"))

    async def sweep(self) -> None:
        """Removes the remains of interrupted writes and removals. To be called while no worker writes."""
        for path in self.folder.glob(".*step_*"):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def policy_folders(checkpoint: Path) -> dict[str, Path]:
    named = {path.parent.name: path.parent for path in sorted(checkpoint.glob("*/state.json"))}
    return named or {SOLE_POLICY: checkpoint}


def combined_stamp(stamps: Mapping[str, CheckpointStamp]) -> CheckpointStamp:
    """Returns the stamp of a checkpoint from those of its policies, which have the same policy version."""
    if SOLE_POLICY in stamps:
        return stamps[SOLE_POLICY]
    digests = json.dumps(sorted((name, stamp.digest) for name, stamp in stamps.items()))
    version = next(stamp.policy_version for stamp in stamps.values())
    return CheckpointStamp(version, hashlib.sha256(digests.encode()).hexdigest())


def flush(path: Path) -> None:
    """Syncs a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file, which only its owner can read, atomically. Raises `OSError`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.touch(0o600)
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def remove_old_exports(folder: Path, keep: int) -> None:
    """Removes all exports but the `keep` of the highest policy versions.

    Folders with other names belong to the user and stay.
    """
    found = ((NAME.fullmatch(path.name.removesuffix("-adapter")), path) for path in folder.iterdir())
    exports = [(int(name[1]), path.stat().st_mtime, path) for name, path in found if name is not None]
    for *_, path in sorted(exports)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Tags:
    """The file `checkpoints/tags.json`. A checkpoint with a tag is never removed."""

    path: Path

    def read(self) -> dict[str, int]:
        """Returns policy versions by tag. Raises `CheckpointError` if the file cannot be read."""
        try:
            return {str(name): int(version) for name, version in json.loads(self.path.read_bytes()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f'{self.path} is damaged ({error}): write the tags again as {{"name": policy version}}, '
                "or remove the file"
            ) from error

    def write(self, tags: Mapping[str, int]) -> None:
        """Replaces all tags. Raises `CheckpointError` if the file cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, dict(sorted(tags.items())))
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be written: {error}") from error
