"""The checkpoint folders of a data dir: `checkpoints/step_000123/`, written by the worker, found and rotated here.

Invariants:
* a checkpoint takes its name once it is complete on disk and the journal has recorded its digest;
* a checkpoint counts as good once this server has written or loaded it: only such ones push out older ones;
* a checkpoint with a tag is never removed; one that only its tag keeps is not for recovery;
* an unusable one is renamed to `unusable_000123` and kept for the operator.

Names of checkpoints, in `checkpoints/tags.json` of a data dir. A checkpoint with a name is never rotated away.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentjet.errors import CheckpointError, Conflict, InvalidRequest, NotFound
from agentjet.protocol import CheckpointInfo, check_tag
from agentjet.types import CheckpointStamp

log = logging.getLogger(__name__)

NAME = re.compile(r"step_(\d{6,})")
UNUSABLE = "unusable_"


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """Checkpoints under `data_dir`."""

    data_dir: Path
    _good: set[int] = field(default_factory=set)
    """Policy versions of the checkpoints that this server has written or loaded."""

    @property
    def folder(self) -> Path:
        return self.data_dir / "checkpoints"

    def path(self, policy_version: int) -> Path:
        return self.folder / f"step_{policy_version:06d}"

    @property
    def tags(self) -> Tags:
        return Tags(self.folder)

    def check_there(self, policy_version: int) -> None:
        """Raises `NotFound` when there is no checkpoint of that version."""
        found = [info.policy_version for info in self.listing()]
        if policy_version not in found:
            raise NotFound(
                f"There is no checkpoint of policy version {policy_version}; there are: "
                f"{', '.join(map(str, found)) or 'none'}.",
                code="checkpoint_not_found",
            )

    def listing(self) -> list[CheckpointInfo]:
        """What there is, oldest first."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            name = NAME.fullmatch(path.name)
            if name and path.is_dir():
                info = CheckpointInfo(policy_version=int(name[1]), path=str(path), created=path.stat().st_mtime)
                found.append(info)
        return sorted(found, key=lambda info: info.policy_version)

    def newest(self) -> int | None:
        """Policy version of the newest checkpoint."""
        found = self.listing()
        return found[-1].policy_version if found else None

    def good(self, policy_version: int) -> CheckpointInfo | None:
        """The checkpoint of that version, if this server has written or loaded it."""
        if policy_version not in self._good:
            return None
        return next((info for info in self.listing() if info.policy_version == policy_version), None)

    def covers(self, keep: int) -> int | None:
        """Policy version from which on nothing older is needed to recover: that of the oldest checkpoint that is not
        kept by its tag alone.

        None until there are two good ones, or `keep` if that is less: one that is damaged must not lose the run.
        """
        if len(self._good) < min(keep, 2):
            return None
        return self._oldest_for_recovery(keep) or self.listing()[0].policy_version

    def loaded(self, policy_version: int) -> None:
        """The checkpoint of that version was verified and loaded: it is good."""
        self._good.add(policy_version)

    async def write(
        self,
        policy_version: int,
        save: Callable[[Path], Awaitable[CheckpointStamp]],
        record: Callable[[CheckpointStamp], Awaitable[None]],
        *,
        keep: int,
    ) -> CheckpointInfo:
        """Write the checkpoint with `save`, have the journal `record` it, then remove what `keep` good ones push out.

        What stood under its name and is not known to be good is set aside. Raises `CheckpointError`; older ones are
        then untouched.
        """
        path = self.path(policy_version)
        unnamed = path.with_name(f".{path.name}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            stamp = await save(unnamed)
            assert stamp.policy_version == policy_version, "the worker stands where the journal does"
            await record(stamp)
            if path.exists():
                self.set_aside(policy_version)
            unnamed.rename(path)
            flush(self.folder)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        finally:
            shutil.rmtree(unnamed, ignore_errors=True)
        self._good.add(policy_version)
        self.rotate(keep)
        return self.listing()[-1]

    def rotate(self, keep: int) -> None:
        """Remove what is older than the newest `keep` good checkpoints, if there are as many, and has no tag."""
        try:
            tagged = set(self.tags.read().values())
        except CheckpointError as error:
            log.error("no checkpoint is removed: %s", error)
            return
        oldest = self._oldest_for_recovery(keep) or 0
        for old in self.listing():
            if old.policy_version < oldest and old.policy_version not in tagged:
                self._good.discard(old.policy_version)
                shutil.rmtree(old.path, ignore_errors=True)

    def _oldest_for_recovery(self, keep: int) -> int | None:
        """Policy version of the oldest of the newest `keep` good checkpoints; None if there are fewer."""
        good = [info.policy_version for info in self.listing() if info.policy_version in self._good]
        return good[-keep] if len(good) >= keep else None

    def set_aside(self, policy_version: int) -> Path:
        """Rename an unusable checkpoint, which then counts no longer; returns its new path.

        Raises `CheckpointError` if it cannot be renamed.
        """
        path = self.path(policy_version)
        numbers = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
        targets = (self.folder / f"{UNUSABLE}{policy_version:06d}{number}" for number in numbers)
        target = next(target for target in targets if not target.exists())
        try:
            path.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"{path} is unusable and could not be renamed ({error.strerror}): move it away"
            ) from error
        self._good.discard(policy_version)
        return target

    def unusable(self) -> list[Path]:
        """Checkpoints that were set aside, until the operator removes them."""
        return sorted(self.folder.glob(f"{UNUSABLE}*"))

    def sweep(self, recorded: Callable[[int], str | None]) -> None:
        """Remove what an interrupted write left behind, but for a checkpoint whose digest was `recorded`: it gets its
        name. Only while no worker writes.
        """
        for path in self.folder.glob(".step_*.new"):
            name = NAME.fullmatch(path.name[1:].removesuffix(".new"))
            if name and (digest := recorded(int(name[1]))) and digest == _digest(path):
                with suppress(OSError):  # Its place is taken.
                    path.rename(self.path(int(name[1])))
                    flush(self.folder)
        for path in self.folder.glob(".*step_*"):
            shutil.rmtree(path, ignore_errors=True)


