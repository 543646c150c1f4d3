"""One wait for the disk for all that changed meanwhile: what the ready tasks of one turn of the event loop wrote is
committed together, and only then may anybody be told.
"""

from __future__ import annotations

import asyncio

from agentjet.errors import Later
from agentjet.swarm import Swarm


class Commits:
    """Commits a swarm's changes, soon after they were made. One for a gateway."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._next: asyncio.Future[None] | None = None
        swarm.commit_together(self._soon)

    async def durable(self) -> None:
        """Returns once everything that was changed so far is on disk. Raises `Later`: then nothing of it happened."""
        if self._next is not None:
            await asyncio.shield(self._next)

    def _soon(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_soon(self._commit)

    def _commit(self) -> None:
        waiting, self._next = self._next, None
        assert waiting is not None
        try:
            self._swarm.commit()
        except Later as later:
            waiting.set_exception(later)
            waiting.exception()  # nobody need be waiting
        else:
            waiting.set_result(None)
