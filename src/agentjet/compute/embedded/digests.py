"""Digests of a checkpoint: `state.json` names every other file with its size and SHA-256, and ends with a digest of
its own content. No torch.

A folder is whole if all of these agree. Files that `state.json` does not name are never read.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from agentjet.errors import CheckpointError

STATE_FILE = "state.json"
FORMAT = 2
"""Format 1, of AgentJet 0.1, has no digests."""


def seal(folder: Path, state: dict[str, Any]) -> str:
    """Write `state.json` beside the files of a new checkpoint; returns the digest of the whole.

    Equal files and equal states give equal digests.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / STATE_FILE]
    files = {path.relative_to(folder).as_posix(): _described(path) for path in paths}
    content = {"format": FORMAT, **state, "files": files}
    digest = _digest_of(content)
    (folder / STATE_FILE).write_text(json.dumps({**content, "digest": digest}, indent=2))
    return digest


def verified_state(folder: Path) -> dict[str, Any]:
    """The content of `state.json`, once every file agrees with its digest. A state of format 1 has no key `digest`.

    Raises `CheckpointError` naming the first file that does not agree.
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
