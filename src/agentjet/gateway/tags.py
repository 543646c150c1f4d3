"""Names of checkpoints, in `checkpoints/tags.json` of a data dir. A checkpoint with a name is never rotated away."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from agentjet.errors import CheckpointError, Conflict, InvalidRequest, NotFound
from agentjet.protocol import check_tag

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
