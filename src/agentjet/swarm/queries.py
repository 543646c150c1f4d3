"""`Queries`: read-only views of a run. Nothing here changes state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from agentjet.protocol import EvaluationView, Event, TaskSetStatus
from agentjet.swarm import batch_forest, groups
from agentjet.swarm.mixture import Mixture, places
from agentjet.swarm.origin import BRANCHED_FROM
from agentjet.swarm.state import Batch, Episode, Group, OutcomeCounts
from agentjet.swarm.store import Leases, Store
from agentjet.timeline.tree import ConversationTree, OrphanReason
from agentjet.timeline.tree import orphans as find_orphans
from agentjet.types import Call, EpisodeStatus

SILENT_SECONDS = 20.0
"""`waiting_for` names an episode after so long without activity."""


class Queries:
    """Episodes, groups, batches and counts as they are now."""

    def __init__(self, store: Store, leases: Leases, mixture: Mixture, clock: Callable[[], float]) -> None:
        self._store = store
        self._journal = store.journal
        self._leases = leases
        self._mixture = mixture
        self._clock = clock

    # ---- episodes ------------------------------------------------------------------------------------------

    def recent_episodes(self, limit: int, *, status: EpisodeStatus | None = None, before: str = "") -> list[Episode]:
        """See `Store.recent_episodes`."""
        return self._store.recent_episodes(limit, status=status, before=before)

    def trees(self, episode_id: str) -> dict[str, ConversationTree]:
        """An episode's conversations by role, from the journal; none once a durable checkpoint covers them."""
        return batch_forest.load_trees(self._journal, episode_id)

    def calls(self, episode_id: str) -> list[Call]:
        """An episode's calls in the order they were recorded; none once a durable checkpoint covers them."""
        return [call for call, *_ in self._journal.calls(episode_id)]

    def orphans(self, episode_id: str) -> dict[str, OrphanReason]:
        """The episode's calls that are not trained, with the reason."""
        return find_orphans(self.calls(episode_id), self._journal.undelivered(episode_id))

    # ---- groups and batches --------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that fill the present batch, open and complete, in the order they were opened."""
        return tuple(self._store.groups.values())

    def num_groups(self, state: str) -> int:
        """Number of groups that are `open` or `complete`."""
        return sum(group.state == state for group in self._store.groups.values())

    def group_size(self, episode: Episode) -> int:
        """Number of finished episodes that complete its group; 0 for eval episodes."""
        if episode.group_id is None:
            return 0
        group = self._store.groups.get(episode.group_id)
        return self._store.job.group_size if group is None else groups.size(self._store, group)

    @property
    def places_left(self) -> int:
        """Number of training groups that may be begun now."""
        store = self._store
        if groups.training_is_over(store) or (store.pending is not None and not store.job.max_staleness):
            return 0
        return max(0, places(store) - len(store.groups))

    @property
    def recent_steps(self) -> Sequence[Mapping[str, float]]:
        """Metrics of the newest learned batches, at most 50, the newest last."""
        return [*self._store.steps.values()]

    @property
    def last_batch(self) -> Batch | None:
        """The newest learned batch; None before the first."""
        version = self._store.policy_version
        return next(iter(self._journal.batches(version - 1, version)), None)

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def branched_from(self) -> str:
        """`DATA_DIR@VERSION` of the run that this one began at; empty unless it is a branch."""
        return str(self._journal.origin.get(BRANCHED_FROM, ""))

    def status_counts(self) -> dict[str, int]:
        """Episodes since the data dir was made: `live`, `finished`, `aborted`, `expired`; of the finished: `trained`,
        `waiting`, `dropped`.
        """
        return dict(self._store.state.counts)

    def dropped(self) -> dict[str, int]:
        """The `dropped` ones of `status_counts`, by reason."""
        return dict(self._store.state.dropped)

    def code_versions(self) -> dict[str, OutcomeCounts]:
        """Outcomes of training episodes by version of the agent's code; the last used versions, the newest last."""
        return dict(self._store.state.code_versions)

    def task_sets(self) -> dict[str, TaskSetStatus]:
        """The task sets that share the batches, by name."""
        return self._mixture.shares()

    def clients(self) -> dict[str, float]:
        """Time of the last activity of each client; the most recent ones only."""
        return dict(self._leases.clients)

    def holding(self) -> dict[str, int]:
        """Number of live episodes of each client."""
        return dict(Counter(episode.client_id for episode in self._store.live()))

    def evaluations(self) -> list[EvaluationView]:
        """All recorded evaluations, the oldest first."""
        events = self._journal.events_of("evaluation")
        scores = [event.body["score"] for event in events]
        best = scores.index(max(scores)) if scores else -1
        return [EvaluationView(**event.body, time=event.time, best=n == best) for n, event in enumerate(events)]

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """The oldest `limit` events numbered above `after`."""
        return self._journal.events(after, limit)

    def waiting_for(self) -> str:
        """A phrase for the thing that training waits for."""
        store, job = self._store, self._store.job
        if store.pending is not None:
            return f"the worker, to learn batch {store.pending.id}"
        if groups.training_is_over(store):
            return f"nothing: job.max_steps = {job.max_steps} is reached"
        pinned = store.num_pinned()
        if pinned and self._mixture.chosen() is not None:
            return f"{pinned} evaluation episodes pinned to policy version {store.policy_version}"
        if not store.groups:
            return "clients, to begin training episodes"
        live = sum(episode.group_id is not None for episode in store.live())
        rewards = ["rewards"] if live else []
        refills = groups.missing_members(store, self._leases.lease_epoch(), self._clock())
        wanted = " and ".join([*rewards, *([refills] if refills else [])]) or "clients, to begin training episodes"
        if sets := self._mixture.waiting_for():
            wanted += f" of {sets}"
        return (
            f"{wanted}: {self.num_groups('complete')} of {job.batch_size} groups are complete, "
            f"{self.num_groups('open')} open, {live} episodes live{self._silent()}"
        )

    def _silent(self) -> str:
        """A phrase for the live training episode without activity for longest, if that is long."""
        live = [episode for episode in self._store.live() if episode.group_id is not None]
        if not live:
            return ""
        oldest = min(live, key=lambda episode: self._leases.expires_at(episode, self._store.job))
        left = self._leases.expires_at(oldest, self._store.job) - self._clock()
        if left > self._store.job.lease_seconds - SILENT_SECONDS:
            return ""
        return f"; the longest silent one, of client {oldest.client_id}, is reclaimed in {max(0.0, left):.0f} s"
