"""The reward of an attempt: 1 if the file has the wanted content, 0.1 if Claude Code ended by itself."""

from __future__ import annotations

import json
from typing import Any


def score(task: dict[str, Any], result: Any) -> float:
    made = result.folder / task["makes"]
    if made.is_file() and made.read_text(encoding="utf-8", errors="replace").strip() == task["holds"]:
        return 1.0
    ended = json.loads((result.folder / "result.json").read_text(encoding="utf-8"))
    return 0.0 if ended["is_error"] else 0.1
