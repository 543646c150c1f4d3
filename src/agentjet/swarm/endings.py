"""How episodes end: lost, surplus, stale, in doubt; and what an end means for the group. Inside the ledger's
transactions.
"""

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
STALLED = "stalled: its task set finished nothing for as long as an episode may last, while others waited for it"
REPLACED = "replaced: another process of this client has taken its places over"
IN_DOUBT = "in doubt: it was prepared, and nobody finished or aborted it in time"


class Endings:
    """Ends episodes of one swarm. `ended` is what every end has in common, a scored one's, too."""

    def __init__(self, ledger: Ledger, leases: Leases) -> None:
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
        self._ledger.journal.add_undelivered(self._ledger.handing_out(episode.id))
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
        "code_version": episode.code_version,
        "team": episode.team,
    }
    if episode.status != "live":
        body |= {"reward": episode.reward, "reason": episode.reason, "num_calls": episode.num_calls}
    ledger.emit("episode", body)
