"""`Queries`: read-only views of a run. Nothing here changes state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from agentjet.config import JobConfig
from agentjet.errors import ConfigError
from agentjet.protocol import EvaluationView, Event, PlacesStatus, TaskSetStatus, duration
from agentjet.swarm import batch_forest, groups
from agentjet.swarm.journal import Journal
from agentjet.swarm.mixture import Mixture, places
from agentjet.swarm.origin import BRANCHED_FROM, policies_of
from agentjet.swarm.places import Places
from agentjet.swarm.state import EpisodeRecord, Group, JobSettings, OutcomeCounts
from agentjet.swarm.store import Leases, Store
from agentjet.timeline.tree import ConversationTree, OrphanReason
from agentjet.timeline.tree import orphans as find_orphans
from agentjet.types import Call

SILENT_SECONDS = 20.0
"""`waiting_for` names an episode after so long without a call."""
GONE_SECONDS = 30.0
"""Seconds without a call or a heartbeat from which a client may be gone."""
FIRST_STEPS = 10
"""Steps that are the beginning of a run."""


def is_gone(unheard: float, lease_seconds: float) -> bool:
    """True if the client of an episode is gone: it sends several heartbeats within a lease. `unheard` is the number of
    seconds since a call or a heartbeat.
    """
    return unheard >= max(GONE_SECONDS, lease_seconds / 2)


class Refill(NamedTuple):
    """The groups of the present batch that lost members and wait for other ones, without a live one."""

    num_groups: int
    client_id: str
    """The client of the group that closes first."""
    seconds: float
    """Until that group closes."""


class Silence(NamedTuple):
    """Silence of a live episode, in seconds."""

    seconds: float
    """Since its last call; 0 during a call."""
    expires_in: float
    """Until it ends without a reward, unless its client shows activity."""
    ends_in: float
    """Until `job.max_episode_seconds` ends it."""
    unheard: float
    """Since a call or a heartbeat of it."""

    def cause(self, job: JobConfig) -> str:
        """A phrase for the likely cause."""
        if is_gone(self.unheard, job.lease_seconds):
            return f"its client is gone: no heartbeat for {duration(self.unheard)}"
        return "does a tool hang?"


class Queries:
    """Episodes, groups, batches and counts as they are now."""

    def __init__(
        self, store: Store, leases: Leases, mixture: Mixture, held: Places, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._journal = store.journal
        self._leases = leases
        self._mixture = mixture
        self._held = held
        self._clock = clock

    @classmethod
    def recorded(cls, journal: Journal, clock: Callable[[], float]) -> Self:
        """The queries of a run whose server does not run here. The journal may be read-only. Leases are unknown.

        Raises `ConfigError` if the job settings can no longer be read, or if the run never started.
        """
        store = Store(journal, clock, policies_of(journal.origin))
        if store.settings is None:
            raise ConfigError(f"{journal.path} is empty: its server never started")
        leases, mixture = Leases(clock, lambda: 0.0), Mixture(store, clock)
        return cls(store, leases, mixture, Places(store, leases, mixture, clock), clock)

    # ---- episodes ------------------------------------------------------------------------------------------

    def episode(self, episode_id: str) -> EpisodeRecord:
        """Any episode that the journal keeps. Raises `NotFound`."""
        return self._store.episode(episode_id)

    def live(self) -> list[EpisodeRecord]:
        """The live episodes, in the order they began."""
        return self._store.live()

    def trees(self, episode_id: str) -> dict[str, ConversationTree]:
        """An episode's conversations by role, from the journal; none once a durable checkpoint covers them."""
        return batch_forest.load_trees(self._journal, episode_id)

    def calls(self, episode_id: str) -> list[Call]:
        """An episode's calls in the order they were recorded; none once a durable checkpoint covers them."""
        return [call for call, *_ in self._journal.calls(episode_id)]

    def orphans(self, episode_id: str) -> dict[str, OrphanReason]:
        """The episode's calls that are not trained, with the reason."""
        return find_orphans(self._journal.call_facts(episode_id), self._journal.undelivered(episode_id))

    # ---- groups and batches --------------------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that fill the present batch, in the order they were opened."""
        return tuple(self._store.groups.values())

    def num_groups(self, state: str) -> int:
        """Number of groups that are `open`, `closing` or `complete`."""
        return sum(group.state == state for group in self._store.groups.values())

    def group_size(self, episode: EpisodeRecord) -> int:
        """Number of finished episodes that complete its group; 0 for eval episodes."""
        if episode.group_id is None:
            return 0
        group = self._store.groups.get(episode.group_id)
        return self._store.job.group_size if group is None else groups.size(self._store, group)

    def members(self, group: Group) -> list[EpisodeRecord]:
        """The live and finished members of a group of the present batch, in the order they began."""
        return [self._store.episodes[member] for member in group.members]

    def size(self, group: Group) -> int:
        """Number of finished members that complete a group of the present batch."""
        return groups.size(self._store, group)

    def silence(self, episode: EpisodeRecord) -> Silence:
        """The silence of a live episode, and the times at which it ends."""
        job, now = self._store.job, self._clock()
        left = self._leases.expires_at(episode, job) - now
        last = episode.begun + job.max_episode_seconds - now
        silent = self._leases.silent_seconds(episode)
        return Silence(silent, max(0.0, left), max(0.0, last), self._leases.unheard_seconds(episode))

    def most_silent(self) -> EpisodeRecord | None:
        """The live training episode whose last call is the oldest."""
        live = [episode for episode in self._store.live() if episode.group_id is not None]
        return max(live, key=self._leases.silent_seconds, default=None)

    def refill(self) -> Refill | None:
        """The groups of the present batch that lost members and have no live one; None without any."""
        short = groups.short_groups(self._store, self._leases.epoch)
        if not short:
            return None
        deadline, first = short[0]
        return Refill(len(short), first.client_id, max(0.0, deadline - self._clock()))

    @property
    def num_lost(self) -> int:
        """Number of aborted and expired episodes while the present batch was filled, without those not needed."""
        lost = self._journal.counts("lost_episodes", self._store.next_batch)
        return lost.get("aborted", 0) + lost.get("expired", 0)

    @property
    def is_over(self) -> bool:
        """True if `job.max_steps` is reached."""
        return groups.training_is_over(self._store)

    @property
    def ends_at_version(self) -> int:
        """The policy version at which training ends; 0 if unknown."""
        return self.settings.job.max_steps or self._leases.ends_at_version()

    @property
    def places(self) -> int:
        """Number of training groups that may be open or complete at a time."""
        return places(self._store)

    @property
    def places_left(self) -> int:
        """Number of training groups that may be begun now. Negative if clients opened some in place of silent ones."""
        store = self._store
        if groups.training_is_over(store) or (store.pending is not None and not store.job.max_staleness):
            return 0
        return places(store) - len(store.groups)

    @property
    def recent_steps(self) -> Sequence[Mapping[str, float]]:
        """Metrics of the newest learned batches, at most 50, the newest last."""
        return [*self._store.steps.values()]

    @property
    def step_versions(self) -> Sequence[int]:
        """The policy version after each of `recent_steps`. A rollback leaves a gap."""
        return [batch_id + 1 for batch_id in self._store.steps]

    # ---- the run -------------------------------------------------------------------------------------------

    @property
    def settings(self) -> JobSettings:
        """The job settings in force, with their revision."""
        settings = self._store.settings
        assert settings is not None, "job settings are stored before they are used"
        return settings

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that the settings name."""
        return self._store.policies

    @property
    def policy_version(self) -> int:
        return self._store.policy_version

    @property
    def last_step(self) -> Mapping[str, float]:
        """Metrics of the newest learned batch; empty if this run did not learn it."""
        return self._store.steps.get(self.policy_version - 1, {})

    @property
    def branched_from(self) -> str:
        """`DATA_DIR@VERSION` of the run that this one began at; empty unless it is a branch."""
        return str(self._journal.origin.get(BRANCHED_FROM, ""))

    def status_counts(self) -> dict[str, int]:
        """Episodes since the data dir was made: `live`, `finished`, `aborted`, `expired`, `not_needed`; and of the
        finished `trained`, `waiting`, `dropped`.
        """
        return self._journal.outcomes()

    def dropped(self) -> dict[str, int]:
        """The `dropped` ones of `status_counts`, by reason."""
        return self._journal.counts("dropped")

    def code_versions(self) -> dict[str, OutcomeCounts]:
        """Outcomes of training episodes by version of the agent's code; the last used versions, the newest last."""
        return self._journal.code_versions()

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
        return self._journal.evaluations()

    def events(self, after: int = 0, limit: int = 1000) -> list[Event]:
        """The oldest `limit` events numbered above `after`."""
        return self._journal.events(after, limit)

    def event_kinds(self, after: int, last: int) -> Mapping[str, int]:
        """Number of events of each kind above `after`, up to `last`; of the oldest 1,000 only."""
        return self._journal.event_kinds(after, last, 1000)

    def waiting_for(self, *, names_silent: bool = True) -> str:
        """A phrase for the thing that training waits for, which names the episode that is silent for long."""
        store, job = self._store, self._store.job
        if store.pending is not None:
            return f"the worker, to learn batch {store.pending.id}"
        if groups.training_is_over(store):
            return f"nothing: job.max_steps = {job.max_steps} is reached"
        pinned = store.num_pinned()
        if pinned and self._mixture.chosen() is not None:
            return f"{pinned} evaluation episodes pinned to policy version {store.policy_version}"
        if not store.groups:
            running = sum(episode.mode == "eval" for episode in store.live())
            return "clients, to begin training episodes" + (f"; {running} evaluation episodes run" if running else "")
        live = sum(episode.group_id is not None for episode in store.live())
        rewards = ["rewards"] if live else []
        closing = self.num_groups("closing")
        rewards += ["`accept` of the recipe"] if closing else []
        refills = groups.missing_members(store, self._leases.epoch, self._clock())
        wanted = " and ".join([*rewards, *([refills] if refills else [])]) or "clients, to begin training episodes"
        if sets := self._mixture.waiting_for():
            wanted += f" of {sets}"
        return (
            f"{wanted}: {self.num_groups('complete')} of {job.batch_size} groups are complete, "
            f"{self.num_groups('open')} open, {f'{closing} closing, ' if closing else ''}{live} episodes live"
            f"{self._waiting_client()}"
            f"{self._silent() if names_silent else ''}"
        )

    def holders(self) -> dict[str, PlacesStatus]:
        """The clients that hold groups of the present batch, or wait to open one; those with the most first."""
        return self._held.holders()

    def _waiting_client(self) -> str:
        """A phrase for a client that waits for a place, and for the other one that holds the most open groups."""
        holders = self.holders()
        waiting = [client for client, one in holders.items() if one.waits]
        for holder, one in holders.items():
            if one.num_open and (others := [name for name in waiting if name != holder]):
                more = f" and {len(others) - 1} more wait" if others[1:] else " waits"
                silent = f" ({one.num_silent} silent, so others may open as many)" if one.num_silent else ""
                return f"; client {others[0]!r}{more} for a place, {holder!r} holds {one.num_open} open groups{silent}"
        return ""

    def _silent(self) -> str:
        """A phrase for the live training episode without a call for longest, if that is long."""
        episode = self.most_silent()
        if episode is None or (silence := self.silence(episode)).seconds < SILENT_SECONDS:
            return ""
        return (
            f"; {episode.id} of task {episode.task_id}, client {episode.client_id}, is silent for "
            f"{duration(silence.seconds)} ({silence.cause(self._store.job)}): its lease has "
            f"{duration(silence.expires_in)} left, the episode at most {duration(silence.ends_in)}"
        )
