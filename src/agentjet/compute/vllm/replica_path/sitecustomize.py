"""Runs at the start of each Python process of a replica, for two things.

1. It imports the server's copy of AgentJet, and nothing else of the server's environment.
2. vLLM's processes end with the replica, also if it is killed, and their shared memory is removed then.

Replicas run with another interpreter, in which AgentJet is not installed. Its folder cannot be on `PYTHONPATH`:
the server's torch and transformers may lie beside it. So this folder is, and Python imports this module at its start,
also in the processes that vLLM starts; a `sitecustomize` of the replica's environment is then not imported. Standard
library only.

vLLM's processes come from `multiprocessing`, and Linux kills each when its parent has ended. The resource tracker of
`multiprocessing` reads a pipe that all of them can write. When the last one has ended, it removes the shared memory and
the semaphores that they left. So it leaves their session, where the guardian kills everything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

BESIDE = str(Path(__file__).resolve().parents[4])
"""The folder that has the package."""
PARENT = "AGENTJET_PARENT"
"""Has the id of the parent in each child."""
PR_SET_PDEATHSIG = 1


class ServersCopy:
    """Finds the package `agentjet`. Its modules are then found in the package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [BESIDE]) if name == "agentjet" else None


def end_with_parent(parent: int) -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before.
        os.kill(os.getpid(), signal.SIGKILL)


def outlive_the_replica() -> None:
    import warnings

    os.setsid()
    warnings.simplefilter("ignore")  # Else the last words in the replica's log would be its list of what it removes.


sys.meta_path.insert(0, ServersCopy)
if "--multiprocessing-fork" in sys.orig_argv and sys.platform == "linux":
    end_with_parent(int(os.environ[PARENT]))
elif any("multiprocessing.resource_tracker" in argument for argument in sys.orig_argv):
    outlive_the_replica()
os.environ[PARENT] = str(os.getpid())
