"""`Leases`: signs of life. The one part of the swarm's state that is not journaled.

A restart begins every lease anew, since nobody could heartbeat a server that was down, and so does a time in which it
heard nobody; `max_episode_seconds` runs on regardless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentjet.config import JobConfig
from agentjet.swarm.records import Episode

MAX_CLIENTS_SHOWN = 256
DEAF_AFTER = 3.0
"""Seconds between two looks at the leases, by the stopwatch, that mean that nobody was heard: a server looks every
second."""


class Leases:
    """When each live episode, and each client, was last seen. Times are those of the clock, in Unix seconds."""

    def __init__(self, clock: Callable[[], float], stopwatch: Callable[[], float]) -> None:
        self._opened = clock()
        self._stopwatch = stopwatch
        self._looked = stopwatch()
        self.clients: dict[str, float] = {}
        self._clock = clock
        self._last_seen: dict[str, float] = {}
        self._calling: Counter[str] = Counter()
        self.revision = 0
        """Rises when a lease may end earlier than it looked before."""

    def heard_since(self) -> float:
        """Since when signs of life are heard: the start, or the last time that nobody looked for long, because the
        server was busy with one thing, or stopped for a while. What came meanwhile is yet to be heard.
        """
        before, self._looked = self._looked, self._stopwatch()
        if self._looked - before > DEAF_AFTER:
            self._opened = self._clock()
        return self._opened

    def expires_at(self, episode: Episode, job: JobConfig) -> float:
        """When a live episode is reclaimed unless it shows life; its begin + `max_episode_seconds` at the latest.

        A prepared one has no lease: it may be decided until a lease after that maximum, or after a restart, during
        which nobody could decide it.
        """
        last, opened = episode.begun + job.max_episode_seconds, self.heard_since()
        if episode.status == "prepared":
            return max(last, opened) + job.lease_seconds
        if self._calling[episode.id]:
            return last
        seen = max(self._last_seen.get(episode.id, episode.begun), opened)
        return min(seen + job.lease_seconds, last)

    def touch(self, episode: Episode) -> None:
        """A sign of life, of a live episode and of its client."""
        self._last_seen[episode.id] = self._clock()
        self.saw(episode.client_id)

    def saw(self, client_id: str) -> None:
        """A sign of life of a client, which may hold no episode."""
        self.clients.pop(client_id, None)
        self.clients[client_id] = self._clock()
        if len(self.clients) > MAX_CLIENTS_SHOWN:
            del self.clients[next(iter(self.clients))]

    @contextmanager
    def calling(self, episode: Episode) -> Iterator[None]:
        """The lease stands still meanwhile, and begins anew after it."""
        self.touch(episode)
        self._calling[episode.id] += 1
        try:
            yield
        finally:
            self._calling[episode.id] -= 1
            self.revision += 1
            if not self._calling[episode.id]:
                del self._calling[episode.id]
            if episode.id in self._last_seen:
                self.touch(episode)

    def forget(self, episode: Episode) -> None:
        """An ended episode has no lease."""
        self._last_seen.pop(episode.id, None)
