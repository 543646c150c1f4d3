"""What the swarm knows of an episode, a group and a batch, as frozen values: replaced, never edited.

Times are Unix seconds of the swarm's clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from agentjet.config import JobConfig
from agentjet.types import EpisodeStatus, Mode

RECOVERABLE = frozenset(
    {"context_length_exceeded", "thread_unsupported_request", "previous_response_not_found", "item_not_found"}
)
"""Codes of refusals that are part of the protocol: the agent compacts its history, or sends all of it."""
GroupState = Literal["open", "complete", "dropped"]


@dataclass(frozen=True, slots=True)
class Episode:
    """One attempt at a task, from `begin` to its reward or its abort."""

    id: str
    seq: int
    """Counts the episodes of a data dir from 1, in the order they began."""
    client_id: str
    task_id: str
    task_set: str
    group: str
    """The group's name as the client knows it; empty in an eval episode that named none."""
    group_id: int | None
    """The group instance; None for eval episodes, which are never grouped."""
    mode: Mode
    policy_version: int
    """Version at the beginning."""
    begun: float
    status: EpisodeStatus = "live"
    ended: float | None = None
    reward: float | None = None
    """Of a prepared episode: the one it promised. None of one that aborted or expired."""
    by_role: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it was aborted or expired."""
    num_calls: int = 0
    num_tokens: int = 0
    """Sampled tokens, over all calls that may train."""
    trained_in: int | None = None
    """The batch that trained it, once it was learned."""
    dropped: str = ""
    """Why a finished episode will never train (its group's reason), else empty."""
    code_version: str = ""
    team: str = ""
    at_version: int | None = None
    """The policy version that an eval episode is pinned to."""
    temperature: float | None = None
    """Of all calls of an eval episode that was begun with one."""
    instance_id: str = ""
    """The process of the client that began it, if the client named one."""
    noted: Mapping[str, int] = field(default_factory=dict)
    """Request keys that were accepted without an effect, and other deviations from the requests, with their counts."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Refused requests: `code` or `code: parameter`, with their counts."""

    @property
    def unscorable(self) -> bool:
        """True if a refusal ended a call, except for refusals that agents are known to recover from."""
        return any(name.partition(":")[0] not in RECOVERABLE for name in self.refused)


def new_episode_id(now: float) -> str:
    """An id that no other episode has, in any run of any server: the time in milliseconds, then 64 random bits.

    Ids sort by the time at which their episodes began. A data dir of edition 1 has ids such as `ep000001`, too.
    """
    return f"ep_{max(0, int(now * 1000)):011x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of the training episodes of one code version. `aborted` includes expired ones."""

    episodes: int
    finished: int
    aborted: int
    reward_sum: float

    def begun(self) -> Tally:
        return replace(self, episodes=self.episodes + 1)

    def ended(self, reward: float | None) -> Tally:
        if reward is None:
            return replace(self, aborted=self.aborted + 1)
        return replace(self, finished=self.finished + 1, reward_sum=self.reward_sum + reward)

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
    """When a member last began or ended: what the patience with a short group counts from."""
    members: tuple[str, ...] = ()
    state: GroupState = "open"
    reason: str = ""
    """Why it was dropped:

    `too_few`, `zero_variance`, `no_tokens`, `no_members`; `short` on one that trains below full size.
    """
    closed: float | None = None
    for_batch: int | None = None
    """The batch that was being filled when it closed."""
    task_set: str = ""
    code_version: str = ""
    """Of the episode that opened it."""


@dataclass(frozen=True, slots=True)
class TaskSetShare:
    """A task set's part in the training; see `protocol.TaskSetStatus`."""

    weight: float | None
    share: float
    groups_open: int
    groups_complete: int
    reward_mean: float | None


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
    """What each task set present was still owed after it, in groups; see `quotas`. Empty without `job.task_weights`."""

    @property
    def episode_ids(self) -> tuple[str, ...]:
        return tuple(episode_id for group in self.groups for episode_id in group)
