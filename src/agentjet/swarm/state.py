"""The state of a run: its episodes, groups and batches as frozen values, `Store` and `Leases`.

`Store` changes memory and the journal together. `Leases` has activity, which is not journaled. Times are Unix seconds
of the run's clock.

Memory has the unsettled episodes and the groups of the present batch, so it does not grow with the length of a run.
Every change is written to its row at once. After a failed transaction the rows that changed since the last commit are
read again, and what no row records is restored: see `Transactions.restores`. The store finds and keeps; the rules are
in `episodes`, `groups`, `places` and `batches`.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from agentjet.config import JobConfig, changed_settings
from agentjet.errors import Conflict, Later
from agentjet.protocol import Event, Request
from agentjet.timeline.tree import ConversationTree
from agentjet.types import EpisodeStatus, GroupState, Mode

if TYPE_CHECKING:  # The journal's rows are these values.
    from agentjet.swarm.journal import Journal, Slice, StepRecord

log = logging.getLogger(__name__)

RECOVERABLE = frozenset(
    {
        "context_length_exceeded",
        "thread_unsupported_request",
        "previous_response_not_found",
        "item_not_found",
        "turn_limit",
    }
)
"""Codes of refusals that agents recover from: they compact their history, send all of it, or end their loop."""
NOT_NEEDED_REASONS = ("surplus", "stale", "not needed", "replaced")
"""Beginnings of reasons, up to a colon, of aborted episodes that did not fail: the run had enough without them."""
Outcome = Literal["live", "finished", "aborted", "expired", "not_needed", "trained", "waiting", "dropped"]
NOT_NEEDED: Outcome = "not_needed"
RECENT_STEPS = 50
"""Batches over which the shares and rewards of task sets are computed."""
PRUNE_EVERY = 2000
"""Episodes after which rows are deleted from the journal without a checkpoint."""
MAX_CLIENTS_SHOWN = 256
ABSENT_SECONDS = 300.0
"""Seconds after which a client that was not seen is absent. It does not decide any more when training ends."""
KEPT_PER_REASON = 50
"""Transcripts that are kept of the newest episodes that ended for a reason and train nothing."""
LONGEST_REASON = 80
"""Characters of a reason that distinguish it from others."""
STALL_SECONDS = 3.0
"""The server checks leases every half second. A longer gap between two checks means that the event loop was blocked."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """One attempt at a task, from `begin` to its reward or its abort."""

    id: str
    seq: int
    """Counts the episodes of a data dir from 1, in the order they began."""
    client_id: str
    task_id: str
    task_set: str
    group: str
    """The client's name for the group; empty in an eval episode without one."""
    group_id: int | None
    """The group instance; None for eval episodes, which are never grouped."""
    mode: Mode
    policy_version: int
    """Version at the beginning."""
    begun: float
    status: EpisodeStatus = "live"
    ended: float | None = None
    reward: float | None = None
    by_role: Mapping[str, float] = field(default_factory=dict)
    call_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of single calls by call id, in the order of the calls."""
    call_rewards_digest: str = ""
    """Digest of `by_call` and `by_turn` as they were sent, by which a repeated finish is known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reward_text: str = ""
    """The reason for the reward, as the client gave it. Rows of earlier versions lack it."""
    reason: str = ""
    """Why it was aborted or expired."""
    not_needed: str = ""
    """The reason of `NOT_NEEDED_REASONS` for which it was aborted; empty if it was needed."""
    num_calls: int = 0
    num_tokens: int = 0
    """Sampled tokens, over all calls that may train."""
    trained_in: int | None = None
    """The batch that trained it; None before that."""
    oldest_version: int | None = None
    """The policy version of its oldest token that may train."""
    dropped: str = ""
    """Why a finished episode will never train (its group's reason), else empty."""
    code_version: str = ""
    at_version: int | None = None
    """The policy version that an eval episode is pinned to."""
    temperature: float | None = None
    """Temperature of all its calls: of an eval episode that was begun with one, or chosen by the recipe."""
    max_turns: int = 0
    """Maximum number of calls of each role that train, chosen by the recipe. 0: no maximum."""
    task_mean: float | None = None
    """Mean reward of earlier episodes of the task when its group began; None if there were none."""
    instance_id: str = ""
    """The process of the client that began it, if the client named one."""
    seed: int | None = None
    """Seeds its answers; None: `seq` does."""
    noted: Mapping[str, int] = field(default_factory=dict)
    """Request keys that were accepted without an effect, and other deviations from the requests, with their counts."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Refused requests: `code` or `code: parameter`, with their counts."""

    @property
    def unscorable(self) -> bool:
        """True if a refusal ended a call, except for refusals that agents are known to recover from."""
        return any(name.partition(":")[0] not in RECOVERABLE for name in self.refused)

    @property
    def outcome(self) -> Outcome:
        """Its status, or the finer one of a finished training episode, and of one that was not needed."""
        if self.not_needed:
            return NOT_NEEDED
        if self.status != "finished" or self.mode == "eval":
            return self.status
        return "trained" if self.trained_in is not None else "dropped" if self.dropped else "waiting"

    @property
    def counted_as(self) -> set[Outcome]:
        return {self.outcome, "finished"} if self.status == "finished" else {self.outcome}

    @property
    def is_settled(self) -> bool:
        """True once it is aborted, expired, trained or dropped, or finished in eval mode."""
        return self.outcome not in ("live", "waiting")


