"""`Store`: the journal and the part of it that is in memory. `Leases`: activity, the one state that is not journaled.

Memory holds live and prepared episodes, finished ones that wait to train, the groups of the present batch, the batch
being learned and the counts. Everything else is read from the journal, so memory does not grow with a run's length.
The store finds and keeps; the rules are in `episodes`, `groups`, `mixture` and `batches`.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agentjet.config import JobConfig, changed_settings
from agentjet.errors import Conflict, Later
from agentjet.protocol import Event
from agentjet.protocol.bodies import Request
from agentjet.swarm.journal import Journal
from agentjet.swarm.records import Batch, Episode, Group, JobSettings, OutcomeCounts
from agentjet.timeline.tree import ConversationTree

COUNTED = ("live", "prepared", "finished", "aborted", "expired", "trained", "waiting", "dropped")
RECENT_STEPS = 50
"""Batches over which the shares and rewards of task sets are computed."""
CODE_VERSIONS_KEPT = 20
"""Code versions in memory, by last use. The counts of others are read from the journal when they are used again."""
MAX_CLIENTS_SHOWN = 256
STALL_SECONDS = 3.0
"""The server checks leases every second. A longer gap between two checks means that the event loop was blocked."""


class Store:
    """Journal and memory, changed together inside `transaction()`. A failed transaction reloads memory."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self.journal = journal
        self.on_event: Callable[[Event], None] | None = None
        """Called with each event after it is on disk."""
        self.on_uncommitted: Callable[[], None] = lambda: None
        """Called after a transaction that a `commit` must follow."""
        self.undelivered_calls: Callable[[str], Sequence[str]] = lambda episode_id: ()
        """Returns the recorded calls of an ending episode that are still on their way to its agent."""
        self._clock = clock
        self.revision = 0
        """Rises with every change. Not journaled."""
        self._outbox: list[Event] = []
        self._committed: list[Event] = []
        self.load()

    def load(self) -> None:
        """Replace memory with the content of the journal."""
        self.revision += 1
        journal = self.journal
        self.episodes: dict[str, Episode] = {episode.id: episode for episode in journal.unsettled_episodes()}
        self.groups: dict[int, Group] = {group.id: group for group in journal.unlearned_groups()}
        settings = journal.job_settings()
        assert settings is not None, "job settings are stored before a store is loaded"
        self.settings: JobSettings = settings
        self.policy_version: int = journal.policy_version()
        batches = journal.batches(self.policy_version)
        self.pending: Batch | None = batches[0] if batches else None
        """The batch that is composed and not yet learned."""
        self.carry: Mapping[str, float] = journal.carry()
        """Groups owed to each task set since the newest batch."""
        self.last_step: dict[str, float] = journal.step(self.policy_version - 1)
        self.recent_steps: deque[dict[str, float]] = deque(journal.recent_steps(RECENT_STEPS), RECENT_STEPS)
        """Metrics of the newest learned batches, the newest last."""
        self.oldest: dict[str, int] = journal.oldest_versions()
        """The policy version of the oldest token of each episode held here."""
        self.trees: dict[tuple[str, str], ConversationTree] = {}
        self._counts: Counter[str] = Counter(journal.counts())
        self.code_versions: dict[str, OutcomeCounts] = journal.code_versions(CODE_VERSIONS_KEPT)
        """Training episodes by code version, the version that was begun last at the end."""

    @property
    def next_batch(self) -> int:
        """The batch that is being filled."""
        return self.policy_version + (self.pending is not None)

    @property
    def job(self) -> JobConfig:
        """The job settings in force."""
        return self.settings.job

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group changes: all or none. Nested ones join the outermost. Events are sent after the commit."""
        outermost = not self.journal.in_transaction
        self.revision += 1
        kept = len(self._outbox)
        try:
            with self.journal.transaction():
                yield
        except BaseException:
            if outermost:
                del self._outbox[kept if self.journal.has_uncommitted else 0 :]
                self.load()
            raise
        if outermost:
            if self.journal.has_uncommitted:
                self.on_uncommitted()
            else:
                self._committed, self._outbox = self._outbox, []
                self.announce()

    def defer_commits(self, on_uncommitted: Callable[[], None]) -> None:
        """From here on the next `commit` commits a change, and the `sync` after it has the change on disk.

        One commit may serve many changes. `on_uncommitted` is called when there is something to commit. A change must
        be on disk before it is acknowledged.
        """
        self.journal.defer_commits()
        self.on_uncommitted = on_uncommitted

    def commit(self) -> None:
        """Commit what was written. Raises `Later` if that failed; all of it is then undone, also in memory."""
        try:
            self.journal.commit()
        except Later:
            self._outbox.clear()
            self.load()
            raise
        self._committed += self._outbox
        self._outbox.clear()

    def announce(self) -> None:
        """Send the committed events. Call it once they are on disk."""
        committed, self._committed = self._committed, []
        for event in committed:
            if self.on_event is not None:
                self.on_event(event)

    def emit(self, kind: str, body: Mapping[str, Any]) -> None:
        """Journal an event and pass it to `on_event` once it is on disk."""
        with self.transaction():
            self._outbox.append(self.journal.add_event(kind, self._clock(), body))

    def probe_disk(self) -> None:
        """Write something, which ends `journal.refusal` if the disk accepts it. Raises `Later` if not."""
        with self.transaction():
            self.journal.probe_disk()

    # ---- episodes and groups -------------------------------------------------------------------------------

    def put(self, episode: Episode) -> None:
        """Replace an episode in memory and in the counts. A settled one leaves memory."""
        before = self.episodes.pop(episode.id, None)
        if before is not None:
            self._counts.subtract(_categories(before))
        self._counts.update(_categories(episode))
        self._count_code_version(before, episode)
        if {"live", "prepared", "waiting"} & set(_categories(episode)):
            self.episodes[episode.id] = episode
        else:
            self.oldest.pop(episode.id, None)

    def put_group(self, group: Group) -> None:
        """Write a group. A dropped one leaves memory."""
        self.journal.put_group(group)
        if group.state == "dropped":
            self.groups.pop(group.id, None)
        else:
            self.groups[group.id] = group

    def advance(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Take the policy to the version that `batch` makes."""
        self.policy_version, self.pending, self.last_step = batch.id + 1, None, metrics
        self.recent_steps.append(metrics)
        for episode_id in batch.episode_ids:
            self.put(replace(self.episodes[episode_id], trained_in=batch.id))

    def live(self) -> list[Episode]:
        return [episode for episode in self.episodes.values() if episode.status == "live"]

    def live_or_prepared(self) -> list[Episode]:
        return [episode for episode in self.episodes.values() if episode.ended is None]

    def counts(self) -> dict[str, int]:
        """Episodes since the data dir was made, by `COUNTED`."""
        return {name: self._counts[name] for name in COUNTED}

    def _count_code_version(self, before: Episode | None, episode: Episode) -> None:
        version, counts = episode.code_version, self.code_versions
        if not version or episode.mode != "train":
            return
        if before is None:
            known = counts.pop(version, None)
            counts[version] = self.journal.code_version(version) if known is None else known.begun()
            if len(counts) > CODE_VERSIONS_KEPT:
                del counts[next(iter(counts))]
        elif before.ended is None and episode.ended is not None and version in counts:
            counts[version] = counts[version].ended(episode.reward)

    # ---- idempotency ---------------------------------------------------------------------------------------

    def recall(self, scope: str, key: str | None, request: Request) -> str | None:
        """The episode that an earlier request with this key was about; None for a new key.

        Raises `Conflict` for the key with another body.
        """
        known = None if key is None else self.journal.recall(scope, key)
        if known is None:
            return None
        fingerprint, episode_id = known
        if fingerprint != _fingerprint(request):
            raise Conflict(
                f"Idempotency-Key {key!r} was used before for another request; a new request needs a new key.",
                code="idempotency_key_reused",
            )
        return episode_id

    def remember(self, scope: str, key: str | None, request: Request, episode_id: str) -> None:
        """Store a key inside the transaction with its effect, so that both are on disk or neither."""
        if key is not None:
            self.journal.remember(scope, key, _fingerprint(request), episode_id, self._clock())


