"""`Reader`: reads the records of a run from its journal, in one thread, on a read-only connection.

It needs no gateway: `agentjet look` reads the journals of stopped runs with it. A read sees one committed state of the
journal and never waits for its writer. Answers are encoded in a thread, because a long one would hold the event loop.
Recipes are called after a read, because the thread would be missing to all other reads.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Self, TypeVar

from agentjet.errors import ConfigError, Later, RequestError
from agentjet.gateway import batch_views, episode_views, views
from agentjet.gateway.batch_views import Unfinished
from agentjet.protocol import EpisodeForm, EpisodeQuery, Response
from agentjet.recipes.hooks import PlugInThreads
from agentjet.swarm import Journal, records
from agentjet.swarm.advantages import AdvantageHook, Members

Result = TypeVar("Result")
View = TypeVar("View", bound=Response)

MOST_READS = 16
"""Reads that may wait for the thread. Further ones are refused."""

CLOSING_SECONDS = 1.0


class Reader:
    """Reads a journal. Close it at the end."""

    def __init__(
        self,
        connect: Callable[[], AbstractContextManager[Journal]],
        *,
        durable: Callable[[], Awaitable[None]] | None = None,
        leases: Callable[[], Mapping[str, float]] = dict,
        keep: bool = False,
        threads: PlugInThreads | None = None,
    ) -> None:
        """`connect` opens the journal read-only, for one read, or with `keep` for many: opening takes longer than a
        short read. `durable` waits until committed changes are on disk. `leases` returns the time at which each live
        episode expires. `threads` call hooks of plug-ins.
        """
        self._connect = connect
        self._keep = keep
        self._opened = ExitStack()
        """The journal that is kept. The thread opens and closes it."""
        self._journal: Journal | None = None
        self._durable = durable
        self._leases = leases
        self._advantages = AdvantageHook(threads or PlugInThreads())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._num_reads = 0
        self._is_closed = False

    @classmethod
    def at(cls, path: Path) -> Self:
        """Returns the reader of a journal file, which another process may be writing."""
        return cls(lambda: closing(Journal.open_read_only(path)))

    async def read(self, work: Callable[[Journal], Result]) -> Result:
        """Returns the result of `work`, which runs in the thread.

        Raises `Later` if too many reads wait or the journal is busy, and `RequestError` (500) for a journal that this
        version of AgentJet cannot read.
        """
        if self._num_reads >= MOST_READS:
            raise Later(
                f"{MOST_READS} reads of this run are waiting: read again later.",
                code="too_many_reads",
                status=503,
                retry_after=1.0,
            )
        if self._is_closed:
            raise Later("The run was closed during the request.", code="run_closed", status=503, retry_after=1.0)
        self._num_reads += 1
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)
        finally:
            self._num_reads -= 1
        if self._durable is not None:  # What was read is committed, but perhaps not on disk.
            await self._durable()
        return found

    async def steps(self, after: int | None, limit: int, names: Collection[str] = ()) -> bytes:
        """Returns a `StepList`: see `records.steps`."""
        return await self._encoded(lambda journal: views.step_list(records.steps(journal, after, limit, names)))

    async def episodes(self, query: EpisodeQuery) -> bytes:
        """Returns an `EpisodeList`. Raises `NotFound` or `InvalidRequest` for a wrong `before`."""
        leases = self._leases()
        return await self._encoded(lambda journal: views.episode_list(records.find_episodes(journal, query), leases))

    async def episode(self, episode_id: str, form: EpisodeForm = "tokens") -> bytes:
        """Returns an `EpisodeTree`, or `EpisodeRuns` for `runs`. Raises `NotFound`."""
        leases = self._leases()
        return await self._encoded(lambda journal: episode_views.tree(journal, episode_id, form, leases))

    async def group(self, group_id: int) -> bytes:
        """Returns a `GroupView`. Raises `NotFound`."""
        leases = self._leases()
        return await self._finished(lambda journal: batch_views.group(journal, group_id, leases))

    async def batches(self, before: int | None, limit: int) -> bytes:
        """Returns a `BatchList`."""
        return await self._encoded(lambda journal: batch_views.batch_list(journal, before, limit))

    async def batch(self, batch_id: int) -> bytes:
        """Returns a `BatchView`. Raises `NotFound`."""
        return await self._finished(lambda journal: batch_views.batch(journal, batch_id))

    async def _encoded(self, work: Callable[[Journal], Response]) -> bytes:
        """Returns the JSON of the body that `work` returns. Numbers that are not finite are null."""
        return await self.read(lambda journal: _json(work(journal)))

    async def _finished(self, work: Callable[[Journal], Unfinished[View]]) -> bytes:
        """As `_encoded`, of a view with advantages."""
        unfinished = await self.read(work)
        found = unfinished.advantages
        if isinstance(found, Members):
            found = await self._advantages(found)
        return await asyncio.to_thread(lambda: _json(unfinished.finish(found)))

    def _run(self, work: Callable[[Journal], Result]) -> Result:
        try:
            if self._journal is None:
                self._journal = self._opened.enter_context(self._connect())
            self._journal.file.db.execute("BEGIN")  # All its statements see the same state.
            try:
                return work(self._journal)
            finally:
                self._journal.file.db.rollback()
        except ConfigError as error:
            raise RequestError(f"{error}.", code="journal_unreadable", status=500) from None
        except sqlite3.OperationalError as error:
            self._disconnect()
            raise Later(
                f"The journal cannot be read now ({error}): read again later.",
                code="journal_unavailable",
                status=503,
                retry_after=1.0,
            ) from None
        finally:
            if not self._keep:
                self._disconnect()

    def _disconnect(self) -> None:
        self._journal = None
        self._opened.close()

    async def close(self) -> None:
        """Refuses further reads and ends the thread after those that wait. A read that takes longer than
        `CLOSING_SECONDS` is interrupted. Idempotent.
        """
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._disconnect)
        ended = asyncio.create_task(asyncio.to_thread(self._thread.shutdown))
        while not (await asyncio.wait([ended], timeout=CLOSING_SECONDS))[0]:
            if self._journal is not None:
                self._journal.file.interrupt()
        await ended


def _json(view: Response) -> bytes:
    return view.model_dump_json().encode()
