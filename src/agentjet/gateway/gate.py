"""The gate before the sampler: open while the policy may be sampled, held while it learns, shut when the engine is
stopped.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentjet.errors import Later
from agentjet.gateway.broadcast import Broadcast

RETRY_AFTER_HOLD = 5.0


class Gate:
    """Lets calls in, holds them or refuses them, and counts those inside.

    Held calls are not refused: agents' SDKs give up after two retries, and a batch takes longer than that to learn.
    """

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open = False
        self._refusal: Callable[[], Later] | None = None
        self._changed = Broadcast()
        self._inside = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0

    @property
    def inside(self) -> int:
        """Calls being sampled now."""
        return self._inside

    def busy_seconds(self) -> float:
        """Seconds since the gateway began in which at least one call was inside."""
        return self._busy_seconds + (self._monotonic() - self._busy_since if self._inside else 0.0)

    def open(self) -> None:
        """Let everybody in."""
        self._set(True, None)

    def hold(self) -> None:
        """Let nobody in for now; those inside stay."""
        self._set(False, None)

    def shut(self, refusal: Callable[[], Later]) -> None:
        """Refuse every call, held ones included, with what `refusal` makes."""
        self._set(False, refusal)

    async def drained(self) -> None:
        """Wait until no call is inside. Bounded by the longest completion: sampling never waits for a reader."""
        await self._changed.until(lambda: self._inside == 0)

    @asynccontextmanager
    async def enter(self, timeout: float) -> AsyncIterator[None]:
        """Be inside. Raises `Later` (503) when the gate is shut, or still held after `timeout` seconds."""
        if not await self._changed.until(lambda: self._open or self._refusal is not None, timeout):
            raise Later(
                f"The call was held for {timeout:g} seconds (server.call_timeout) while the policy was learning "
                "or its worker starting.",
                retry_after=RETRY_AFTER_HOLD,
                status=503,
                code="held_too_long",
            )
        if self._refusal is not None:
            raise self._refusal()
        if self._inside == 0:
            self._busy_since = self._monotonic()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._busy_seconds += self._monotonic() - self._busy_since
                self._changed.notify()

    def _set(self, is_open: bool, refusal: Callable[[], Later] | None) -> None:
        self._open, self._refusal = is_open, refusal
        self._changed.notify()
