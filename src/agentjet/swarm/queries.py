"""`Queries`: what there is to see of a swarm. It changes nothing; the verbs are `Learning`'s and `Swarm`'s.

Scores of policy versions on held-out tasks, as their clients report them. Each is one event of the journal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from agentjet.config import JobConfig
from agentjet.errors import InvalidRequest, NotFound
from agentjet.protocol import EvaluationRequest, EvaluationView, Event
from agentjet.swarm import batches, groups
from agentjet.swarm.groups import training_is_over
from agentjet.swarm.journal import Journal
from agentjet.swarm.journal_file import BRANCHED_FROM
from agentjet.swarm.leases import Leases
from agentjet.swarm.mixture import Mixture, places
from agentjet.swarm.records import Batch, Episode, Group, OutcomeCounts, TaskSetShare
from agentjet.swarm.state_store import Store
from agentjet.timeline.forks import OrphanReason
from agentjet.timeline.forks import orphans as find_orphans
from agentjet.timeline.tree import ConversationTree
from agentjet.types import Call, EpisodeStatus

SILENT_SECONDS = 20.0
"""Without a sign of life an episode is worth a word after so long."""


class Queries:
    """Episodes, groups, batches and counts, as they are now."""

    def __init__(self, journal: Journal, *, clock: Callable[[], float], stopwatch: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._ledger = Store(journal, clock)
        self._leases = Leases(clock, stopwatch)
        self._mixing = Mixture(self._ledger, clock)
        self._looked_at = (-1, -1)
        self._earliest: float | None = None
        """No deadline is before it, as of the revisions that were `_looked_at`."""

    # ---- episodes ------------------------------------------------------------------------------------------

    def episode(self, episode_id: str) -> Episode:
        """Any episode since the data dir was made. Raises `NotFound`."""
        episode = self._ledger.episodes.get(episode_id) or self._journal.episode(episode_id)
        if episode is None:
            raise NotFound(
                f"There is no episode {episode_id!r} in the run that this server serves now.", code="episode_not_found"
            )
        return episode

    def recent_episodes(
        self, limit: int, *, team: str = "", status: EpisodeStatus | None = None, before: str = ""
    ) -> list[Episode]:
        """The newest episodes, newest first: all, those of a team, those of a status, those begun `before` an episode.

        Raises `NotFound` when there is no episode `before`.
        """
        end = self.episode(before).seq if before else math.inf
        if status not in ("live", "prepared"):
            return self._journal.recent_episodes(limit, team=team, status=status, before=before)
        found = [e for e in self._ledger.undecided() if e.status == status and (not team or e.team == team)]
        found = [e for e in found if e.seq < end]
        return sorted(found, key=lambda episode: -episode.seq)[:limit]

    def expires_at(self, episode: Episode) -> float:
        """When a live episode is reclaimed unless it shows life, and a prepared one unless it is decided."""
        return self._leases.expires_at(episode, self.job)

    def trees(self, episode_id: str) -> dict[str, ConversationTree]:
        """An episode's conversations by role, as the journal has them; none once a durable checkpoint covers them."""
        return batches.load_trees(self._journal, episode_id)

    def calls(self, episode_id: str) -> list[Call]:
        """An episode's calls in the order they were recorded; none once a durable checkpoint covers them."""
        return [call for call, *_ in self._journal.calls(episode_id)]

    def orphans(self, episode_id: str) -> dict[str, OrphanReason]:
        """The episode's calls that nobody heard, and how that is known."""
        calls = [call for call, _, _ in self._journal.calls(episode_id)]
        return find_orphans(calls, self._journal.undelivered(episode_id))

    def next_deadline(self) -> float | None:
        """When `reap` next has something to do, as things stand."""
        deadlines = [self.expires_at(episode) for episode in self._ledger.undecided()]
        lease_epoch = self._leases.lease_epoch()
        patience = [
            groups.refill_deadline(self._ledger, self.job, g, lease_epoch) for g in self._ledger.groups.values()
        ]
        others = [*patience, self._mixing.next_deadline(self.job)]
        return min([*deadlines, *(deadline for deadline in others if deadline is not None)], default=None)

    def no_deadline_before(self) -> float | None:
        """A time that `next_deadline` is not before; None if there is no deadline. It looks at every lease only when
        something changed, or when the deadline that it found before has passed: a sign of life puts a deadline off.
        """
        self._leases.lease_epoch()
        revision = (self._ledger.revision, self._leases.revision)
        if revision != self._looked_at or (self._earliest is not None and self._earliest <= self._clock()):
            self._looked_at, self._earliest = revision, self.next_deadline()
        return self._earliest

    def is_due(self) -> bool:
        """True if `reap` has something to do now."""
        deadline = self.no_deadline_before()
        return deadline is not None and deadline <= self._clock()

    # ---- the job -------------------------------------------------------------------------------------------

    @property
    def job(self) -> JobConfig:
        """The settings in force. A batch keeps those it was composed with."""
        return self._ledger.settings.job

    @property
    def job_revision(self) -> int:
        """Which change of the settings made them what they are; counts from 1."""
        return self._ledger.settings.revision

    @property
    def branched_from(self) -> str:
        """`DATA_DIR@VERSION` of the run that this one began at; empty unless it is a branch."""
        return str(self._journal.origin.get(BRANCHED_FROM, ""))

    # ---- batches -------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the present batch has its groups and may be composed."""
        if self.pending is not None or self._pinned() or training_is_over(self._ledger, self.job):
            return False
        return self._mixing.chosen(self.job) is not None

    def _pinned(self) -> int:
        """How many live evaluation episodes need the policy as it is."""
        return sum(episode.at_version is not None for episode in self._ledger.live())

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
    def recent_steps(self) -> Sequence[Mapping[str, float]]:
        """Metrics of the newest learned batches, at most 50, the newest last."""
        return tuple(self._ledger.recent_steps)

    @property
    def last_batch(self) -> Batch | None:
        """The newest learned batch; None before the first."""
        return next(iter(self._journal.batches(self.policy_version - 1)), None) if self.last_step else None

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

    @property
    def places_left(self) -> int:
        """Training groups that may be begun now."""
        job = self.job
        if training_is_over(self._ledger, job) or (self.pending is not None and not job.max_staleness):
            return 0
        return max(0, places(self._ledger, job) - len(self._ledger.groups))

    # ---- the whole -----------------------------------------------------------------------------------------

    def status_counts(self) -> dict[str, int]:
        """Episodes since the data dir was made: `live`, `prepared`, `finished`, `aborted`, `expired`; of the finished:

        `trained`, `waiting`, `dropped`.
        """
        return self._ledger.counts()

    def code_versions(self) -> dict[str, OutcomeCounts]:
        """What became of the training episodes of each version of the agents' code; those last in use, newest last."""
        return self._ledger.code_versions.tallies

    def task_sets(self) -> dict[str, TaskSetShare]:
        """The task sets that share the batches, by name."""
        return self._mixing.shares(self.job)

    def clients(self) -> dict[str, float]:
        """When each client was last seen; the most recent ones only."""
        return dict(self._leases.clients)

    def holding(self) -> dict[str, int]:
        """How many live episodes each client holds."""
        return dict(Counter(episode.client_id for episode in self._ledger.live()))

    def num_undecided(self, client_id: str) -> int:
        """How many live and prepared episodes a client has."""
        return sum(episode.client_id == client_id for episode in self._ledger.undecided())

    def waiting_for(self) -> str:
        """In words: what training waits for."""
        if self.pending is not None:
            return f"the worker, to learn batch {self.pending.id}"
        if training_is_over(self._ledger, self.job):
            return f"nothing: job.max_steps = {self.job.max_steps} is reached"
        pinned = self._pinned()
        if pinned and self._mixing.chosen(self.job) is not None:
            return f"{pinned} evaluation episodes pinned to policy version {self.policy_version}"
        if not self._ledger.groups:
            return "clients, to begin training episodes"
        live = sum(episode.group_id is not None for episode in self._ledger.live())
        refills = groups.missing_refills(self._ledger, self.job, self._leases.lease_epoch(), self._clock())
        rewards = ["rewards"] if any(episode.group_id is not None for episode in self._ledger.undecided()) else []
        for_whom = " and ".join([*rewards, *([refills] if refills else [])]) or "clients, to begin training episodes"
        if sets := self._mixing.waiting_for(self.job):
            for_whom += f" of {sets}"
        return (
            f"{for_whom}: {self.groups_complete} of {self.job.batch_size} groups are complete, "
            f"{self.groups_open} open, {live} episodes live{self._silent()}"
        )

    def _silent(self) -> str:
        """In words: the live training episode that showed no life for longest, if that is long."""
        lively = [episode for episode in self._ledger.live() if episode.group_id is not None]
        if not lively:
            return ""
        oldest = min(lively, key=self.expires_at)
        left = self.expires_at(oldest) - self._clock()
        if left > self.job.lease_seconds - SILENT_SECONDS:
            return ""
        return f"; the longest silent one, of client {oldest.client_id}, is reclaimed in {max(0.0, left):.0f} s"

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """The oldest `limit` events numbered above `after`."""
        return self._journal.events(after, limit)


KIND = "evaluation"


def record_evaluation(ledger: Store, request: EvaluationRequest, idempotency_key: str | None) -> None:
    """Journal an evaluation, once per key. Raises `InvalidRequest` for a version that was not learned yet."""
    scope = f"evaluation/{request.client_id}"
    if ledger.recall(scope, idempotency_key, request) is not None:
        return
    if request.policy_version > ledger.policy_version:
        raise InvalidRequest(
            f"policy_version = {request.policy_version}: the policy is at version {ledger.policy_version}; report the "
            "version that was evaluated",
            code="version_unknown",
            status=422,
            param="policy_version",
        )
    with ledger.transaction():
        ledger.emit(KIND, request.model_dump())
        ledger.remember(scope, idempotency_key, request, str(request.policy_version))


def list_evaluations(journal: Journal) -> list[EvaluationView]:
    """All recorded evaluations, in the order they came."""
    events = journal.events_of(KIND)
    scores = [event.body["score"] for event in events]
    best = scores.index(max(scores)) if scores else -1
    return [EvaluationView(**event.body, time=event.time, best=number == best) for number, event in enumerate(events)]
