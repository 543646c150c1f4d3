"""Episodes, groups and batches as frozen values, and `State`: the fold over the facts of a run.

A fact is a change of one value: `[kind, {field: new value}]`. `State.apply` is the only program that computes counts
and other derived numbers. A running server applies each fact as it records it, and a restarted one applies the facts of
the journal to the newest snapshot, so both have the same state. Times are Unix seconds of the run's clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from agentjet.config import JobConfig
from agentjet.types import EpisodeStatus, Mode

Fact = tuple[str, Mapping[str, Any]]

RECOVERABLE = frozenset(
    {"context_length_exceeded", "thread_unsupported_request", "previous_response_not_found", "item_not_found"}
)
"""Codes of refusals that agents recover from: they compact their history, or send all of it."""
GroupState = Literal["open", "complete", "dropped", "batched"]


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
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it was aborted or expired."""
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
    """Temperature of all calls of an eval episode, if it was begun with one."""
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


def reward_of(episode: Episode, policy: str, policies: Sequence[str]) -> float | None:
    """The reward of a policy in an episode. `policies` are those that the settings of the run name, perhaps none."""
    return episode.by_role.get(policy, episode.reward) if policies else episode.reward


def new_episode_id(now: float) -> str:
    """An id that no other episode has, in any run of any server: the time in milliseconds, then 64 random bits.

    Ids sort by the time at which their episodes began. A data dir of edition 1 has ids such as `ep000001`, too.
    """
    return f"ep_{max(0, int(now * 1000)):011x}{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Outcomes of the training episodes of one code version. `aborted` includes expired ones."""

    episodes: int
    finished: int
    aborted: int
    reward_sum: float
    newest: int
    """`seq` of the newest episode."""

    def begun(self, seq: int) -> OutcomeCounts:
        return replace(self, episodes=self.episodes + 1, newest=seq)

    def ended(self, reward: float | None) -> OutcomeCounts:
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
    """Time at which a member last began or ended. The wait for further members counts from it."""
    members: tuple[str, ...] = ()
    state: GroupState = "open"
    reason: str = ""
    """Why it was dropped:

    `too_few`, `zero_variance`, `no_tokens`, `no_members`; `short` on one that trains below full size.
    """
    closed: float | None = None
    task_set: str = ""
    code_version: str = ""
    """Code version of the episode that opened it."""


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


# ---- the fold ----------------------------------------------------------------------------------------------

COUNTED = ("live", "finished", "aborted", "expired", "trained", "waiting", "dropped")
CODE_VERSIONS_KEPT = 1000
"""Code versions with outcome counts, by last use. An older one starts from 0 when it is used again."""
UNSCORED_REASONS = ("surplus", "stale", "not needed", "replaced")
"""Beginnings of reasons, up to a colon, that are counted apart from `aborted` and `expired`."""
_EPISODE = tuple(f.name for f in fields(Episode))
_GROUP = tuple(f.name for f in fields(Group))
_SCALARS = ("policy_version", "base_version", "durable_version", "composed", "num_episodes", "num_groups", "carry")
_MISSING: Any = object()


class UndoLog:
    """Old values of changed entries. Rewinding costs as much as the changes, however large the state is."""

    def __init__(self) -> None:
        self._old: list[tuple[dict[Any, Any], Any, Any]] = []

    def put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self._old.append((table, key, table.get(key, _MISSING)))
        table[key] = value

    def remove(self, table: dict[Any, Any], key: Any) -> None:
        """Remove an entry if it exists."""
        if key in table:
            self._old.append((table, key, table.pop(key)))

    def discard_on_rewind(self, table: dict[Any, Any], key: Any) -> None:
        """The entry's value is about to be mutated: a rewind removes it."""
        self._old.append((table, key, _MISSING))

    def mark(self) -> int:
        return len(self._old)

    def rewind(self, mark: int) -> None:
        """Undo the changes since `mark`."""
        for table, key, old in reversed(self._old[mark:]):
            if old is _MISSING:
                table.pop(key, None)
            else:
                table[key] = old
        del self._old[mark:]

    def clear(self) -> None:
        self._old.clear()