def _digest(folder: Path) -> str | None:
    """The digest in the checkpoint's state, not verified; loading verifies it."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state.get("digest") if isinstance(state, dict) else None


def flush(path: Path) -> None:
    """Have a file on disk, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_old_exports(folder: Path, keep: int) -> None:
    """Remove all exports but the newest `keep`. Folders with another name are the user's."""
    versions = {path: NAME.fullmatch(path.name.removesuffix("-adapter")) for path in folder.iterdir() if path.is_dir()}
    exports = {path: int(found[0].removeprefix("step_")) for path, found in versions.items() if found}
    for path in sorted(exports, key=exports.__getitem__)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


FILE = "tags.json"
BEST = "best"
"""The checkpoint with the best recorded evaluation; the server's own tag, see `job.keep_best`."""


@dataclass(frozen=True, slots=True)
class Tags:
    """The names in a folder of checkpoints."""

    folder: Path

    def read(self) -> dict[str, int]:
        """Policy version by name. Raises `CheckpointError` for a file that cannot be read: nothing is rotated then."""
        path = self.folder / FILE
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            return {str(name): int(version) for name, version in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f'{path} is damaged ({error}): write the tags again, as {{"name": policy version}}, or remove the file'
            ) from error

    def put(self, name: str, policy_version: int) -> None:
        """Name a version, or move the name. Raises `CheckpointError` when that cannot be written."""
        self._write({**self.read(), name: policy_version})

    def remove(self, name: str) -> None:
        """Raises `NotFound` when there is no such name."""
        tags = self.read()
        if name not in tags:
            known = ", ".join(sorted(tags)) or "none"
            raise NotFound(f"There is no tag {name!r}; there are: {known}.", code="tag_not_found")
        del tags[name]
        self._write(tags)

    def check_new(self, name: str, policy_version: int) -> None:
        """Raises `InvalidRequest` for what cannot be a name, `Conflict` for one that another version has."""
        if name == BEST:
            raise InvalidRequest(
                f"The tag {BEST!r} is the server's own: it marks the best recorded evaluation (job.keep_best). Choose "
                "another name.",
                code="tag_reserved",
                status=422,
                param="name",
            )
        check_tag(name)
        taken = self.read().get(name, policy_version)
        if taken != policy_version:
            raise Conflict(
                f"The tag {name!r} is that of policy version {taken}: remove it there first "
                f"(agentjet checkpoints untag {name}), or choose another name.",
                code="tag_taken",
            )

    def _write(self, tags: dict[str, int]) -> None:
        path = self.folder / FILE
        partial = path.with_name(f".{FILE}.partial")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("w", encoding="utf-8") as file:
                json.dump(tags, file, indent=2, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
