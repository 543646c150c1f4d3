"""`Store`: the journal and the state in memory, changed together. `Leases`: activity, the one state not journaled.

Every change is a fact: it is applied to `State` at once and written to the journal at the end of its transaction. A
failed transaction rewinds the state with the undo log and reads nothing. The store finds and keeps; the rules are in
`episodes`, `groups`, `mixture` and `batches`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agentjet.config import JobConfig, changed_settings
from agentjet.errors import Conflict, Later, NotFound
from agentjet.protocol import Event, Request
from agentjet.swarm.journal import SNAPSHOT_EVERY, Journal
from agentjet.swarm.state import Batch, Episode, Fact, Group, JobSettings, changes
from agentjet.timeline.tree import ConversationTree
from agentjet.types import EpisodeStatus

RECENT_STEPS = 50
"""Batches over which the shares and rewards of task sets are computed."""
MAX_CLIENTS_SHOWN = 256
STALL_SECONDS = 3.0
"""The server checks leases every second. A longer gap between two checks means that the event loop was blocked."""


class Store:
    """Journal and state of one run. Every change happens inside `transaction()`."""

    def __init__(self, journal: Journal, clock: Callable[[], float], policies: tuple[str, ...] = ()) -> None:
        self.journal = journal
        self.policies = policies
        """The policies that the settings name."""
        self.file = journal.file
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
        self._facts: list[Fact] = []
        """Facts of the present transaction."""
        self._num_facts = journal.num_facts()
        self._needs_snapshot = False
        self.trees: dict[tuple[str, str], ConversationTree] = {}
        """Conversations of live episodes, by episode and role; a cache of the journal."""
        self.state = state = journal.read_state()
        self._log = state.log
        self.settings: JobSettings | None = journal.job_settings()
        self.pending: Batch | None = next(iter(journal.batches(state.policy_version)), None) if state.composed else None
        """The batch that is composed and not yet learned."""
        self.steps = journal.recent_steps(RECENT_STEPS)
        """Metrics of the newest learned batches by batch, the newest last."""

    # ---- reads ---------------------------------------------------------------------------------------------

    @property
    def episodes(self) -> Mapping[str, Episode]:
        """Unsettled episodes."""
        return self.state.episodes

    @property
    def groups(self) -> Mapping[int, Group]:
        """Open and complete groups that no batch contains."""
        return self.state.groups

    @property
    def policy_version(self) -> int:
        return self.state.policy_version

    @property
    def job(self) -> JobConfig:
        """The job settings in force."""
        assert self.settings is not None, "job settings are stored before they are used"
        return self.settings.job

    @property
    def job_revision(self) -> int:
        """Number of the settings in force; each change counts, from 1."""
        return 0 if self.settings is None else self.settings.revision

    def episode(self, episode_id: str) -> Episode:
        """Any episode that the journal keeps. Raises `NotFound`."""
        episode = self.episodes.get(episode_id) or self.journal.settled_episode(episode_id)
        if episode is None:
            raise NotFound(f"There is no episode {episode_id!r} in this run.", code="episode_not_found")
        return episode

    def recent_episodes(self, limit: int, *, status: EpisodeStatus | None = None, before: str = "") -> list[Episode]:
        """The newest episodes, newest first: all, those of a status, those begun `before` an episode.

        Raises `NotFound` if `before` does not exist.
        """
        end = self.episode(before).seq if before else None
        found = {
            episode.seq: episode
            for episode in self.episodes.values()
            if (status is None or episode.status == status) and (end is None or episode.seq < end)
        }
        if status != "live":
            settled = self.journal.settled_episodes(limit, status=status, before=end)
            found |= {episode.seq: episode for episode in settled}
        return [found[seq] for seq in sorted(found, reverse=True)[:limit]]

    def live(self) -> list[Episode]:
        return [episode for episode in self.episodes.values() if episode.status == "live"]

    def num_pinned(self) -> int:
        """Number of live evaluation episodes that need the present policy version."""
        return sum(episode.at_version is not None for episode in self.live())

    # ---- transactions --------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group changes: all or none. Nested ones join the outermost. Events are sent after the commit."""
        if self.file.in_transaction:
            yield
            return
        self.revision += 1
        mark, sent = self._log.mark(), len(self._outbox)
        try:
            with self.file.transaction():
                yield
                self._write_facts()
        except BaseException:
            keeps_others = self.file.has_uncommitted  # Else the disk undid earlier transactions, too.
            self._rewind(mark if keeps_others else 0, sent if keeps_others else 0)
            raise
        if self.file.has_uncommitted:
            self.on_uncommitted()
        else:
            self._log.clear()
            self._committed, self._outbox = self._outbox, []
            self.announce()

    def _write_facts(self) -> None:
        if self._needs_snapshot or (self._facts and self._num_facts >= SNAPSHOT_EVERY):
            self.journal.put_snapshot(self.state)
            self.journal.prune(self.state, self._clock())
            self.set(_num_facts=0)
        elif self._facts:
            self.journal.add_facts(self._facts)
            self.set(_num_facts=self._num_facts + 1)
        self._facts, self._needs_snapshot = [], False

    def _rewind(self, mark: int, sent: int) -> None:
        self._log.rewind(mark)
        del self._outbox[sent:]
        self._facts, self._needs_snapshot = [], False
        self.revision += 1

    def defer_commits(self, on_uncommitted: Callable[[], None]) -> None:
        """From here on the next `commit` commits a change, and the `sync` after it has the change on disk.

        One commit may serve many changes. `on_uncommitted` is called when there is something to commit. A change must
        be on disk before it is acknowledged.
        """
        self.file.defer_commits()
        self.on_uncommitted = on_uncommitted

    def commit(self) -> None:
        """Commit what was written. Raises `Later` if that failed; all of it is then undone, also in memory."""
        try:
            self.file.commit()
        except Later:
            self._rewind(0, 0)
            raise
        self._log.clear()
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
        """Write something, which ends `file.refusal` if the disk accepts it. Raises `Later` if not."""
        with self.transaction():
            self.file.probe_disk()

    # ---- changes, inside a transaction ---------------------------------------------------------------------

    def record(self, kind: str, **values: Any) -> None:
        """Apply a fact and write it with the transaction. A settled episode moves from memory to its table."""
        assert self.file.in_transaction, "facts are recorded in transactions"
        fact = (kind, values)
        self._facts.append(fact)
        settled = self.state.apply(fact)
        if settled is not None:
            self.journal.add_settled(settled)

    def put(self, episode: Episode) -> None:
        """Record a new or changed episode."""
        self.record("episode", **changes(self.episodes.get(episode.id), episode))

    def put_group(self, group: Group) -> None:
        """Record a new or changed group."""
        self.record("group", **changes(self.groups.get(group.id), group))

    def set(self, **values: Any) -> None:
        """Set attributes of the store that cache rows of the journal. A rewind restores them."""
        for name, value in values.items():
            self._log.put(vars(self), name, value)

    def snapshot(self) -> None:
        """Write a snapshot at the end of the transaction, and prune."""
        self._needs_snapshot = True

    def keep_tree(self, key: tuple[str, str]) -> None:
        """The tree of an episode and role is about to grow. A rewind removes it from the cache."""
        self._log.discard_on_rewind(self.trees, key)

    def forget_trees(self, episode_id: str) -> None:
        """Remove an episode's trees from the cache."""
        for key in [key for key in self.trees if key[0] == episode_id]:
            self._log.remove(self.trees, key)

    def put_job(self, job: JobConfig, *, given: JobConfig | None = None) -> None:
        """Put job settings in force; `given` if the server was started with them."""
        old = self.settings
        if old is None or given is not None:
            settings = JobSettings(1 if old is None else old.revision + 1, given or job, job)
        else:
            settings = replace(old, revision=old.revision + 1, job=job)
        self.journal.put_job_settings(settings)
        self.set(settings=settings)

    def start_job(self, given: JobConfig) -> str:
        """Keep the stored job settings, or store `given` if it differs from what was given at the start before.

        Returns a sentence for the log if the settings in force may surprise, else an empty string.
        """
        kept = self.settings
        if kept is None:
            self.put_job(given)
            return ""
        if kept.given.with_defaults() == given.with_defaults():
            if changed := changed_settings(given, kept.job):
                return (
                    f"the job settings are those of revision {kept.revision}, which replaced the given ones: "
                    f"{', '.join(changed)}"
                )
            return ""
        self.put_job(given, given=given)
        lost = f" (those in force were of revision {kept.revision})" if kept.job != kept.given else ""
        changed = changed_settings(kept.job, given)
        return f"the job settings are the ones given at this start{lost}: {', '.join(changed) or 'nothing changed'}"

    def start_at(self, policy_version: int) -> None:
        """Start an empty run, or continue one after a rollback, at the checkpoint of a version."""
        self.record("run", policy_version=policy_version, base_version=policy_version, durable_version=policy_version)

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
        """Time at which a live episode expires without activity; at most its begin + `max_episode_seconds`."""
        last, opened = episode.begun + job.max_episode_seconds, self.lease_epoch()
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
