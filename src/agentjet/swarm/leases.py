"""`Leases`: signs of life. The one part of the swarm's state that is not journaled.

A restart begins every lease anew, since nobody could heartbeat a server that was down, and so does a time in which it
heard nobody; `max_episode_seconds` runs on regardless.

How episodes end: lost, surplus, stale, in doubt; and what an end means for the group. Inside the ledger's
transactions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agentjet.config import JobConfig
from agentjet.swarm import groups
from agentjet.swarm.records import Episode, Group
from agentjet.swarm.state_store import Store

MAX_CLIENTS_SHOWN = 256
STALL_SECONDS = 3.0
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

    def lease_epoch(self) -> float:
        """Since when signs of life are heard: the start, or the last time that nobody looked for long, because the
        server was busy with one thing, or stopped for a while. What came meanwhile is yet to be heard.
        """
        before, self._looked = self._looked, self._stopwatch()
        if self._looked - before > STALL_SECONDS:
            self._opened = self._clock()
        return self._opened

    def expires_at(self, episode: Episode, job: JobConfig) -> float:
        """When a live episode is reclaimed unless it shows life; its begin + `max_episode_seconds` at the latest.

        A prepared one has no lease: it may be decided until a lease after that maximum, or after a restart, during
        which nobody could decide it.
        """
        last, opened = episode.begun + job.max_episode_seconds, self.lease_epoch()
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


SURPLUS = "surplus: training had enough without it"
STALE = "stale: its tokens are older than job.max_staleness allows"
STALLED = "stalled: its task set finished nothing for as long as an episode may last, while others waited for it"
REPLACED = "replaced: another process of this client has taken its places over"
IN_DOUBT = "in doubt: it was prepared, and nobody finished or aborted it in time"


class Endings:
    """Ends episodes of one swarm. `ended` is what every end has in common, a scored one's, too."""

    def __init__(self, ledger: Store, leases: Leases) -> None:
        self._ledger = ledger
        self._leases = leases

    def expire(self, episode: Episode, job: JobConfig, now: float) -> Episode:
        """End an episode that outlived its lease or its maximum, or was prepared and never decided."""
        if episode.status == "prepared":
            reason = IN_DOUBT
        elif now - episode.begun >= job.max_episode_seconds:
            reason = f"older than job.max_episode_seconds = {job.max_episode_seconds:g}"
        else:
            reason = f"no sign of life for job.lease_seconds = {job.lease_seconds:g}"
        return self.lose(replace(episode, status="expired", ended=now, reason=reason))

    def lose(self, episode: Episode) -> Episode:
        """Journal the end of an episode that aborted or expired, and free its place. What it promised is void."""
        ended = episode.ended
        assert ended is not None
        episode = replace(episode, reward=None, by_role={}, metrics={})
        self._ledger.journal.add_abort(episode, self._ledger.next_batch)
        self._ledger.put(episode)
        self.ended(episode)
        groups.member_lost(self._ledger, episode, ended)
        return episode

    def settle(self, episode: Episode, job: JobConfig, now: float) -> None:
        """After an end: close the group that has all it needs; who is still at work in it is surplus."""
        group = groups.satisfied(self._ledger, job, episode)
        if group is not None:
            self.end_members(group, SURPLUS, now)
            groups.close(self._ledger, job, self._ledger.groups[group.id], now)

    def end_members(self, group: Group, reason: str, now: float) -> None:
        """End those of a group that are still at work. A prepared one keeps the right to be finished."""
        for episode in groups.live_members(self._ledger, group):
            self.lose(replace(episode, status="aborted", ended=now, reason=reason))

    def clear(self, unwanted: Sequence[Group], reason: str, words: str, now: float) -> None:
        """Drop groups that will not be trained, and end who is still at work in them."""
        for group in unwanted:
            self.end_members(group, words, now)
            if group.id in self._ledger.groups:
                groups.drop(self._ledger, self._ledger.groups[group.id], reason, now)

    def ended(self, episode: Episode) -> None:
        """Say so. Who makes no more calls, prepared episodes included, needs no lease and no trees; the answers that
        are still on their way then do not arrive.
        """
        self._ledger.journal.add_undelivered(self._ledger.undelivered_calls(episode.id))
        announce(self._ledger, episode)
        self._leases.forget(episode)
        for key in [key for key in self._ledger.trees if key[0] == episode.id]:
            del self._ledger.trees[key]


def announce(ledger: Store, episode: Episode) -> None:
    """The event that an episode began or ended."""
    body: dict[str, Any] = {
        "episode_id": episode.id,
        "status": episode.status,
        "mode": episode.mode,
        "task_id": episode.task_id,
        "task_set": episode.task_set,
        "group": episode.group,
        "client_id": episode.client_id,
        "code_version": episode.code_version,
        "team": episode.team,
    }
    if episode.status != "live":
        body |= {"reward": episode.reward, "reason": episode.reason, "num_calls": episode.num_calls}
    ledger.emit("episode", body)