class CallCounts(NamedTuple):
    """The counts of an episode that its calls change: see `EpisodeRecord`."""

    num_calls: int
    num_tokens: int
    oldest_version: int | None
    noted: Mapping[str, int]
    refused: Mapping[str, int]

    @classmethod
    def of(cls, episode: EpisodeRecord) -> Self:
        return cls(*(getattr(episode, name) for name in cls._fields))


def not_needed(reason: str) -> str:
    """The beginning of a reason if it is one of `NOT_NEEDED_REASONS` before a colon, else empty."""
    start, colon, _ = reason.partition(":")
    return start if colon and start in NOT_NEEDED_REASONS else ""


def reward_of(episode: EpisodeRecord, policy: str, policies: Sequence[str]) -> float | None:
    """The reward of a policy in an episode. `policies` are those that the settings of the run name, perhaps none."""
    return episode.by_role.get(policy, episode.reward) if policies else episode.reward


def new_episode_id(now: float) -> str:
    """An id that no other episode has, in any run of any server: the time in milliseconds, then 64 random bits.

    Ids sort by the time at which their episodes began.
    """
    return f"ep_{max(0, int(now * 1000)):011x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Outcomes of the training episodes of one code version. `aborted` includes expired ones."""

    episodes: int = 0
    finished: int = 0
    aborted: int = 0
    not_needed: int = 0
    reward_sum: float = 0.0

    @property
    def reward_mean(self) -> float | None:
        return self.reward_sum / self.finished if self.finished else None


@dataclass(frozen=True, slots=True)
class Group:
    """An instance of a group.

    `members` are its live and finished episodes, in the order they began; a lost one frees its place.
    """

    id: int
    client_id: str
    name: str
    opened: float
    touched: float
    """Time at which a member last began or ended. The wait for further members counts from it."""
    members: tuple[str, ...] = ()
    state: GroupState = "open"
    """`closing`: all members have ended, and the hook `accept` of a plug-in has yet to decide."""
    reason: str = ""
    """Why it was dropped:

    `too_few`, `zero_variance`, `no_tokens`, `no_members`; `short` on one that trains below full size.
    """
    closed: float | None = None
    task_set: str = ""
    code_version: str = ""
    """Code version of the episode that opened it."""
    is_left: bool = False
    """True once its client begins no further episode of it: it closes with its last live member."""
    size: int = 0
    """Number of episodes that complete it. 0: `job.group_size`."""
    temperature: float | None = None
    max_turns: int = 0
    task_mean: float | None = None
    """These three are passed on to its episodes: see `EpisodeRecord`."""


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The job settings in force; `given` are those that the server was started with."""

    revision: int
    """Counts the changes of a data dir from 1."""
    given: JobConfig
    job: JobConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups consumed by one `learn` call; `id` is the policy version it starts from.

    Committed to the journal, with its job settings, before it is learned: replaying it needs nothing else.
    """

    id: int
    groups: tuple[tuple[str, ...], ...]
    """The episodes of each group, in training order."""
    job: JobConfig
    composed: float
    carry: Mapping[str, float] = field(default_factory=dict)
    """Groups that each present task set was owed after it: see `mixture`. Empty without `job.task_weights`."""

    @property
    def episode_ids(self) -> tuple[str, ...]:
        return tuple(episode_id for group in self.groups for episode_id in group)