class State:
    """The part of a run that is in memory: unsettled episodes, the groups of the present batch, versions and counts.

    An episode is settled once it is aborted, expired, trained or dropped, or finished in eval mode. Settled episodes
    and closed groups leave memory, so memory and snapshots do not grow with the length of a run.
    """

    def __init__(self, snapshot: Mapping[str, Any] | None = None) -> None:
        held = snapshot or {}
        self.log = UndoLog()
        self.episodes: dict[str, Episode] = {e["id"]: Episode(**e) for e in held.get("episodes", ())}
        self.groups: dict[int, Group] = {g["id"]: _group(g) for g in held.get("groups", ())}
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0) | held.get("counts", {})
        """Episodes since the data dir was made: by status, and the finished training ones by outcome."""
        self.code_versions = {name: OutcomeCounts(*counts) for name, counts in held.get("code_versions", {}).items()}
        self.losses: dict[str, int] = dict(held.get("losses", {}))
        """Dropped groups and unscored episodes by `BATCH/groups/REASON` and `BATCH/episodes/REASON`, of batches that
        are not learned yet."""
        self.policy_version: int = 0
        self.base_version: int = -1
        """The version at which the journal started, or continued after a rollback; -1 if it started without a
        checkpoint.
        """
        self.durable_version: int = 0
        """First policy version from which batches can be replayed. Tokens of older batches may be pruned."""
        self.composed: bool = False
        """True if the batch of `policy_version` is composed."""
        self.num_episodes: int = 0
        self.num_groups: int = 0
        self.carry: Mapping[str, float] = {}
        """Groups owed to each task set since the newest batch."""
        vars(self).update(held.get("scalars", {}))

    @property
    def is_empty(self) -> bool:
        """True if no episode has begun and nothing was learned."""
        return not self.num_episodes and self.policy_version <= max(0, self.base_version)

    @property
    def next_batch(self) -> int:
        """The batch that is being filled."""
        return self.policy_version + self.composed

    def lost(self, kind: str, batch: int) -> dict[str, int]:
        """Dropped `groups`, or unscored `episodes`, while the batch was filled, by reason."""
        start = f"{batch}/{kind}/"
        return {key.removeprefix(start): count for key, count in self.losses.items() if key.startswith(start)}

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "episodes": [{name: getattr(e, name) for name in _EPISODE} for e in self.episodes.values()],
            "groups": [{name: getattr(g, name) for name in _GROUP} for g in self.groups.values()],
            "counts": self.counts,
            "code_versions": {
                name: (c.episodes, c.finished, c.aborted, c.reward_sum, c.newest)
                for name, c in self.code_versions.items()
            },
            "losses": self.losses,
            "scalars": {name: getattr(self, name) for name in _SCALARS},
        }

    def apply(self, fact: Fact) -> Episode | None:
        """Apply a fact. Returns the episode if it is settled by it."""
        kind, values = fact
        if kind == "episode":
            return self._apply_episode(values)
        if kind == "group":
            self._apply_group(values)
        elif kind == "run":
            for name, value in values.items():
                self.log.put(vars(self), name, value)
            if "policy_version" in values:
                for key in [key for key in self.losses if int(key.partition("/")[0]) < self.policy_version]:
                    self.log.remove(self.losses, key)
        else:
            assert kind == "rollback", kind
            self._count("trained", -values["episodes"])
            self._count("dropped", values["episodes"])
            self._add_loss("groups", values["reason"], values["groups"])
        return None

    def _apply_episode(self, values: Mapping[str, Any]) -> Episode | None:
        before = self.episodes.get(values["id"])
        episode = Episode(**values) if before is None else replace(before, **values)
        if before is None:
            self.log.put(vars(self), "num_episodes", max(self.num_episodes, episode.seq))
        for name in () if before is None else categories(before):
            self._count(name, -1)
        for name in categories(episode):
            self._count(name, 1)
        ended = episode.ended is not None and (before is None or before.ended is None)
        if ended and episode.reward is None:
            start, colon, _ = episode.reason.partition(":")
            is_known = colon and start in UNSCORED_REASONS
            self._add_loss("episodes", start.replace(" ", "_") if is_known else episode.status, 1)
        if episode.code_version and episode.mode == "train":
            self._count_code_version(episode, begun=before is None, ended=ended)
        if {"live", "waiting"} & set(categories(episode)):
            self.log.put(self.episodes, episode.id, episode)
            return None
        self.log.remove(self.episodes, episode.id)
        return episode

    def _apply_group(self, values: Mapping[str, Any]) -> None:
        before = self.groups.get(values["id"])
        group = _group(values) if before is None else _group(values, before)
        self.log.put(vars(self), "num_groups", max(self.num_groups, group.id))
        if group.state == "dropped":
            self._add_loss("groups", group.reason, 1)
        if group.state in ("dropped", "batched"):
            self.log.remove(self.groups, group.id)
        else:
            self.log.put(self.groups, group.id, group)

    def _count(self, name: str, number: int) -> None:
        self.log.put(self.counts, name, self.counts[name] + number)

    def _add_loss(self, kind: str, reason: str, number: int) -> None:
        key = f"{self.next_batch}/{kind}/{reason}"
        self.log.put(self.losses, key, self.losses.get(key, 0) + number)

    def _count_code_version(self, episode: Episode, *, begun: bool, ended: bool) -> None:
        counts = self.code_versions.get(episode.code_version)
        if counts is None:
            if not begun:
                return  # Its counts were removed since.
            if len(self.code_versions) >= CODE_VERSIONS_KEPT:
                self.log.remove(self.code_versions, min(self.code_versions, key=lambda v: self.code_versions[v].newest))
            counts = OutcomeCounts(0, 0, 0, 0.0, 0)
        counts = counts.begun(episode.seq) if begun else counts
        counts = counts.ended(episode.reward) if ended else counts
        self.log.put(self.code_versions, episode.code_version, counts)


def changes(before: Episode | Group | None, after: Episode | Group) -> dict[str, Any]:
    """The fields of `after` that differ from `before`, and its id: the values of a fact."""
    names = _EPISODE if isinstance(after, Episode) else _GROUP
    changed = {
        name: getattr(after, name) for name in names if before is None or getattr(before, name) != getattr(after, name)
    }
    return {"id": after.id, **changed}


def categories(episode: Episode) -> Sequence[str]:
    """The counts that an episode belongs to."""
    if episode.status != "finished" or episode.mode == "eval":
        return (episode.status,)
    if episode.trained_in is not None:
        return ("finished", "trained")
    return ("finished", "dropped" if episode.dropped else "waiting")


def _group(values: Mapping[str, Any], before: Group | None = None) -> Group:
    if "members" in values:
        values = {**values, "members": tuple(values["members"])}
    return Group(**values) if before is None else replace(before, **values)