def load_or_create_job(journal: Journal, given: JobConfig) -> str:
    """Keep the stored job settings, or store `given` if it differs from what was given at the start before.

    Returns a sentence for the log if the settings in force may surprise, else an empty string.
    """
    kept = journal.job_settings()
    if kept is None:
        journal.put_job_settings(JobSettings(1, given, given))
        return ""
    if kept.given.with_defaults() == given.with_defaults():
        if changed := changed_settings(given, kept.job):
            return (
                f"the job settings are those of revision {kept.revision}, which replaced the given ones: "
                f"{', '.join(changed)}"
            )
        return ""
    journal.put_job_settings(JobSettings(kept.revision + 1, given, given))
    lost = f" (those in force were of revision {kept.revision})" if kept.job != kept.given else ""
    changed = changed_settings(kept.job, given)
    return f"the job settings are the ones given at this start{lost}: {', '.join(changed) or 'nothing changed'}"


def _categories(episode: Episode) -> list[str]:
    if episode.status != "finished" or episode.mode == "eval":
        return [episode.status]
    if episode.trained_in is not None:
        return ["finished", "trained"]
    return ["finished", "dropped" if episode.dropped else "waiting"]


def _fingerprint(request: Request) -> str:
    """Digest of a request, without `wait` and `instance_id`, which do not change its effect."""
    return hashlib.sha256(request.model_dump_json(exclude={"wait", "instance_id"}).encode()).hexdigest()


