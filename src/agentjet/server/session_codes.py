"""The one-time codes of `agentjet open`. A code is in a URL, so it opens one session, within a minute.

Codes are in memory only: after a restart of the server, `agentjet open` gives another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from agentjet.errors import Unauthorized
from agentjet.server.auth import Bearer

CODE_SECONDS = 60
MAX_CODES = 100
"""Codes that are kept. A newer one replaces the oldest."""


class SessionCodes:
    """Creates codes and redeems each one once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[str, tuple[str, Bearer, float]] = {}

    def create(self, run: str, role: Bearer) -> str:
        """Returns a code for a session with `role` in a run."""
        if len(self._held) >= MAX_CODES:
            del self._held[next(iter(self._held))]
        code = secrets.token_urlsafe(24)
        self._held[code] = run, role, self._clock() + CODE_SECONDS
        return code

    def redeem(self, code: str) -> tuple[str, Bearer]:
        """Returns the run and the role of a code, which is then used up. Raises `Unauthorized`."""
        run, role, expires = self._held.pop(code, ("", "viewer", 0.0))
        if self._clock() >= expires:
            raise Unauthorized(
                f"This link was used already, or is older than {CODE_SECONDS} s: run `agentjet open` again.",
                code="code_invalid",
            )
        return run, role
