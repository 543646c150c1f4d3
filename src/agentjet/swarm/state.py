"""`Swarm`: the rules of episodes, groups and batches.

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

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from agentjet.config import JobConfig
from agentjet.errors import CheckpointError, Conflict, Later, NotFound
from agentjet.protocol import AbortRequest, BeginRequest, Event, FinishRequest
from agentjet.swarm import batches, groups
from agentjet.swarm.endings import STALE, SURPLUS, Endings, announce
from agentjet.swarm.journal import Journal
from agentjet.swarm.leases import Leases
from agentjet.swarm.ledger import Ledger
from agentjet.swarm.records import Batch, Episode, Group
from agentjet.timeline.forest import Forest
from agentjet.timeline.forks import OrphanReason
from agentjet.timeline.tree import ConversationTree
from agentjet.types import Call


class Swarm:
    """Episodes, groups and batches of one policy. Synchronous; one thread at a time.

    Set `job` to change the settings from here on; a batch keeps those it was composed with.
    """

    def __init__(
        self, journal: Journal, job: JobConfig, *, clock: Callable[[], float] = time.time, policy_version: int = 0
    ) -> None:
        """`policy_version` is where an empty journal starts; one with history knows its own."""
        if policy_version and journal.is_empty():
            journal.set_base_version(policy_version)
        self.job = job
        self._journal = journal
        self._clock = clock
        self._ledger = Ledger(journal, clock)
        self._leases = Leases(clock)
        self._endings = Endings(self._ledger, self._leases)
        self._forest_metrics: dict[int, dict[str, float]] = {}

    # ---- episodes ------------------------------------------------------------------------------------------

    def begin(self, request: BeginRequest, *, idempotency_key: str | None = None) -> Episode:
        """Start an episode.

        Raises `Later` (`not_rolling`, `batch_full`, `group_full`) when the present batch needs none, `Conflict`
        (`group_closed`) when it was to join a group and there is none.
        """
        scope = f"begin/{request.client_id}"
        known = self._ledger.recall(scope, idempotency_key, request)
        if known is not None:
            return self.episode(known)
        self.reap()
        now = self._clock()
        group = groups.admit(self._ledger, self.job, request, now) if request.mode == "train" else None
        seq = self._journal.next_episode_seq()
        with self.transaction():
            episode = Episode(
                id=f"ep{seq:06d}",
                seq=seq,
                client_id=request.client_id,
                task_id=request.task_id,
                task_set=request.task_set,
                group=groups.group_name(request),
                group_id=None if group is None else group.id,
                mode=request.mode,
                policy_version=self.policy_version,
                begun=now,
            )
            if group is not None:
                groups.join(self._ledger, group, episode)
            self._journal.add_episode(episode)
            self._ledger.put(episode)
            self._ledger.remember(scope, idempotency_key, request, episode.id)
            announce(self._ledger, episode)
        self._leases.touch(episode)
        return episode

    def heartbeat(self, episode_id: str) -> Episode:
        """Renew the lease. Raises `Conflict` when the episode has ended: its code tells how."""
        episode = self._live(episode_id)
        self._leases.touch(episode)
        return episode

    def finish(self, episode_id: str, request: FinishRequest, *, idempotency_key: str | None = None) -> Episode:
        """End an episode with its reward. The same reward again gives the same answer.

        Raises `Conflict`: `episode_expired`, `episode_aborted`, or `episode_finished` when it ended with another
        reward.
        """
        scope = f"finish/{episode_id}"
        if self._ledger.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self._up_to_date(episode_id)
        asked = (request.reward, request.by_role, request.metrics)
        if episode.status == "finished" and asked == (episode.reward, episode.by_role, episode.metrics):
            return episode
        episode = self._live(episode_id)
        now = self._clock()
        with self.transaction():
            reward, by_role, metrics = asked
            episode = replace(
                episode, status="finished", ended=now, reward=reward, by_role=dict(by_role), metrics=dict(metrics)
            )
            self._journal.add_finish(episode)
            self._ledger.put(episode)
            self._ledger.remember(scope, idempotency_key, request, episode_id)
            groups.member_finished(self._ledger, episode, now)
            self._endings.ended(episode)
            group = groups.satisfied(self._ledger, self.job, episode)
            if group is not None:
                self._endings.end_members(group, SURPLUS, now)
                groups.close(self._ledger, self.job, self._ledger.groups[group.id], now)
        return self.episode(episode_id)

    def abort(self, episode_id: str, request: AbortRequest, *, idempotency_key: str | None = None) -> Episode:
        """End an episode that failed: it is never scored, and its place is free again.

        One that ended unscored already is returned as it is. Raises `Conflict` (`episode_finished`) on a scored one.
        """
        scope = f"abort/{episode_id}"
        if self._ledger.recall(scope, idempotency_key, request) is not None:
            return self.episode(episode_id)
        episode = self._up_to_date(episode_id)
        if episode.status in ("aborted", "expired"):
            return episode
        episode = self._live(episode_id)
        with self.transaction():
            self._ledger.remember(scope, idempotency_key, request, episode_id)
            return self._endings.lose(replace(episode, status="aborted", ended=self._clock(), reason=request.reason))

    def episode(self, episode_id: str) -> Episode:
        """Any episode since the data dir was made. Raises `NotFound`."""
        episode = self._ledger.episodes.get(episode_id) or self._journal.episode(episode_id)
        if episode is None:
            raise NotFound(f"There is no episode {episode_id!r} here.", code="episode_not_found")
        return episode

    def recent_episodes(self, limit: int) -> list[Episode]:
        """The newest episodes, newest first."""
        return self._journal.recent_episodes(limit)

    def expires_at(self, episode: Episode) -> float:
        """When a live episode is reclaimed unless it shows life."""
        return self._leases.expires_at(episode, self.job)

    # ---- calls ---------------------------------------------------------------------------------------------

    @contextmanager
    def calling(self, episode_id: str) -> Iterator[Episode]:
        """While a call is held or sampled its lease stands still: the server's slowness is not the agent's silence.

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
            self._ledger.put(
                replace(episode, num_calls=episode.num_calls + 1, num_tokens=episode.num_tokens + len(call.completion))
            )
            if call.versions:
                oldest = self._ledger.oldest.get(episode.id, call.versions[0])
                self._ledger.oldest[episode.id] = min(oldest, call.versions[0])
            tree.add(call, encoded_suffix, encoded_completion)
        self._leases.touch(episode)

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

    def trees(self, episode_id: str) -> dict[str, ConversationTree]:
        """An episode's conversations by role, as the journal has them; none once a durable checkpoint covers them."""
        return batches.load_trees(self._journal, episode_id)

    def orphans(self, episode_id: str) -> dict[str, OrphanReason]:
        """The episode's calls that nobody heard, and how that is known."""
        return batches.find_orphans(self._journal, episode_id, self.trees(episode_id))

    # ---- time ----------------------------------------------------------------------------------------------

    def reap(self) -> list[Episode]:
        """Expire what outlived its lease or its maximum, close short groups nobody refills; returns the expired."""
        now = self._clock()
        with self.transaction():
            expired = [self._endings.expire(e, self.job, now) for e in self._ledger.live() if self.expires_at(e) <= now]
            for group in list(self._ledger.groups.values()):
                deadline = groups.patience_ends(self._ledger, self.job, group, self._leases.opened)
                if deadline is not None and deadline <= now:
                    groups.close(self._ledger, self.job, group, now)
        return expired

    def next_deadline(self) -> float | None:
        """When `reap` next has something to do, as things stand."""
        deadlines = [self.expires_at(episode) for episode in self._ledger.live()]
        patience = [
            groups.patience_ends(self._ledger, self.job, g, self._leases.opened) for g in self._ledger.groups.values()
        ]
        return min([*deadlines, *(deadline for deadline in patience if deadline is not None)], default=None)

    # ---- batches -------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the present batch has its groups and may be composed."""
        return (
            self.pending is None
            and not groups.trained_out(self._ledger, self.job)
            and self.groups_complete >= self.job.batch_size
        )

    def compose(self) -> Batch:
        """Commit the next batch, its members, their order, its seed and its settings, before any of it is learned."""
        assert self.ready(), "compose() pairs with ready()"
        complete = [group for group in self._ledger.groups.values() if group.state == "complete"]
        chosen = sorted(complete, key=lambda group: (group.closed, group.id))[: self.job.batch_size]
        batch = Batch(
            id=self.policy_version,
            groups=tuple(group.members for group in chosen),
            seed=_batch_seed(self.job.seed, self.policy_version),
            job=self.job,
            composed=self._clock(),
        )
        with self.transaction():
            self._journal.add_batch(batch, [group.id for group in chosen])
            for group in chosen:
                del self._ledger.groups[group.id]
            self._ledger.pending = batch
            if not self.job.max_staleness:
                self._endings.clear(list(self._ledger.groups.values()), "surplus", SURPLUS, batch.composed)
        return batch

    def forest(self, batch: Batch) -> Forest:
        """The batch as prefix trees with advantages, from the journal alone: a replay sees the same bytes.

        Raises `CheckpointError` when a durable checkpoint has covered the batch and its tokens were pruned.
        """
        self._check_reach(batch.id)
        members = {episode_id: self.episode(episode_id) for episode_id in batch.episode_ids}
        forest, counts = batches.build(self._journal, batch, members)
        self._forest_metrics = {batch.id: {**batches.forest_metrics(batch, forest), **counts}}
        return forest

    def learned(self, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record that `batch` took the policy to version `batch.id + 1`; returns all its metrics.

        A replayed batch changes nothing.
        """
        if batch.id < self.policy_version:
            return self._journal.step(batch.id)
        assert self.pending is not None and batch.id == self.pending.id, "batches are learned in order"
        members = [self._ledger.episodes[episode_id] for episode_id in batch.episode_ids]
        merged = {
            **batches.episode_metrics(members),
            **batches.loss_metrics(self._journal.dropped_groups(batch.id), self._journal.lost_episodes(batch.id)),
            **self._forest_metrics.get(batch.id, {}),
            **metrics,
        }
        with self.transaction():
            self._journal.add_step(batch.id, merged, self._clock())
            self._ledger.policy_version = batch.id + 1
            self._ledger.pending = None
            self._ledger.last_step = merged
            for episode in members:
                self._ledger.put(replace(episode, trained_in=batch.id))
            self._endings.clear(groups.stale(self._ledger, self.job), "stale", STALE, self._clock())
            self.emit("step", {"policy_version": batch.id + 1, "metrics": merged})
        return merged

    def set_aside(self, batch: Batch, reason: str) -> None:
        """Give the pending batch up: its groups are dropped as `poisoned`, counted with the next batch that is learned.

        For a batch that kills every worker that tries it, so that it does not end the training with them.
        """
        assert self.pending is not None and batch.id == self.pending.id, "only the pending batch can be set aside"
        now, members = self._clock(), set(batch.episode_ids)
        with self.transaction():
            self._journal.remove_batch(batch.id)
            self._ledger.pending = None
            for group in self._journal.unlearned_groups():
                if members & set(group.members):
                    groups.drop(self._ledger, group, "poisoned", now)
            self.emit("batch", {"batch": batch.id, "state": "set_aside", "reason": reason, "episodes": sorted(members)})

    def checkpointed(self, policy_version: int) -> None:
        """Checkpoints from `policy_version` on are durable: what only earlier ones would replay is pruned.

        Pass the *oldest* checkpoint still kept, so that recovery can fall back to it.
        """
        if policy_version > self._journal.durable_version():
            with self.transaction():
                self._journal.prune(policy_version, self._clock())

    def batches_from(self, policy_version: int) -> list[Batch]:
        """What a worker that stands at `policy_version` has yet to learn, in order, the pending batch included.

        Raises `CheckpointError` when the journal no longer reaches back so far.
        """
        self._check_reach(policy_version)
        return self._journal.batches(policy_version)

    def resume(self, policy_version: int) -> list[Batch]:
        """A worker was restored to `policy_version`: returns the batches to replay. An empty journal starts there.

        Raises `CheckpointError` when the journal does not reach back so far, or not up to it.
        """
        if policy_version > self.policy_version and self._journal.is_empty():
            with self.transaction():
                self._journal.set_base_version(policy_version)
                self._ledger.policy_version = policy_version
        if policy_version > self.policy_version:
            raise CheckpointError(
                f"The checkpoint is of policy version {policy_version}, but the journal ends at {self.policy_version}: "
                "they belong to different runs. Restore the journal that goes with it, or take a new server.data_dir."
            )
        return self.batches_from(policy_version)

    # ---- what others may know ------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._ledger.policy_version

    @property
    def pending(self) -> Batch | None:
        """The batch that is composed and not yet learned."""
        return self._ledger.pending

    @property
    def last_step(self) -> dict[str, float]:
        """Metrics of the newest learned batch."""
        return self._ledger.last_step

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that fill the present batch, open and complete, in the order they were opened."""
        return tuple(sorted(self._ledger.groups.values(), key=lambda group: group.id))

    @property
    def groups_open(self) -> int:
        return sum(group.state == "open" for group in self._ledger.groups.values())

    @property
    def groups_complete(self) -> int:
        return sum(group.state == "complete" for group in self._ledger.groups.values())

    def status_counts(self) -> dict[str, int]:
        """Episodes since the data dir was made: `live`, `finished`, `aborted`, `expired`; of the finished:

        `trained`, `waiting`, `dropped`.
        """
        return self._ledger.counts()

    def saw(self, client_id: str) -> None:
        """A client showed life, whether or not it gets an episode."""
        self._leases.saw(client_id)

    def clients(self) -> dict[str, float]:
        """When each client was last seen; the most recent ones only."""
        return dict(self._leases.clients)

    def holding(self) -> dict[str, int]:
        """How many live episodes each client holds."""
        return dict(Counter(episode.client_id for episode in self._ledger.live()))

    def waiting_for(self) -> str:
        """In words: what training waits for."""
        if self.pending is not None:
            return f"the worker, to learn batch {self.pending.id}"
        if groups.trained_out(self._ledger, self.job):
            return f"nothing: job.max_steps = {self.job.max_steps} is reached"
        if not self._ledger.groups:
            return "clients, to begin training episodes"
        live = sum(episode.group_id is not None for episode in self._ledger.live())
        refills = groups.missing_refills(self._ledger, self.job, self._leases.opened, self._clock())
        for_whom = " and ".join((["rewards"] if live or not refills else []) + ([refills] if refills else []))
        return (
            f"{for_whom}: {self.groups_complete} of {self.job.batch_size} groups are complete, "
            f"{self.groups_open} open, {live} episodes live"
        )

    def emit(self, kind: str, body: Mapping[str, Any]) -> None:
        """Journal an event and pass it to `on_event` once it is on disk."""
        self._ledger.emit(kind, body)

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """The oldest `limit` events numbered above `after`."""
        return self._journal.events(after, limit)

    @property
    def on_event(self) -> Callable[[Event], None] | None:
        """Called with each event after it is on disk."""
        return self._ledger.on_event

    @on_event.setter
    def on_event(self, listener: Callable[[Event], None] | None) -> None:
        self._ledger.on_event = listener

    def transaction(self) -> AbstractContextManager[None]:
        """Group several changes into one. When it fails nothing of it happened, in memory neither."""
        return self._ledger.transaction()

    def commit_together(self, on_uncommitted: Callable[[], None]) -> None:
        """From here on changes are on disk with the next `commit` only, which may serve many at once.

        `on_uncommitted` is called when there is something to commit. Whoever acknowledges a change must commit first.
        """
        self._journal.commits_itself = False
        self._ledger.on_uncommitted = on_uncommitted

    @property
    def has_uncommitted(self) -> bool:
        return self._journal.has_uncommitted

    def commit(self) -> None:
        """Have every change on disk. Raises `Later` when the disk refuses: then nothing since the last happened."""
        self._ledger.commit()

    # ---- inside --------------------------------------------------------------------------------------------

    def _up_to_date(self, episode_id: str) -> Episode:
        """The episode, expired when its time is over, whether or not anybody reaped."""
        episode = self.episode(episode_id)
        if episode.status == "live" and self.expires_at(episode) <= self._clock():
            self.reap()
            episode = self.episode(episode_id)
        return episode

    def _live(self, episode_id: str) -> Episode:
        """The episode, if it still lives. Raises `Conflict` otherwise."""
        episode = self._up_to_date(episode_id)
        if episode.status == "live":
            return episode
        how = f"finished with reward {episode.reward}" if episode.status == "finished" else episode.status
        reason = f" ({episode.reason})" if episode.reason else ""
        raise Conflict(f"Episode {episode_id} has ended: {how}{reason}.", code=f"episode_{episode.status}")

    def _check_reach(self, policy_version: int) -> None:
        durable = self._journal.durable_version()
        if policy_version < durable:
            raise CheckpointError(
                f"The journal cannot replay from policy version {policy_version}: batches before {durable} were "
                f"pruned: the checkpoint of version {durable} covers them. Restore that one or a newer one."
            )


def _batch_seed(job_seed: int, batch_id: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{job_seed}/{batch_id}".encode()).digest()[:4], "big") >> 1
