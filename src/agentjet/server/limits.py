"""`Limits`: the most that one request, or one connection, may take. The same on every route.

Settings name two of them; the others are constants, because no honest client comes near them. `docs/operations.md` has
the table.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

from agentjet.config import ServerConfig

OWN_FILES = 128
"""Files and pipes that the server needs for itself, whatever the number of connections."""
SLOWEST_BODY = 64 * 2**10
"""Bytes per second at which a body must arrive, apart from the first `header_seconds`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    body_bytes: int
    connections: int
    header_bytes: int = 64 * 2**10
    """Request line and headers together."""
    values: int = 300_000
    """Values in a body, those inside arrays and objects included."""
    containers: int = 50_000
    """Arrays and objects in a body."""
    keys: int = 10_000
    """Keys of one object."""
    depth: int = 200
    """Arrays and objects inside each other."""
    header_seconds: float = 30.0
    """From the connection, or the first byte of a later request, to the end of its headers."""
    linger_seconds: float = 10.0
    """For the rest of a body whose request is answered already; then the connection is closed."""

    @classmethod
    def of(cls, server: ServerConfig) -> Limits:
        """The limits of a server. Fewer connections than the setting, where the process may not open so many files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = server.max_connections if files == resource.RLIM_INFINITY else files - OWN_FILES
        return cls(body_bytes=server.max_body_mb * 2**20, connections=max(16, min(server.max_connections, most)))

    @property
    def body_seconds(self) -> float:
        """For a whole body, from the end of its headers."""
        return self.header_seconds + self.body_bytes / SLOWEST_BODY
