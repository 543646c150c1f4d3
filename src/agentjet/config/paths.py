"""Folders outside the data dir."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where unpacked models and tokenizers are kept: `$XDG_CACHE_HOME/agentjet`, else `~/.cache/agentjet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentjet"
