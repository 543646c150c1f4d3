"""One wait for the disk for all that changed meanwhile, in a thread of its own, while the event loop goes on.

What the ready tasks of one turn of the loop wrote is committed together and handed to the disk; what is written until
that has it follows together, too. Nobody is told of a change before it is on disk, and nobody who only reads it again
(a request that is repeated) either.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from agentjet.errors import Later
from agentjet.swarm import Swarm

log = logging.getLogger(__name__)


class Commits:
    """Commits a swarm's changes, soon after they were made. One for a gateway."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._next: asyncio.Future[None] | None = None
        """Done when what is written now, and not committed, is on disk."""
        self._under_way: asyncio.Future[None] | None = None
        """The same of what is committed."""
        self._failed: BaseException | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="journal")
        swarm.commit_together(self._soon)

    async def durable(self) -> None:
        """Returns once everything that was changed so far is on disk.

        Raises `Later`: then nothing of it happened, or, where the disk lost its word, nothing of it may be relied on.
        """
        if self._failed is not None:
            raise self._failed
        waiting = self._next or self._under_way
        if waiting is not None:
            await asyncio.shield(waiting)

    async def close(self) -> None:
        """Wait for the disk a last time; idempotent."""
        while waiting := self._next or self._under_way:
            with suppress(Exception):  # Whoever waited for it was told.
                await asyncio.shield(waiting)
        self._disk.shutdown()

    def _soon(self) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            if self._under_way is None:
                loop.call_soon(self._commit)

    def _commit(self) -> None:
        waiting, self._next = self._next, None
        assert waiting is not None
        try:
            self._swarm.commit()
        except Later as later:
            _refuse(waiting, later)
            return
        except BaseException as error:  # The boundary: whatever failed, those who wait are refused.
            self._give_up(waiting, error)
            if not isinstance(error, Exception):
                raise
            return
        self._under_way = waiting
        synced = asyncio.get_running_loop().run_in_executor(self._disk, self._swarm.sync)
        synced.add_done_callback(self._synced)

    def _synced(self, done: asyncio.Future[None]) -> None:
        waiting, error = self._under_way, done.exception()
        assert waiting is not None
        try:
            if error is None:
                waiting.set_result(None)
                self._swarm.announce()  # Listeners may write: that belongs to the next commit.
            else:
                self._give_up(waiting, error)
        finally:
            self._under_way = None
            if self._next is not None:
                self._commit()

    def _give_up(self, waiting: asyncio.Future[None], error: BaseException) -> None:
        """Refuse those who wait, and everybody from here on: it is not known what of the journal is on disk."""
        is_known = isinstance(error, Later)
        log.critical("the journal is not on disk: %s", error, exc_info=None if is_known else error)
        self._failed = error if is_known else self._swarm.distrust(error)
        _refuse(waiting, self._failed)


def _refuse(waiting: asyncio.Future[None], error: BaseException) -> None:
    waiting.set_exception(error)
    waiting.exception()  # Nobody need be waiting.
