"""Files in shared memory whose owner may be killed: its guardian removes what it left. No torch.

A process locks its folder while it lives, so an unlocked folder is abandoned.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from pathlib import Path

from agentjet.compute.cluster.guardian import LOCK, PREFIX, remove_abandoned


class SharedFolder:
    """A folder that this process locks until `close`."""

    def __init__(self, parent: Path) -> None:
        """Removes abandoned folders first. Raises `OSError`."""
        remove_abandoned()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = (self.path / LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.path / LOCK).exists():  # Else another process took it for abandoned before it was locked.
                break

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