@dataclass(frozen=True, slots=True)
class State:
    """The versions of a run. One row of the journal."""

    policy_version: int = 0
    base_version: int = -1
    """The version at which the journal started, or continued after a rollback; -1 if it started without a
    checkpoint.
    """
    durable_version: int = 0
    """First policy version from which batches can be replayed. Tokens of older batches may be pruned."""
    offered_version: int = 0
    """Newest policy version that separate samplers may have. Its batch is never given up."""

    @property
    def next_unused_version(self) -> int:
        """The first number that no weights have, not even those that only samplers got."""
        return max(self.policy_version, self.offered_version) + 1


# ---- the store -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Host:
    """Services of the server that has a run's state."""

    on_event: Callable[[Event], None] = lambda event: None
    """Called with each event after it is on disk."""
    undelivered_calls: Callable[[str], Sequence[str]] = lambda episode_id: ()
    """Returns the recorded calls of an ending episode that are still on their way to its agent."""
    defers_hooks: bool = False
    """True if the server calls the hooks of plug-ins, which may take long: see `RolloutNeeded` and `Undecided`."""
    transcript_bytes: int = 0
    """Maximum size of the transcripts that are kept for people: see `server.keep_transcripts`."""


class Transactions:
    """Changes of memory and of a file together. Each is made inside `transaction()`."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.file = journal.file
        self.on_uncommitted: Callable[[], None] = lambda: None
        """Called after a transaction that a `commit` must follow."""
        self.restores: list[Callable[[], object]] = []
        """The opposites of changes in memory that no row records. Each is added inside the transaction of its change,
        or after it and before its commit. They are called if the transaction is undone, by itself or with its commit.
        """

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Group changes: all or none. Nested ones join the outermost. Events are sent after the commit."""
        if self.file.in_transaction:
            yield
            return
        marks = self._marks()
        try:
            with self.file.transaction():
                yield
        except BaseException:
            self._undo(*marks)
            raise
        if self.file.defers_commits:
            self.on_uncommitted()
        else:
            self._confirm()
            self.announce()

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
            self._undo()
            raise
        self._confirm()

    def abandon(self, error: BaseException) -> None:
        """Undo all changes since the last commit, in memory, too. The next `commit` fails because of the error."""
        self.file.abandon(error)
        self._undo()

    def announce(self) -> None:
        """Send the committed events. Call it once they are on disk."""

    def probe_disk(self) -> None:
        """Write something, which ends `file.refusal` if the disk accepts it. Raises `Later` if not."""
        with self.transaction():
            self.file.probe_disk()

    def _marks(self) -> tuple[int, ...]:
        """The arguments with which `_undo` keeps earlier transactions."""
        return (len(self.restores),)

    def _undo(self, num_restores: int = 0) -> None:
        """Undo failed transactions in memory, too. The first restores are of earlier transactions."""
        while len(self.restores) > num_restores:
            self.restores.pop()()

    def _confirm(self) -> None:
        self.restores.clear()


