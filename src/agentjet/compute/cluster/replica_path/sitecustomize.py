"""Lets a replica import the server's copy of AgentJet, and nothing else of the server's environment.

Replicas run with another interpreter, in which AgentJet is not installed. Its folder cannot be on `PYTHONPATH`:
the server's torch and transformers may lie beside it. So this folder is, and Python imports this module at its start,
also in the processes that vLLM starts; a `sitecustomize` of the replica's environment is then not imported. Standard
library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

BESIDE = str(Path(__file__).resolve().parents[4])
"""The folder that has the package."""


class ServersCopy:
    """Finds the package `agentjet`. Its modules are then found in the package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [BESIDE]) if name == "agentjet" else None


sys.meta_path.insert(0, ServersCopy)
