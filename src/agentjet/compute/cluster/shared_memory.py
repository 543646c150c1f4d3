"""Files in shared memory whose owner may be killed: its guardian removes what it left. No torch.

A process locks its folder while it lives, so an unlocked folder is abandoned. A folder may also name segments of shared
memory that a library made for its process: they are removed with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from agentjet.compute.cluster.guardian import LOCK, PREFIX, SEGMENTS, remove, remove_abandoned

_SEGMENT = re.compile(r" /dev/shm/(psm_\w+)$", re.MULTILINE)
"""A mapped segment of `multiprocessing.shared_memory` in `/proc/PID/maps`."""


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

    def own_segments(self, processes: Iterable[int]) -> None:
        """Note the segments that these processes have mapped. They are removed with the folder."""
        (self.path / SEGMENTS).write_text("\n".join(sorted(_mapped_segments(processes))))

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        remove(self.path)
        self._lock.close()


def _mapped_segments(processes: Iterable[int]) -> set[str]:
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # It ended, or this system has no such file.
            found.update(_SEGMENT.findall(Path(f"/proc/{process}/maps").read_text()))
    return found
