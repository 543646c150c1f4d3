"""`Segment`: the calls of the live episodes that a front has, in the front's file of a run.

The server's journal has the episodes: it is read, and only the server writes it. The file of the front has the calls,
with the present counts of their episodes. Files of other fronts are read, too: after `server.fronts` was lowered, the
remaining fronts have the episodes of those that are gone.

A group belongs to one front, so that its shared prefixes are together. So does an evaluation episode.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Forbidden
from agentjet.swarm import EpisodeRecord, Journal
from agentjet.swarm.conversations import Conversations
from agentjet.swarm.journal import Slice
from agentjet.swarm.journal_file import JournalFile, segment_of, segments_of
from agentjet.swarm.state import CallCounts, Leases
from agentjet.types import JOURNAL

FINISHING_KEPT = 10_000
"""Episodes whose end is being recorded by the server, and for which nothing is recorded any more."""


def front_of(episode: EpisodeRecord, fronts: int) -> int:
    """Returns the front of an episode, from 0. With one front less, only the episodes of the last one move."""
    return _front_of(episode.id if episode.group_id is None else f"group {episode.group_id}", fronts)


@lru_cache(4096)
def _front_of(key: str, fronts: int) -> int:
    """Rendezvous hashing (Thaler and Ravishankar 1998)."""
    return max(range(fronts), key=lambda front: hashlib.blake2b(f"{key}/{front}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class EpisodeActivity:
    """The activity of live episodes since the last report of a front."""

    heard: dict[str, bool] = field(default_factory=dict)
    """The episodes with a request; True if it was a call."""
    calling: frozenset[str] = frozenset()
    """Those with a call that waits or is sampled now."""
    counts: dict[str, CallCounts] = field(default_factory=dict)
    """Changed counts."""


class Segment(Conversations):
    """The calls of the live episodes of one front and one run."""

    def __init__(
        self,
        folder: Path,
        front: int,
        fronts: int,
        *,
        clock: Callable[[], float] = time.time,
        address: Callable[[int], str] = lambda front: "",
    ) -> None:
        """Opens the front's file in the `folder` of a run, and creates it if it is missing. `address` returns the base
        URL of a front of `fronts`. Raises `ConfigError` if another process has the file open.
        """
        path = folder / JOURNAL
        own = segment_of(path, front)
        file = JournalFile.open(own)
        try:
            file.attach([path, *(other for other in segments_of(path) if other != own)], live=True)
            # In a transaction, the connection above would not see episodes that began since.
            self.run = Journal.open_live(path)
            """The journal of the run with the calls of all fronts."""
        except BaseException:
            file.close()
            raise
        super().__init__(Journal(file))
        self._front, self._fronts, self._address = front, fronts, address
        self._clock = clock
        self.leases = Leases(clock, lambda: 0.0)
        self.episodes = {}
        self.trees = {}
        self._finishing: dict[str, None] = {}
        self._heard: dict[str, bool] = {}
        self._counted: set[str] = set()
        self._last_number = self.journal.last_call_number()
        self._job = JobConfig()

    @property
    def job(self) -> JobConfig:
        """The settings of the job as `read_job` read them last."""
        return self._job

    def read_job(self) -> int:
        """Reads the committed settings and returns their revision. May run in a thread: it may import a plug-in."""
        with self.run.reading() as journal:
            settings = journal.job_settings()
        if settings is None:
            return -1
        self._job = settings.job
        return settings.revision

    def close(self) -> None:
        """Idempotent."""
        self.run.close()
        self.journal.close()

    # ---- episodes ---------------------------------------------------------------------------------------------------

    def episode(self, episode_id: str) -> EpisodeRecord:
        """An episode, live or not. Raises `NotFound`, and `Forbidden` (`other_front`) for one of another front."""
        if (known := self.episodes.get(episode_id)) is not None:
            return known
        found = self._recorded(episode_id)
        if found.status != "live":
            return found
        if episode_id in self._finishing:
            raise Conflict(f"Episode {episode_id} is ending.", code="episode_ended_meanwhile")
        counts = self.journal.newest_counts(episode_id)
        self.episodes[episode_id] = found if counts is None else replace(found, **counts._asdict())
        return self.episodes[episode_id]

    def _recorded(self, episode_id: str) -> EpisodeRecord:
        found = self.run.known_episode(episode_id)
        if (front := front_of(found, self._fronts)) != self._front:
            raise other_front(episode_id, front, self._address(front))
        return found

    def check_front(self, episode_id: str) -> None:
        """Raises as `episode` does, but not for one that is ending."""
        if episode_id not in self.episodes:
            self._recorded(episode_id)

    def up_to_date(self, episode_id: str) -> EpisodeRecord:
        """An episode as this front has it. The server ends it with a message."""
        return self.episode(episode_id)

    def is_unread(self, episode_id: str) -> bool:
        self.episode(episode_id)
        return super().is_unread(episode_id)

    def heartbeat(self, episode_id: str) -> EpisodeRecord:
        self._heard.setdefault(episode_id, False)
        return super().heartbeat(episode_id)

    @contextmanager
    def calling(self, episode_id: str) -> Iterator[EpisodeRecord]:
        with super().calling(episode_id) as episode:
            self._heard[episode_id] = True
            yield episode

    def put_calls(self, episode: EpisodeRecord) -> None:
        before = self.episodes[episode.id]

        def restore() -> None:
            self.episodes[episode.id] = before
            self._counted.add(episode.id)  # The server may have got the counts before the commit failed.

        self.restores.append(restore)
        self.episodes[episode.id] = episode
        self.journal.put_episode(episode)
        self._heard[episode.id] = True
        self._counted.add(episode.id)

    def next_call_number(self) -> int:
        """Microseconds of the clock, so that the calls of an episode that moves between fronts stay in order."""
        self._last_number = max(self._last_number + 1, int(self._clock() * 1e6))
        return self._last_number

    # ---- messages of the server -------------------------------------------------------------------------------------

    def finish(self, episode_id: str, undelivered: Sequence[str] = ()) -> CallCounts | None:
        """End an episode here: nothing is recorded from here on. Returns its counts; None for one that had ended.

        `undelivered` are its calls whose answers did not reach their agent.
        """
        if episode_id in self._finishing:
            return self.journal.newest_counts(episode_id)
        episode = self.episode(episode_id)
        if episode.status != "live":
            return None
        if undelivered:
            self.undelivered(episode_id, undelivered)
        while len(self._finishing) >= FINISHING_KEPT:
            del self._finishing[next(iter(self._finishing))]
        self._finishing[episode_id] = None
        del self.episodes[episode_id]
        self.trees.pop(episode_id, None)
        self.leases.remove(episode)
        self._heard.pop(episode_id, None)
        self._counted.discard(episode_id)
        return CallCounts.of(episode)

    def resume(self, episode_id: str) -> None:
        """Undo `finish`: the server or the disk refused the end."""
        self._finishing.pop(episode_id, None)
        self.episodes.pop(episode_id, None)  # An undone call put it back as live, but the server may have ended it.

    def prune(self, rows: Slice) -> None:
        with self.transaction():
            self.journal.delete(rows.of_own_file())

    def report(self) -> EpisodeActivity:
        heard, self._heard = self._heard, {}
        counted, self._counted = self._counted, set()
        counts = {name: CallCounts.of(self.episodes[name]) for name in counted if name in self.episodes}
        return EpisodeActivity(heard, self.leases.calling_now(), counts)


def other_front(episode_id: str, front: int, url: str) -> Forbidden:
    """Returns the error for a request about an episode of another front, whose base URL is `url`."""
    return Forbidden(
        f"Episode {episode_id} belongs to front {front}: send its requests to its own base URL, {url}.",
        code="other_front",
    )