class Store(Transactions):
    """Journal and state of one run. Every change happens inside `transaction()`."""

    state: State
    episodes: dict[str, EpisodeRecord]
    """Unsettled episodes, in the order they began."""
    groups: dict[int, Group]
    """Open, closing and complete groups that no batch contains, in the order they were opened."""
    settings: JobSettings | None
    pending: Batch | None
    """The batch that is composed and not yet learned."""
    steps: list[StepRecord]
    """The newest learned batches, the newest last."""
    trees: dict[str, dict[str, ConversationTree]]
    """See `Conversations.trees`."""

    def __init__(
        self,
        journal: Journal,
        clock: Callable[[], float],
        policies: tuple[str, ...] = (),
        host: Host = Host(),
    ) -> None:
        super().__init__(journal)
        self.policies = policies
        """The policies that the settings name."""
        self.on_event = host.on_event
        self.undelivered_calls = host.undelivered_calls
        self.defers_hooks = host.defers_hooks
        self.transcript_bytes = host.transcript_bytes
        self.is_prune_due = False
        """True if the journal may have many rows that the run needs no more. `unneeded` finds them."""
        self._clock = clock
        self._outbox: list[Event] = []
        self._committed: list[Event] = []
        self._changed: set[str] = set()
        """Episodes that were put since the last commit."""
        self.is_undone = False
        """True after changes were undone, until the owner sets it to False. No event shows that, so everything that
        waits for the state must look at it again.
        """
        self.episodes = {episode.id: episode for episode in journal.unsettled_episodes()}
        self.steps = journal.steps(None, RECENT_STEPS)
        self.trees = {}
        self._load()

    def _load(self) -> None:
        self.state = self.journal.read_state()
        self.groups = {group.id: group for group in self.journal.groups()}
        self.settings = self.journal.job_settings()
        self.pending = next(iter(self.journal.batches(self.policy_version)), None)

    # ---- reads ---------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self.state.policy_version

    @property
    def next_batch(self) -> int:
        """The batch that is being filled."""
        return self.policy_version + (self.pending is not None)

    @property
    def job(self) -> JobConfig:
        """The job settings in force. A batch keeps those it was composed with."""
        assert self.settings is not None, "job settings are stored before they are used"
        return self.settings.job

    @property
    def job_revision(self) -> int:
        """Number of the settings in force; each change counts, from 1."""
        return 0 if self.settings is None else self.settings.revision

    def episode(self, episode_id: str) -> EpisodeRecord:
        """Any episode that the journal keeps. Raises `NotFound`."""
        return self.episodes.get(episode_id) or self.journal.known_episode(episode_id)

    def live(self) -> list[EpisodeRecord]:
        return [episode for episode in self.episodes.values() if episode.status == "live"]

    @property
    def last_step(self) -> Mapping[str, float]:
        """Metrics of the newest learned batch; empty if this run did not learn it."""
        is_newest = bool(self.steps) and self.steps[-1].version == self.policy_version
        return self.steps[-1].metrics if is_newest else {}

    @property
    def is_over(self) -> bool:
        """True if `job.max_steps` is reached."""
        return 0 < self.job.max_steps <= self.policy_version

    @property
    def num_places(self) -> int:
        """Number of training groups that may be open or complete at a time.

        A waiting group ages by one version with each batch ahead of it. The number is limited so that none gets too
        old.
        """
        batches_ahead = self.job.max_staleness + 1 - (self.pending is not None)
        return self.job.batch_size * batches_ahead + self.job.spare_groups

    @property
    def carry(self) -> Mapping[str, float]:
        """Groups owed to each task set since the newest batch."""
        return self.journal.newest_carry() if self.pending is None else self.pending.carry

    def num_pinned(self) -> int:
        """Number of live evaluation episodes that need the present policy version."""
        return sum(episode.at_version is not None for episode in self.live())

    # ---- transactions --------------------------------------------------------------------------------------

    def _marks(self) -> tuple[int, ...]:
        return len(self.restores), len(self._outbox)

    def _confirm(self) -> None:
        super()._confirm()
        self._changed.clear()
        self._committed += self._outbox
        self._outbox.clear()

    def _undo(self, num_restores: int = 0, num_sent: int = 0) -> None:
        """The first events are of earlier transactions, too."""
        del self._outbox[num_sent:]
        self.is_undone = True
        version = self.policy_version
        try:
            self._load()
            if self.policy_version != version:  # The steps change with it only.
                self.steps = self.journal.steps(None, RECENT_STEPS)
            rows = [self.journal.episode(episode_id) for episode_id in self._changed]
        except sqlite3.Error as error:
            raise self.file.refuse_writes(error) from error
        kept = [episode for episode in self.episodes.values() if episode.id not in self._changed]
        kept += [row for row in rows if row is not None and not row.is_settled]
        self.episodes = {episode.id: episode for episode in sorted(kept, key=lambda episode: episode.seq)}
        self.trees = {episode_id: trees for episode_id, trees in self.trees.items() if episode_id in self.episodes}
        super()._undo(num_restores)

    def announce(self) -> None:
        committed, self._committed = self._committed, []
        for event in committed:
            self.on_event(event)

    def emit(self, kind: str, body: Mapping[str, Any]) -> None:
        """Journal an event and pass it to `on_event` once it is on disk."""
        with self.transaction():
            self._outbox.append(self.journal.add_event(kind, self._clock(), body))

    # ---- changes, inside a transaction ---------------------------------------------------------------------

    def put(self, episode: EpisodeRecord) -> None:
        """Record a new or changed episode, and count it. A settled one leaves memory. Emits an event when an episode
        begins or ends; its conversation trees are released at its end.
        """
        assert self.file.in_transaction, "changes are made in transactions"
        before = self.episodes.get(episode.id)
        self._changed.add(episode.id)
        self._count(before, episode)
        if episode.is_settled:
            self.episodes.pop(episode.id, None)
            self._keep_transcript(episode)
        else:
            self.episodes[episode.id] = episode
        self.journal.put_episode(episode)
        if before is None and episode.seq % PRUNE_EVERY == 0:
            self.is_prune_due = True
        if before is None or (before.ended is None and episode.ended is not None):
            self.emit("episode", _event_body(episode))
        if episode.ended is not None and (trees := self.trees.pop(episode.id, None)) is not None:
            self.restores.append(lambda: self.trees.setdefault(episode.id, trees))

    def _count(self, before: EpisodeRecord | None, after: EpisodeRecord) -> None:
        journal = self.journal
        left, entered = set() if before is None else before.counted_as, after.counted_as
        for name in left - entered:
            journal.count("outcome", name, -1)
        for name in entered - left:
            journal.count("outcome", name)
        if after.dropped and (before is None or not before.dropped):
            journal.count("dropped", after.dropped)
        if after.mode == "eval":
            return
        if after.status in ("aborted", "expired"):
            journal.count("lost_episodes", after.not_needed.replace(" ", "_") or after.status, batch=self.next_batch)
        if after.code_version:
            if before is None:
                journal.code_version_began(after)
            elif before.ended is None and after.ended is not None:
                journal.code_version_ended(after)

    def unneeded(self) -> list[Slice]:
        """The rows of the journal that the run needs no more: see `Journal.unneeded`. May run in another thread; it
        reads committed rows only.
        """
        with self.journal.reading() as journal:
            return journal.unneeded(self.state, self._clock(), self.transcript_bytes)

    def prune(self, rows: Slice) -> None:
        with self.transaction():
            self.journal.delete(rows)

    def _keep_transcript(self, episode: EpisodeRecord) -> None:
        """Keep the calls of the newest episodes of each reason not to train, and of the newest evaluation of a task."""
        if episode.dropped:
            self.journal.keep_transcript(episode.id, f"dropped {episode.dropped}", KEPT_PER_REASON)
        elif episode.status in ("aborted", "expired"):
            reason = episode.reason.partition(":")[0][:LONGEST_REASON]
            self.journal.keep_transcript(episode.id, f"{episode.status} {reason}", KEPT_PER_REASON)
        elif episode.mode == "eval":
            self.journal.keep_transcript(episode.id, f"eval {episode.task_set}/{episode.task_id}", 1)

    def change(self, **versions: int) -> None:
        """Record other versions. A new policy version ends the counts of losses before it."""
        self.state = replace(self.state, **versions)
        self.journal.put_state(self.state)
        if "policy_version" in versions:
            self.journal.forget_lost(self.policy_version)

    def put_group(self, group: Group) -> None:
        """Record a new or changed group, and count a dropped one. Dropped and batched ones leave memory."""
        if group.state == "dropped":
            self.journal.count("lost_groups", group.reason, batch=self.next_batch)
        if group.state in ("dropped", "batched"):
            self.groups.pop(group.id, None)
            self.journal.remove_group(group.id)
        else:
            self.groups[group.id] = group
            self.journal.put_group(group)

    def put_job(self, job: JobConfig, *, given: JobConfig | None = None) -> None:
        """Put job settings in force; `given` if the server was started with them."""
        if given is None:
            given = job if self.settings is None else self.settings.given
        self.settings = JobSettings(self.job_revision + 1, given, job)
        self.journal.put_job_settings(self.settings)

    def start_job(self, given: JobConfig) -> str:
        """Keep the stored job settings, or store `given` if it differs from what was given at the start before.

        Returns a sentence for the log if the settings in force may surprise, else an empty string.
        """
        kept = self.settings
        if kept is None:
            self.put_job(given)
            return ""
        if kept.given == given:
            changed = ", ".join(changed_settings(given, kept.job))
            replaced = f"the job settings are those of revision {kept.revision}, which replaced the given ones: "
            return f"{replaced}{changed}" if changed else ""
        self.put_job(given, given=given)
        lost = f" (those in force were of revision {kept.revision})" if kept.job != kept.given else ""
        changed = ", ".join(changed_settings(kept.job, given))
        return f"the job settings are the ones given at this start{lost}: {changed}" if changed else ""

    def start_at(self, policy_version: int) -> None:
        """Start an empty run, or continue one after a rollback, at the checkpoint of a version."""
        self.change(policy_version=policy_version, base_version=policy_version, durable_version=policy_version)

    # ---- idempotency ---------------------------------------------------------------------------------------

    def recall(self, scope: str, key: str | None, request: Request) -> str | None:
        """The episode that an earlier request with this key was about; None for a new key.

        Raises `Conflict` for the key with another body.
        """
        known = None if key is None else self.journal.recall(scope, key)
        if known is None:
            return None
        fingerprint, episode_id = known
        if fingerprint != request.digest():
            raise Conflict(
                f"Idempotency-Key {key!r} was used before for another request; a new request needs a new key.",
                code="idempotency_key_reused",
            )
        return episode_id

    def remember(self, scope: str, key: str | None, request: Request, episode_id: str) -> None:
        """Store a key inside the transaction with its effect, so that both are on disk or neither."""
        if key is not None:
            self.journal.remember(scope, key, request.digest(), episode_id, self._clock())


