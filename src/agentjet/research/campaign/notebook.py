"""`Notebook`: the journal of a campaign, with everything that it saw, decided and spent.

A campaign resumes by running again over its notebook. Each step has a key; `once` returns the recorded content of a
known key and calls `make` only for a new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from agentjet.errors import ConfigError
from agentjet.research.journal import Entry, Journal, stored

EntryKind = Literal[
    "started",
    "intent",
    "observed",
    "hypothesis",
    "refused",
    "screened",
    "study",
    "learned",
    "followed",
    "digest",
    "spent",
    "ended",
]
NAME = "notebook.sqlite"
__all__ = ["NAME", "Entry", "EntryKind", "Notebook", "stored"]


class Notebook(Journal):
    """`path` is the campaign's folder. Raises `ConfigError` if another process writes it, or without a campaign to
    read.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        if not options.get("writer", True) and not (path / NAME).exists():
            raise ConfigError(f"{path}: there is no campaign in this folder (no {NAME})")
        super().__init__(path / NAME, **options)
