"""`SwarmState`: the rules of episodes, groups and batches.

Invariants:
* what was acknowledged is on disk: every change is committed to the journal before the method returns, or, after
  `commit_together`, by the `commit` that must come before anybody is told;
* a finished training episode is in exactly one of: waiting, one batch, a group dropped for a named reason;
* only what the present batch needs is admitted, or, with `max_staleness`, as many batches as may wait without
  growing too old; what did grow too old is dropped and counted;
* an episode never outlives its lease or `max_episode_seconds`, whether or not anybody called `reap` in time.

It knows no HTTP, never waits, and reads time from the injected clock only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.protocol import AbortRequest, BeginRequest, EvaluationRequest, EvaluationView, Event, FinishRequest
from agentjet.swarm import groups, queries, state_store
from agentjet.swarm.batch_queue import Batches
from agentjet.swarm.journal import Journal
from agentjet.swarm.journal_file import of_worker
from agentjet.swarm.leases import REPLACED, STALLED, announce
from agentjet.swarm.records import Episode, new_episode_id
from agentjet.timeline.tree import ConversationTree
from agentjet.types import MAX_NAME, Call, EpisodeStatus, ModelInfo

MAX_NOTES = 64
"""Different notes, and different refusals, that are counted apart on one episode."""


class SwarmState(Batches):
    """Episodes, groups and batches of one policy. Synchronous; one thread at a time."""

    def __init__(
        self,
        journal: Journal,
        job: JobConfig,
        *,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = lambda: 0.0,
        policy_version: int | None = None,
    ) -> None:
        """`policy_version` is that of the checkpoint where an empty journal starts, and `job` what it starts with; one
        with history knows its own version, and what `job` was replaced by. By the `stopwatch` it is seen that nobody
        was listened to for a while: see `leases`.
        """
        with journal.transaction():
            if policy_version is not None and journal.is_empty():
                journal.set_base_version(policy_version)
            self.job_notice = state_store.load_or_create_job(journal, job)
            """In words: whether the settings in force are `job`, where that is not to be expected."""
        super().__init__(journal, clock=clock, stopwatch=stopwatch)

    def replace_job(self, job: JobConfig) -> None:
        """Put other settings in force from here on; a batch keeps those it was composed with."""
        settings = self._ledger.settings
        with self.transaction():
            self._ledger.settings = replace(settings, revision=settings.revision + 1, job=job)
            self._journal.put_job_settings(self._ledger.settings)

    @property
    def dtype(self) -> str:
        """The type that the policy's weights had from its beginning; empty before that is known."""
        return str(self._journal.origin.get("model.dtype", ""))

    def check_origin(self, card: ModelInfo) -> list[str]:
        """A worker is up, and has loaded and learned nothing yet: compare with what the policy was begun with.

        Returns, in words, what changed that may. Raises `ConfigError` when another policy would begin there.
        """
        return self._journal.check_origin(of_worker(card))

    def record_origin(self) -> None:
        """The worker, and the newest checkpoint where there is one, agree with what was traced: it holds from here."""
        with self.transaction():
            self._journal.record_origin()

    # ---- episodes ------------------------------------------------------------------------------------------

    def begin(self, request: BeginRequest, *, idempotency_key: str | None = None) -> Episode:
        """Start an episode.

        Raises `Later` (`not_sampling`, `batch_full`, `task_set_full`, `group_full`) when the present batch needs none,
        `Conflict` when it was to join a group and there is none (`group_closed`), when `job.task_weights` has no place
        for its task set (`task_set_unknown`), or none just now for one `unless_full` (`task_set_full`), or the version
        it is pinned to is not the present one (`version_gone`), or another process of the client has taken its places
        over (`client_replaced`).
        """
        known = self.begun(request, idempotency_key)
        if known is not None:
            return known
        if self.is_due():
            self.reap()
        self.take_over(request)
        self._close_outdated(request)
        now = self._clock()
        if request.at_version is not None:
            groups.check_pin(self._ledger, self._mixing, self.job, request.at_version, now)
        joined = None
        if request.mode == "train":
            joined = groups.admit(self._ledger, self._mixing, self.job, request, now)
        with self.transaction():
            episode = Episode(
                id=new_episode_id(now),
                seq=self._journal.next_episode_seq(),
                client_id=request.client_id,
                task_id=request.task_id,
                task_set=request.task_set,
                group=groups.group_name(request),
                group_id=None if joined is None else joined.id,
                mode=request.mode,
                policy_version=self.policy_version,
                begun=now,
                code_version=request.code_version,
                team=request.team,
                at_version=request.at_version,
                temperature=request.temperature,
                instance_id=request.instance_id,
            )
            if joined is not None:
                groups.join(self._ledger, joined, episode)
            self._journal.add_episode(episode)
            self._ledger.put(episode)
            self._announce_code(episode)
            self._ledger.remember(_begin_scope(request), idempotency_key, request, episode.id)
            announce(self._ledger, episode)
        self._leases.touch(episode)
        return episode

    def take_over(self, request: BeginRequest) -> None:
        """End what an earlier process of the client left behind, when a new one begins: that one was killed, and its
        leases would hold its places. `begin` does this first.

        Raises `Conflict` (`client_replaced`) for a process that was itself replaced, because two that live would end
        each other's episodes.
        """
        newest = self._journal.newest_instance(request.client_id) if request.instance_id else ""
        if newest in ("", request.instance_id):
            return
        if self._journal.has_instance(request.client_id, request.instance_id):
            raise Conflict(
                f"Another process of client {request.client_id!r} has begun episodes since and taken the places of "
                "this one: end this process, or give the two different names (client_id) or the same instance_id.",
                code="client_replaced",
            )
        now, ledger = self._clock(), self._ledger
        for episode in [e for e in ledger.live() if e.client_id == request.client_id and e.instance_id]:
            with self.transaction():
                self._mixing.ended(self._endings.lose(replace(episode, status="aborted", ended=now, reason=REPLACED)))
        for group in list(ledger.groups.values()):
            members = [ledger.episodes[member] for member in group.members]
            is_left = all(member.ended is not None and member.instance_id for member in members)
            if group.client_id == request.client_id and group.state == "open" and is_left:
                with self.transaction():
                    groups.close(ledger, self.job, group, now)  # No client will refill it.

    def begun(self, request: BeginRequest, idempotency_key: str | None) -> Episode | None:
        """The episode that this very request began before, if it did. Raises `Conflict` for the key of another."""
        known = self._ledger.recall(_begin_scope(request), idempotency_key, request)
        return None if known is None else self.episode(known)

    def heartbeat(self, episode_id: str) -> Episode:
        """Renew the lease; one that is prepared has none. Raises `Conflict` when the episode has ended: its code tells
        how.
        """
        episode = self._undecided(episode_id)
        if episode.status == "live":
            self._leases.touch(episode)
        return episode

    def prepare(self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None) -> Episode:
        """Promise an episode's reward: a later `finish` with the same one will be granted, after any restart.

        Until then the episode makes no calls, trains nothing, and keeps its place in its group. It has no lease; one
        that nobody finishes or aborts ends unscored, a lease after its `max_episode_seconds`. The same promise again
        gives the same answer. Raises `Conflict`: as `finish`, or `episode_prepared` when another reward was promised.
        """
        scope = f"prepare/{episode_id}"
        if self._ledger.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self._up_to_date(episode_id)
        if episode.status in ("prepared", "finished") and _scored_so(episode, request):
            return episode
        episode = self._live(episode_id)
        now = self._clock()
        with self.transaction():
            episode = _scored(episode, request, status="prepared")
            self._journal.add_promise(episode, now)
            self._ledger.put(episode)
            self._ledger.remember(scope, idempotency_key, request, episode_id)
            groups.member_scored(self._ledger, episode, now)
            self._endings.ended(episode)
        return episode

    def finish(self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None) -> Episode:
        """End an episode with its reward. The same reward again gives the same answer.

        Raises `Conflict`: `episode_expired`, `episode_aborted`, `episode_finished` when it ended with another reward,
        or `episode_prepared` when another was promised.
        """
        scope = f"finish/{episode_id}"
        if self._ledger.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self._up_to_date(episode_id)
        if episode.status == "finished" and _scored_so(episode, request):
            return episode
        kept = episode.status == "prepared" and _scored_so(episode, request)
        episode = episode if kept else self._live(episode_id)
        now = self._clock()
        with self.transaction():
            episode = _scored(episode, request, status="finished", ended=now)
            self._journal.add_finish(episode)
            if kept and episode.mode == "train" and episode.group_id not in self._ledger.groups:
                episode = self._journal.episode(episode_id) or episode  # its group was dropped meanwhile: it knows why
            self._ledger.put(episode)
            self._ledger.remember(scope, idempotency_key, request, episode_id)
            groups.member_scored(self._ledger, episode, now)
            self._endings.ended(episode)
            self._endings.settle(episode, self.job, now)
            self._mixing.ended(episode)
        return self.episode(episode_id)

    def abort(self, episode_id: str, request: AbortRequest, *, idempotency_key: str | None = None) -> Episode:
        """End an episode that failed, or whose promise is taken back: it is never scored, and its place is free again.

        One that ended unscored already is returned as it is. Raises `Conflict` (`episode_finished`) on a scored one.
        """
        scope = f"abort/{episode_id}"
        if self._ledger.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self._up_to_date(episode_id)
        if episode.status in ("aborted", "expired"):
            return episode
        episode = self._undecided(episode_id)
        now = self._clock()
        with self.transaction():
            self._ledger.remember(scope, idempotency_key, request, episode_id)
            episode = self._endings.lose(replace(episode, status="aborted", ended=now, reason=request.reason))
            self._endings.settle(episode, self.job, now)
            self._mixing.ended(episode)
        return episode

    # ---- evaluations ---------------------------------------------------------------------------------------

    def record_evaluation(self, request: EvaluationRequest, *, idempotency_key: str | None = None) -> None:
        """Store the score of a policy version. Raises `InvalidRequest` for one that was not learned yet."""
        queries.record_evaluation(self._ledger, request, idempotency_key)

    def evaluations(self) -> list[EvaluationView]:
        """All recorded evaluations, in the order they came."""
        return queries.list_evaluations(self._journal)

    # ---- calls ---------------------------------------------------------------------------------------------

    @contextmanager
    def calling(self, episode_id: str) -> Iterator[Episode]:
        """While a call is held or sampled its lease stands still: the server's slowness is not the agent's silence. It
        runs again while the agent reads the answer.

        `max_episode_seconds` still counts. Raises `Conflict` when the episode has ended.
        """
        episode = self._live(episode_id)
        with self._leases.calling(episode):
            yield episode

    def record_call(self, call: Call, encoded_suffix: Sequence[bytes], encoded_completion: Sequence[bytes]) -> None:
        """Append a call to its episode's conversation, with the encoded bytes of each token.

        Raises `Conflict` when the episode has ended meanwhile: such a call answers nobody and trains nothing.
        """
        episode = self._live(call.episode_id)
        tree = self.tree(call.episode_id, call.role)
        if call.parent is not None and not tree.knows(call.parent):
            raise Later(
                "What this call continues was lost with a write that the disk refused.",
                code="journal_unavailable",
                status=503,
                retry_after=1.0,
            )
        with self.transaction():
            self._journal.add_call(call, encoded_suffix, encoded_completion)
            num_tokens = episode.num_tokens + (0 if call.untrained else len(call.completion))
            self._ledger.put(replace(episode, num_calls=episode.num_calls + 1, num_tokens=num_tokens))
            if call.versions and not call.untrained:
                oldest = self._ledger.oldest.get(episode.id, call.versions[0])
                self._ledger.oldest[episode.id] = min(oldest, call.versions[0])
            tree.add(call, encoded_suffix, encoded_completion)
        self._leases.touch(episode)

    def note(self, episode_id: str, *, noted: Sequence[str] = (), refused: Sequence[str] = ()) -> None:
        """Count what an episode's request had noted or refused. An ended episode keeps its counts unchanged."""
        episode = self._up_to_date(episode_id)
        if episode.ended is not None or not (noted or refused):
            return
        with self.transaction():
            episode = replace(episode, noted=_counted(episode.noted, noted), refused=_counted(episode.refused, refused))
            self._journal.put_notes(episode)
            self._ledger.put(episode)

    def undelivered(self, episode_id: str, call_ids: Sequence[str]) -> None:
        """These recorded answers did not reach their agent: unless it turns out that they did, they train nothing.

        Of an ended episode nothing changes any more: its batch may be composed already.
        """
        if self._up_to_date(episode_id).status == "live":
            with self.transaction():
                self._journal.add_undelivered(call_ids)

    def tree(self, episode_id: str, role: str) -> ConversationTree:
        """What one role of an episode has heard and said; kept in memory while the episode lives."""
        tree = self._ledger.trees.get((episode_id, role))
        if tree is None:
            tree = self.trees(episode_id).get(role) or ConversationTree()
            if self.episode(episode_id).status == "live":
                self._ledger.trees[episode_id, role] = tree
        return tree

    # ---- time ----------------------------------------------------------------------------------------------

    def reap(self) -> list[Episode]:
        """Expire what outlived its lease or its maximum, close short groups nobody refills; returns the expired."""
        now = self._clock()
        late = [episode for episode in self._ledger.undecided() if self.expires_at(episode) <= now]
        with self.transaction():
            expired = [self._endings.expire(episode, self.job, now) for episode in late]
            for episode in expired:
                self._endings.settle(episode, self.job, now)
            for group in list(self._ledger.groups.values()):
                deadline = groups.refill_deadline(self._ledger, self.job, group, self._leases.lease_epoch())
                if deadline is not None and deadline <= now:
                    groups.close(self._ledger, self.job, group, now)
            self._endings.clear(self._mixing.reap(self.job), "stalled", STALLED, now)
        return expired

    # ---- what others may know ------------------------------------------------------------------------------

    def saw(self, client_id: str) -> None:
        """A client showed life, whether or not it gets an episode."""
        self._leases.saw(client_id)

    def emit(self, kind: str, body: Mapping[str, Any]) -> None:
        """Journal an event and pass it to `on_event` once it is on disk."""
        self._ledger.emit(kind, body)

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        """Called with each event after it is on disk."""
        return self._ledger.on_event

    @on_event.setter
    def on_event(self, listener: Callable[[Event], None] | None) -> None:
        self._ledger.on_event = listener

    @property
    def undelivered_calls(self) -> Callable[[str], Sequence[str]]:
        """Asked, when an episode ends, for its recorded calls that are still on their way to its agent: they are
        undelivered then.
        """
        return self._ledger.undelivered_calls

    @undelivered_calls.setter
    def undelivered_calls(self, ask: Callable[[str], Sequence[str]]) -> None:
        self._ledger.undelivered_calls = ask

    def transaction(self) -> AbstractContextManager[None]:
        """Group several changes into one. When it fails nothing of it happened, in memory neither."""
        return self._ledger.transaction()

    def commit_together(self, on_uncommitted: Callable[[], None]) -> None:
        """From here on changes are made with the next `commit` and are on disk after the `sync` that follows, which
        may serve many at once.

        `on_uncommitted` is called when there is something to commit. Whoever acknowledges a change must have it on disk
        first.
        """
        self._journal.commit_together()
        self._ledger.on_uncommitted = on_uncommitted

    @property
    def has_uncommitted(self) -> bool:
        return self._journal.has_uncommitted

    def commit(self) -> None:
        """Make every change so far one. Raises `Later` when the disk refuses: then nothing since the last happened."""
        self._ledger.commit()

    def sync(self) -> None:
        """Have on disk what was committed. The one method that another thread may call, which waits for the disk.

        Raises `Later`: nobody may be told of it, and every further change is refused.
        """
        self._journal.sync()

    def refuse_writes(self, error: BaseException) -> Later:
        """Record nothing more until the journal is opened again, because of `error`; returns what writers get."""
        return self._journal.refuse_writes(error)

    @property
    def disk_refusal(self) -> str:
        """Why nothing can be recorded now, and the way out; empty while everything is."""
        return self._journal.refusal

    def try_disk(self) -> None:
        """Have something written, which ends `disk_refusal` where the disk takes it. Raises `Later` where not."""
        with self.transaction():
            self._journal.try_disk()

    def announce(self) -> None:
        """Pass on the events of what was committed, now that it is on disk."""
        self._ledger.announce()

    # ---- inside --------------------------------------------------------------------------------------------

    def _close_outdated(self, request: BeginRequest) -> None:
        """A client that begins with new code leaves short groups of the old behind: they wait for nobody any more."""
        if outdated := groups.outdated(self._ledger, self.job, request):
            with self.transaction():
                for group in outdated:
                    groups.close(self._ledger, self.job, group, self._clock())

    def _announce_code(self, episode: Episode) -> None:
        """The event that a code version came into use, with its first training episode."""
        tally = self.code_versions().get(episode.code_version)
        if tally is not None and tally.episodes == 1 and episode.mode == "train":
            self.emit("code_version", {"code_version": episode.code_version, "client_id": episode.client_id})

    def _up_to_date(self, episode_id: str) -> Episode:
        """The episode, expired when its time is over, whether or not anybody reaped."""
        episode = self.episode(episode_id)
        if episode.ended is None and self.expires_at(episode) <= self._clock():
            self.reap()
            episode = self.episode(episode_id)
        return episode

    def _live(self, episode_id: str) -> Episode:
        """The episode, if it still lives. Raises `Conflict` otherwise."""
        episode = self._undecided(episode_id)
        if episode.status == "live":
            return episode
        raise Conflict(
            f"Episode {episode_id} is prepared: it promised reward {episode.reward}, so it can only be finished with "
            "that, or aborted.",
            code="episode_prepared",
        )

    def _undecided(self, episode_id: str) -> Episode:
        """The episode, if it is live or prepared. Raises `Conflict` otherwise."""
        episode = self._up_to_date(episode_id)
        if episode.ended is None:
            return episode
        how = f"finished with reward {episode.reward}" if episode.status == "finished" else episode.status
        reason = f" ({episode.reason})" if episode.reason else ""
        raise Conflict(f"Episode {episode_id} has ended: {how}{reason}.", code=f"episode_{episode.status}")


def _counted(counts: Mapping[str, int], names: Sequence[str]) -> Mapping[str, int]:
    """The counts with one more of each name. Names beyond `MAX_NOTES` are counted as `others`."""
    counted = dict(counts)
    for name in names:
        key = name[:MAX_NAME]
        key = key if key in counted or len(counted) < MAX_NOTES else "others"
        counted[key] = counted.get(key, 0) + 1
    return counted


def _begin_scope(request: BeginRequest) -> str:
    """Of idempotency keys: every client has its own."""
    return f"begin/{request.client_id}"


def _scored(episode: Episode, request: FinishRequest, *, status: EpisodeStatus, ended: float | None = None) -> Episode:
    by_role, metrics = dict(request.by_role), dict(request.metrics)
    return replace(episode, status=status, ended=ended, reward=request.reward, by_role=by_role, metrics=metrics)


def _scored_so(episode: Episode, request: FinishRequest) -> bool:
    return (episode.reward, episode.by_role, episode.metrics) == (request.reward, request.by_role, request.metrics)
