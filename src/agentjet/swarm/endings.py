"""How episodes end without being trained: lost, surplus, stale. Inside the ledger's transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentjet.config import JobConfig
from agentjet.swarm import groups
from agentjet.swarm.leases import Leases
from agentjet.swarm.ledger import Ledger
from agentjet.swarm.records import Episode, Group

SURPLUS = "surplus: training had enough without it"
STALE = "stale: its tokens are older than job.max_staleness allows"


class Endings:
    """Ends episodes of one swarm. `ended` is what every end has in common, a scored one's, too."""

    def __init__(self, ledger: Ledger, leases: Leases) -> None:
        self._ledger = ledger
        self._leases = leases

    def expire(self, episode: Episode, job: JobConfig, now: float) -> Episode:
        """End an episode that outlived its lease or its maximum."""
        if now - episode.begun >= job.max_episode_seconds:
            reason = f"older than job.max_episode_seconds = {job.max_episode_seconds:g}"
        else:
            reason = f"no sign of life for job.lease_seconds = {job.lease_seconds:g}"
        return self.lose(replace(episode, status="expired", ended=now, reason=reason))

    def lose(self, episode: Episode) -> Episode:
        """Journal the end of an episode that aborted or expired, and free its place."""
        assert episode.ended is not None
        self._ledger.journal.add_abort(episode, self._ledger.next_batch)
        self._ledger.put(episode)
        self.ended(episode)
        groups.member_lost(self._ledger, episode, episode.ended)
        return episode

    def end_members(self, group: Group, reason: str, now: float) -> None:
        """End those of a group that are still at work."""
        for episode in groups.live_members(self._ledger, group):
            self.lose(replace(episode, status="aborted", ended=now, reason=reason))

    def clear(self, unwanted: Sequence[Group], reason: str, words: str, now: float) -> None:
        """Drop groups that will not be trained, and end who is still at work in them."""
        for group in unwanted:
            self.end_members(group, words, now)
            if group.id in self._ledger.groups:
                groups.drop(self._ledger, self._ledger.groups[group.id], reason, now)

    def ended(self, episode: Episode) -> None:
        """Say so. An ended episode needs no lease and no trees."""
        announce(self._ledger, episode)
        self._leases.forget(episode)
        for key in [key for key in self._ledger.trees if key[0] == episode.id]:
            del self._ledger.trees[key]


def announce(ledger: Ledger, episode: Episode) -> None:
    """The event that an episode began or ended."""
    body: dict[str, Any] = {
        "episode_id": episode.id,
        "status": episode.status,
        "mode": episode.mode,
        "task_id": episode.task_id,
        "task_set": episode.task_set,
        "group": episode.group,
        "client_id": episode.client_id,
    }
    if episode.status != "live":
        body |= {"reward": episode.reward, "reason": episode.reason, "num_calls": episode.num_calls}
    ledger.emit("episode", body)