class Leases:
    """Time of the last activity of each live episode and of each client, in Unix seconds of the clock.

    A restart renews every lease, because heartbeats cannot reach a stopped server. `max_episode_seconds` runs on.
    """

    def __init__(self, clock: Callable[[], float], stopwatch: Callable[[], float]) -> None:
        self._opened = clock()
        self._stopwatch = stopwatch
        self._checked_at = stopwatch()
        self.clients: dict[str, float] = {}
        self._clock = clock
        self._last_seen: dict[str, float] = {}
        self._calling: Counter[str] = Counter()
        self.revision = 0
        """Rises when a lease may end earlier than before."""

    def lease_epoch(self) -> float:
        """Time from which leases count. Reset to now if the event loop was blocked for more than `STALL_SECONDS`,
        because heartbeats of that time may still be queued.
        """
        before, self._checked_at = self._checked_at, self._stopwatch()
        if self._checked_at - before > STALL_SECONDS:
            self._opened = self._clock()
        return self._opened

    def expires_at(self, episode: Episode, job: JobConfig) -> float:
        """Time at which a live episode expires without activity; at most its begin + `max_episode_seconds`.

        A prepared episode has no lease. It expires one lease after that maximum, or one lease after a restart.
        """
        last, opened = episode.begun + job.max_episode_seconds, self.lease_epoch()
        if episode.status == "prepared":
            return max(last, opened) + job.lease_seconds
        if self._calling[episode.id]:
            return last
        seen = max(self._last_seen.get(episode.id, episode.begun), opened)
        return min(seen + job.lease_seconds, last)

    def renew(self, episode: Episode) -> None:
        """Record activity of a live episode and of its client."""
        self._last_seen[episode.id] = self._clock()
        self.client_seen(episode.client_id)

    def client_seen(self, client_id: str) -> None:
        """Record activity of a client, with or without an episode."""
        self.clients.pop(client_id, None)
        self.clients[client_id] = self._clock()
        if len(self.clients) > MAX_CLIENTS_SHOWN:
            del self.clients[next(iter(self.clients))]

    @contextmanager
    def calling(self, episode: Episode) -> Iterator[None]:
        """Suspend the episode's lease during a call and renew it afterwards."""
        self.renew(episode)
        self._calling[episode.id] += 1
        try:
            yield
        finally:
            self._calling[episode.id] -= 1
            self.revision += 1
            if not self._calling[episode.id]:
                del self._calling[episode.id]
            if episode.id in self._last_seen:
                self.renew(episode)

    def remove(self, episode: Episode) -> None:
        """Forget the lease of an ended episode."""
        self._last_seen.pop(episode.id, None)