def _event_body(episode: EpisodeRecord) -> dict[str, Any]:
    body: dict[str, Any] = {
        "episode_id": episode.id,
        "status": episode.status,
        "mode": episode.mode,
        "task_id": episode.task_id,
        "task_set": episode.task_set,
        "group": episode.group,
        "client_id": episode.client_id,
        "code_version": episode.code_version,
    }
    if episode.status != "live":
        body |= {"reward": episode.reward, "reason": episode.reason, "num_calls": episode.num_calls}
    return body


class Leases:
    """Time of the last activity of each live episode and of each client, in Unix seconds of the clock.

    A restart renews every lease, because heartbeats cannot reach a stopped server. `max_episode_seconds` runs on.
    """

    def __init__(self, clock: Callable[[], float], stopwatch: Callable[[], float]) -> None:
        self._began = self.epoch = clock()
        """`epoch`: time from which leases count, the start or the end of the last `check_stall` that was late."""
        self._stopwatch = stopwatch
        self._checked_at = stopwatch()
        self.clients: dict[str, float] = {}
        self._clock = clock
        self._last_seen: dict[str, float] = {}
        self._last_active: dict[str, float] = {}
        """Time of the last call of each live episode. Heartbeats of its client do not count."""
        self._calling: Counter[str] = Counter()
        self._ends: dict[str, int] = {}
        """Policy version that a client of `clients` trains to."""

    def check_stall(self) -> None:
        """Starts all leases again if the event loop was blocked for more than `STALL_SECONDS` before this check,
        because heartbeats of that time may still be queued. Call it before leases are judged.
        """
        before, self._checked_at = self._checked_at, self._stopwatch()
        if self._checked_at - before > STALL_SECONDS:
            log.warning("the event loop was blocked for %.1f s: all leases start again", self._checked_at - before)
            self.epoch = self._clock()

    def expires_at(self, episode: EpisodeRecord, job: JobConfig) -> float:
        """Time at which a live episode expires without activity; at most its begin + `max_episode_seconds`."""
        last = episode.begun + job.max_episode_seconds
        if self._calling[episode.id]:
            return last
        seen = max(self._last_seen.get(episode.id, episode.begun), self.epoch)
        return min(seen + job.lease_seconds, last)

    def silent_seconds(self, episode: EpisodeRecord, *, since: float | None = None) -> float:
        """Seconds since the last call of a live episode, since its begin, or since the server started; 0 during a call.
        `since` replaces the begin.

        A heartbeat shows that the client is alive, and nothing about the agent: its tool may hang.
        """
        if self._calling[episode.id]:
            return 0.0
        begun = episode.begun if since is None else since
        return max(0.0, self._clock() - max(self._last_active.get(episode.id, begun), self._began))

    def unheard_seconds(self, episode: EpisodeRecord) -> float:
        """Seconds since a call or a heartbeat of a live episode; 0 during a call. Counts like `expires_at`."""
        if self._calling[episode.id]:
            return 0.0
        seen = max(self._last_seen.get(episode.id, episode.begun), self.epoch)
        return max(0.0, self._clock() - seen)

    def renew(self, episode: EpisodeRecord) -> None:
        """Record that the client of a live episode is alive."""
        self._last_seen[episode.id] = self._clock()
        self.client_seen(episode.client_id)

    def active(self, episode: EpisodeRecord) -> None:
        """Record a call of a live episode, which also renews its lease."""
        self.renew(episode)
        self._last_active[episode.id] = self._clock()

    def client_seen(self, client_id: str, ends_at_version: int = 0) -> None:
        """Record activity of a client, with or without an episode, and the policy version that it trains to."""
        self.clients.pop(client_id, None)
        self.clients[client_id] = self._clock()
        if ends_at_version:
            self._ends[client_id] = ends_at_version
        if len(self.clients) > MAX_CLIENTS_SHOWN:
            oldest = next(iter(self.clients))
            del self.clients[oldest]
            self._ends.pop(oldest, None)

    def ends_at_version(self) -> int:
        """The last policy version that a present client trains to; 0 if unknown."""
        since = self._clock() - ABSENT_SECONDS
        return max((version for client, version in self._ends.items() if self.clients[client] > since), default=0)

    @contextmanager
    def calling(self, episode: EpisodeRecord) -> Iterator[None]:
        """Suspend the episode's lease during a call and renew it afterwards."""
        self.active(episode)
        self._calling[episode.id] += 1
        try:
            yield
        finally:
            self._calling[episode.id] -= 1
            if not self._calling[episode.id]:
                del self._calling[episode.id]
            if episode.id in self._last_seen:
                self.active(episode)

    def calling_now(self) -> frozenset[str]:
        return frozenset(self._calling)

    def remove(self, episode: EpisodeRecord) -> Callable[[], None]:
        """Forget the lease of an ended episode. Returns a function that puts it back."""
        times = (self._last_seen, self._last_active)
        removed = [of.pop(episode.id, None) for of in times]

        def restore() -> None:
            for of, time in zip(times, removed, strict=True):
                if time is not None:
                    of[episode.id] = time

        return restore
