"""Heartbeats of a client's live episodes, from a thread that agents cannot block.

* The thread has an event loop and a connection to itself. Both start with the first episode.
* An agent that blocks its event loop keeps its lease. A warning names it once: the other agents of that loop wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentjet.client.threads import LoopThread
from agentjet.errors import AgentJetError, Conflict, NotFound

if TYPE_CHECKING:  # A connection owns its heartbeats.
    from agentjet.client.connection import Connection

LEASE_SHARE = 1 / 3
"""Interval between heartbeats as a share of the lease."""
PING_SECONDS = 1.0
"""Interval between pings of an agents' loop, and the time from which an answer is late."""
PUNCTUAL_SECONDS = 0.25
"""Delay of this thread's own timer, or wait of the agents' thread for a processor, from which the machine is busy.
A late answer then proves nothing.
"""
NUM_LATE = 3
"""Late answers in a row, each while an agent's own code runs, before the warning."""
log = logging.getLogger(__name__)


class Leased(Protocol):
    """An episode that needs heartbeats."""

    lease_seconds: float

    @property
    def status(self) -> str: ...

    async def renew(self, connection: Connection) -> None: ...


class Heartbeats:
    """Renews the leases of episodes until they end."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        """`connect` makes the connection of the thread, at the first episode."""
        self._connect = connect
        self._connection: Connection | None = None
        self._loop = LoopThread()
        self._watched: set[int] = set()
        """Identities of the threads whose loops are pinged."""

    def follow(self, episode: Leased) -> concurrent.futures.Future[bool]:
        """Send heartbeats until the episode ends. The result is True if the server ended it.

        Cancelling the future ends the heartbeats. Raises `RuntimeError` in a forked process.
        """
        return self._loop.submit(self._beat(episode))

    def watch(self) -> None:
        """Watch the running event loop, until this is closed: agents should not block it."""
        thread = threading.get_ident()
        if thread not in self._watched:
            self._watched.add(thread)
            self._loop.submit(_watch(asyncio.get_running_loop(), thread, threading.get_native_id()))

    async def close(self) -> None:
        """End the heartbeats and their thread; idempotent."""
        if self._loop.is_running:
            await asyncio.wrap_future(self._loop.submit(self._end()))
            self._loop.stop()
            self._watched.clear()

    async def _beat(self, episode: Leased) -> bool:
        logged = ""
        while True:
            await asyncio.sleep(episode.lease_seconds * LEASE_SHARE)
            if episode.status != "live":
                return False
            try:
                if self._connection is None:
                    self._connection = self._connect()
                await episode.renew(self._connection)
            except (Conflict, NotFound):  # The episode ended, or its run is not served any more.
                return True
            except AgentJetError:  # The server may be away for a while: the agent's own request raises.
                pass
            except Exception as error:  # The boundary: the lease would end. A repeated failure is logged once.
                if repr(error) != logged:
                    log.exception("a heartbeat could not be sent; the next one tries again")
                logged = repr(error)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None


async def _watch(loop: asyncio.AbstractEventLoop, thread: int, native_id: int) -> None:
    """Warn once if `loop`, which runs in `thread`, answers several pings in a row late, each time inside an agent."""
    num_late, agent = 0, ""
    while num_late < NUM_LATE:
        answered = threading.Event()
        try:
            loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # The loop is closed.
            return
        began, queued = time.monotonic(), queued_seconds(native_id)
        await asyncio.sleep(PING_SECONDS)
        delays = time.monotonic() - began - PING_SECONDS, queued_seconds(native_id) - queued
        if max(delays) > PUNCTUAL_SECONDS:
            continue
        agent = "" if answered.is_set() or not loop.is_running() else agent_of(thread)
        num_late = num_late + 1 if agent else 0
    log.warning(
        "%s blocks the event loop of the client, so the other agents wait: await its slow calls, use "
        "asyncio.to_thread for blocking ones, or make the agent a plain function, which gets a thread",
        agent,
    )


def queued_seconds(native_id: int) -> float:
    """Seconds that a thread of this process has waited for a processor; 0 where the system does not count them."""
    try:
        return int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def agent_of(thread: int) -> str:
    """The agent whose own code a thread runs now: its function, file and line. Empty if it runs none."""
    frame, below = sys._current_frames().get(thread), None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call" and frame.f_globals.get("__name__") == "agentjet.client.rollout":
            break
        frame, below = frame.f_back, frame
    if frame is None or below is None or below.f_globals.get("__name__", "").startswith("agentjet."):
        return ""  # Such as the start of a plain function's thread.
    return f"the agent {below.f_code.co_qualname} ({below.f_code.co_filename}:{below.f_lineno})"
