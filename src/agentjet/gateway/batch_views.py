"""Views of groups and batches, from a journal alone.

A batch is read without its recipe, which may be a plug-in that this machine does not have. `batch` and `group` return
an `Unfinished` view, because advantages are computed by the recipe, after the journal was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agentjet.errors import NotFound
from agentjet.gateway.views import facts
from agentjet.protocol import (
    BatchGroup,
    BatchList,
    BatchMember,
    BatchSummary,
    BatchView,
    GroupView,
    LostEpisode,
    MemberView,
    SettingChangeView,
    flatten,
)
from agentjet.swarm import Episode, Journal
from agentjet.swarm.advantages import Advantages, Members
from agentjet.swarm.batch_forest import is_uniform
from agentjet.swarm.origin import policies_of
from agentjet.swarm.state import new_episode_id
from agentjet.types import GroupState

View = TypeVar("View")
MOST_LOST = 1000
"""Unscored and dropped episodes that are listed with a batch."""


@dataclass(frozen=True, slots=True)
class Unfinished(Generic[View]):
    """A view that lacks its advantages."""

    advantages: Members | Advantages
    """The episodes whose advantages it needs, or a note."""
    finish: Callable[[Advantages], View]


@dataclass(frozen=True, slots=True)
class Record:
    """A batch, learned or not."""

    id: int
    groups: tuple[tuple[str, ...], ...]
    job: Mapping[str, Any]
    composed: float
    metrics: Mapping[str, float] | None
    """None until it is learned."""

    @property
    def state(self) -> Any:
        return "pending" if self.metrics is None else "learned"


def records(journal: Journal, before: int | None, limit: int) -> list[Record]:
    """The newest batches, or those before one, newest first."""
    rows = journal.file.db.execute(
        "SELECT body, metrics FROM batches WHERE id < ? ORDER BY id DESC LIMIT ?",
        (2**62 if before is None else before, limit),
    )
    found = []
    for body, metrics in rows:
        held = json.loads(body)
        groups = tuple(map(tuple, held["groups"]))
        learned = None if metrics is None else json.loads(metrics)
        found.append(Record(held["id"], groups, held["job"], held["composed"], learned))
    return found


def batch_list(journal: Journal, before: int | None, limit: int) -> BatchList:
    """Returns a page of batches, newest first."""
    found = records(journal, before, limit + 1)
    page = [
        BatchSummary(
            id=record.id,
            state=record.state,
            composed=record.composed,
            groups=len(record.groups),
            episodes=sum(map(len, record.groups)),
            reward_mean=(record.metrics or {}).get("reward/mean"),
        )
        for record in found[:limit]
    ]
    return BatchList(batches=page, next=page[-1].id if len(found) > len(page) else None)


def batch(journal: Journal, batch_id: int) -> Unfinished[BatchView]:
    """Returns a batch. Raises `NotFound`."""
    newest = records(journal, batch_id + 1, 2)
    if not newest or newest[0].id != batch_id:
        raise NotFound(f"There is no batch {batch_id} in this run.", code="batch_not_found")
    record, before = newest[0], newest[1] if len(newest) > 1 else None
    groups, policies = members_of(journal, record), policies_of(journal.origin)
    uniform = [_is_uniform(journal, members, policies) for members in groups]
    dropped = _lost_episodes(journal, record, before)

    def finish(found: Advantages) -> BatchView:
        return BatchView(
            id=record.id,
            state=record.state,
            composed=record.composed,
            metrics=dict(record.metrics or {}),
            groups=[_group(members, same, found) for members, same in zip(groups, uniform, strict=True) if members],
            dropped=dropped,
            job_changes=[] if before is None else _job_changes(before, record),
            advantages_note=found.note,
        )

    return Unfinished(of_advantages(journal, record, groups), finish)


def _is_uniform(journal: Journal, members: Sequence[Episode], policies: Sequence[str]) -> bool:
    has_rewards = all(member.reward is not None for member in members)
    return has_rewards and is_uniform(journal, members, policies, of_turns=False)


def _group(members: Sequence[Episode], zero_variance: bool, found: Advantages) -> BatchGroup:
    first = members[0]
    return BatchGroup(
        id=first.group_id,
        task_set=first.task_set,
        task_id=first.task_id,
        zero_variance=zero_variance,
        members=[BatchMember(episode_id=one.id, reward=one.reward, **_advantage(found, one)) for one in members],
    )


def _lost_episodes(journal: Journal, record: Record, before: Record | None) -> list[LostEpisode]:
    """Training episodes that ended while the batch was filled and never train: dropped, aborted or expired ones. The
    newest `MOST_LOST`, newest first.
    """
    start = 0.0 if before is None else before.composed
    longest = float(record.job.get("max_episode_seconds", 0.0))
    rows = journal.file.db.execute(
        "SELECT body FROM episodes WHERE id >= ? AND id < ? AND body ->> 'mode' = 'train' "  # Ids begin with a time.
        "AND (status IN ('aborted', 'expired') OR body ->> 'dropped' != '') "
        "AND json_extract(body, '$.ended') > ? AND json_extract(body, '$.ended') <= ? ORDER BY id DESC LIMIT ?",
        (_first_id(start - longest), _first_id(record.composed + 0.001), start, record.composed, MOST_LOST),
    )
    return [
        LostEpisode(
            episode_id=one.id,
            task_set=one.task_set,
            task_id=one.task_id,
            status=one.status,
            reason=one.reason or one.dropped,
        )
        for one in (journal.episode_of(body) for (body,) in rows)
    ]


def _first_id(time: float) -> str:
    """An id before those of all episodes that began at a time."""
    return new_episode_id(time)[:-16]


def _job_changes(before: Record, after: Record) -> list[SettingChangeView]:
    """The job settings that differ. One that a batch lacks is None there."""
    old, new = dict(flatten(before.job)), dict(flatten(after.job))
    return [
        SettingChangeView(key=key, before=old.get(key), after=new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]


# ---- groups ----------------------------------------------------------------------------------------------------------


def group(journal: Journal, group_id: int, leases: Mapping[str, float]) -> Unfinished[GroupView]:
    """Returns a group. `leases` are the ends of the leases of live episodes. Raises `NotFound`."""
    rows = journal.file.db.execute(
        "SELECT body FROM episodes WHERE json_extract(body, '$.group_id') = ? ORDER BY seq", (group_id,)
    )
    episodes = [journal.episode_of(body) for (body,) in rows]
    if not episodes:
        raise NotFound(f"There is no group {group_id} in this run.", code="group_not_found")
    first = episodes[0]
    state: GroupState = "dropped"
    reason = next((episode.dropped for episode in episodes if episode.dropped), "")
    size, in_batch = 0, None
    of: Members | Advantages = Advantages({}, "the group was dropped")
    filling = next((one for one in journal.groups() if one.id == group_id), None)
    if filling is not None:
        settings = journal.job_settings()
        state, reason = filling.state, filling.reason
        size = filling.size or (settings.job.group_size if settings is not None else 0)
        of = Advantages({}, "the group is in no batch yet")
    elif not reason and (in_batch := _batch_of(journal, episodes)) is not None:
        state, of = "batched", of_advantages(journal, in_batch, members_of(journal, in_batch))

    def finish(found: Advantages) -> GroupView:
        return GroupView(
            id=group_id,
            name=first.group,
            task_set=first.task_set,
            task_id=first.task_id,
            client_id=first.client_id,
            code_version=first.code_version,
            state=state,
            reason="no_members" if state == "dropped" and not reason else reason,
            size=size,
            batch=None if in_batch is None else in_batch.id,
            episodes=[
                MemberView(**facts(one), expires_at=leases.get(one.id), **_advantage(found, one)) for one in episodes
            ],
            advantages_note=found.note,
        )

    return Unfinished(of, finish)


def _batch_of(journal: Journal, episodes: Sequence[Episode]) -> Record | None:
    """The batch that trained episodes of a group, or the newest one if it has some."""
    trained = next((episode.trained_in for episode in episodes if episode.trained_in is not None), None)
    ids = {episode.id for episode in episodes}
    newest = records(journal, None if trained is None else trained + 1, 1)
    return next((one for one in newest if any(ids.intersection(members) for members in one.groups)), None)


# ---- advantages ------------------------------------------------------------------------------------------------------


def members_of(journal: Journal, record: Record) -> list[list[Episode]]:
    """The episodes of each group of a batch that the journal still has."""
    rows = journal.file.db.execute(
        "SELECT body FROM episodes WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps([member for group in record.groups for member in group]),),
    )
    found = {episode.id: episode for episode in (journal.episode_of(body) for (body,) in rows)}
    return [[found[member] for member in group if member in found] for group in record.groups]


def of_advantages(journal: Journal, record: Record, groups: Sequence[Sequence[Episode]]) -> Members | Advantages:
    """The members of a batch, with the recipe of the job it was composed with. A note if members are gone."""
    if sum(map(len, groups)) < sum(map(len, record.groups)):
        return Advantages({}, "the journal no longer has all episodes of the batch")
    return Members(groups, policies_of(journal.origin), record.job.get("recipe"), journal.stored_batch(record.id))


def _advantage(found: Advantages, episode: Episode) -> dict[str, Any]:
    """Returns the fields about the advantage of an episode: one number, or those by policy and role."""
    of = found.of.get(episode.id, {})
    if of.keys() == {""}:
        return {"advantage": of[""]}
    return {"advantages": {role: value for role, value in of.items() if role}}
