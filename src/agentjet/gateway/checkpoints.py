"""The checkpoint folders of a data dir: `checkpoints/step_000123/`, written by the worker, found and rotated here.

The worker writes a folder atomically, so one that has its name is whole; the newest `keep` stay.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from agentjet.errors import CheckpointError
from agentjet.protocol import CheckpointInfo

NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """Checkpoints under `data_dir`."""

    data_dir: Path

    @property
    def folder(self) -> Path:
        return self.data_dir / "checkpoints"

    def path(self, policy_version: int) -> Path:
        return self.folder / f"step_{policy_version:06d}"

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

    async def write(self, policy_version: int, save: Callable[[Path], Awaitable[None]], *, keep: int) -> CheckpointInfo:
        """Have `save` write the checkpoint, then remove all but the newest `keep`.

        Raises `CheckpointError`; older ones are then untouched.
        """
        path = self.path(policy_version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            await save(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        for old in self.listing()[:-keep]:
            shutil.rmtree(old.path, ignore_errors=True)
        return self.listing()[-1]

    def sweep(self) -> None:
        """Remove what an interrupted write left behind. Only while no worker writes."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.lstrip(".").startswith("step_") and not NAME.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


def remove_old_exports(folder: Path, keep: int) -> None:
    """Remove all exports but the newest `keep`. Folders with another name are the user's."""
    exports = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    for path in sorted(exports, key=lambda path: int(path.name.removeprefix("step_")))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
