"""Episodes, groups and batches as frozen values, and `State`, the numbers of a run. Times are Unix seconds of the run's
clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentjet.config import JobConfig
from agentjet.types import EpisodeStatus, GroupState, Mode

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
        """The counts that it belongs to."""
        return {self.outcome, "finished"} if self.status == "finished" else {self.outcome}

    @property
    def is_settled(self) -> bool:
        """True once it is aborted, expired, trained or dropped, or finished in eval mode."""
        return self.outcome not in ("live", "waiting")


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
