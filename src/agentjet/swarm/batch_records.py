"""Records of groups and batches for people. Reads a journal and changes nothing.

A batch is read without its recipe, which may be a plug-in that this machine does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.errors import ConfigError, NotFound
from agentjet.swarm.advantages import Advantages, advantages
from agentjet.swarm.journal import Journal
from agentjet.swarm.origin import policies_of
from agentjet.swarm.state import Episode, new_episode_id
from agentjet.types import GroupState

MOST_LOST = 1000
"""Unscored and dropped episodes that are listed with a batch."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch, learned or not."""

    id: int
    groups: tuple[tuple[str, ...], ...]
    job: Mapping[str, Any]
    composed: float
    metrics: Mapping[str, float] | None
    """None until it is learned."""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group with its episodes, those that were lost included, in the order they began."""

    id: int
    episodes: Sequence[Episode]
    state: GroupState
    reason: str
    """Why it was dropped, or `short`."""
    size: int
    """Number of finished episodes that complete it; 0 if that is no longer known."""
    batch: int | None
    advantages: Advantages


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A job setting that differs from the one of the batch before. A setting that one of them lacks is None there."""

    key: str
    before: Any
    after: Any


def batch_records(journal: Journal, before: int | None, limit: int) -> list[BatchRecord]:
    """The newest batches, or those before one, newest first."""
    rows = journal.file.db.execute(
        "SELECT body, metrics FROM batches WHERE id < ? ORDER BY id DESC LIMIT ?",
        (2**62 if before is None else before, limit),
    )
    return [_batch_record(*row) for row in rows]


def batch_record(journal: Journal, batch_id: int) -> BatchRecord:
    """A batch. Raises `NotFound`."""
    row = journal.file.db.execute("SELECT body, metrics FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise NotFound(f"There is no batch {batch_id} in this run.", code="batch_not_found")
    return _batch_record(*row)


def _batch_record(body: str, metrics: str | None) -> BatchRecord:
    held = json.loads(body)
    groups = tuple(tuple(members) for members in held["groups"])
    return BatchRecord(
        held["id"], groups, held["job"], held["composed"], None if metrics is None else json.loads(metrics)
    )


def members_of(journal: Journal, batch: BatchRecord) -> list[list[Episode]]:
    """The episodes of each group of a batch that the journal still has."""
    rows = journal.file.db.execute(
        "SELECT body FROM episodes WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps([member for group in batch.groups for member in group]),),
    )
    found = {episode.id: episode for episode in (journal.episode_of(body) for (body,) in rows)}
    return [[found[member] for member in group if member in found] for group in batch.groups]


def batch_advantages(journal: Journal, batch: BatchRecord, groups: Sequence[Sequence[Episode]]) -> Advantages:
    """The advantages of the members of a batch, by the recipe of the job it was composed with."""
    if sum(map(len, groups)) < sum(map(len, batch.groups)):
        return Advantages({}, "the journal no longer has all episodes of the batch")
    try:
        [full] = journal.batches(batch.id, batch.id + 1)
    except ConfigError as error:
        return Advantages({}, str(error))
    return advantages(full.job.recipe, batch.id, groups, policies_of(journal.origin))


def job_changes(journal: Journal, batch: BatchRecord) -> list[SettingChange]:
    """The job settings that differ from those of the batch before; none for the first one."""
    earlier = batch_records(journal, batch.id, 1)
    if not earlier:
        return []
    before, after = dict(_leaves(earlier[0].job, "")), dict(_leaves(batch.job, ""))
    names = dict.fromkeys([*before, *after])
    changes = [SettingChange(name, before.get(name), after.get(name)) for name in names]
    return [change for change in changes if change.before != change.after]


def lost_episodes(journal: Journal, batch: BatchRecord) -> list[Episode]:
    """Training episodes that ended while the batch was filled and never train: dropped, aborted or expired ones. The
    newest `MOST_LOST`, newest first.
    """
    earlier = batch_records(journal, batch.id, 1)
    start = earlier[0].composed if earlier else 0.0
    longest = float(batch.job.get("max_episode_seconds", 0.0))
    rows = journal.file.db.execute(
        "SELECT body FROM episodes WHERE id >= ? AND id < ? AND body ->> 'mode' = 'train' "  # Ids begin with a time.
        "AND (status IN ('aborted', 'expired') OR body ->> 'dropped' != '') "
        "AND json_extract(body, '$.ended') > ? AND json_extract(body, '$.ended') <= ? ORDER BY id DESC LIMIT ?",
        (_first_id(start - longest), _first_id(batch.composed + 0.001), start, batch.composed, MOST_LOST),
    )
    return [journal.episode_of(body) for (body,) in rows]


def _first_id(time: float) -> str:
    """An id before those of all episodes that began at a time."""
    return new_episode_id(time)[:-16]


def group_record(journal: Journal, group_id: int) -> GroupRecord:
    """A group. Raises `NotFound`."""
    rows = journal.file.db.execute(
        "SELECT body FROM episodes WHERE json_extract(body, '$.group_id') = ? ORDER BY seq", (group_id,)
    )
    episodes = [journal.episode_of(body) for (body,) in rows]
    if not episodes:
        raise NotFound(f"There is no group {group_id} in this run.", code="group_not_found")
    filling = next((group for group in journal.groups() if group.id == group_id), None)
    if filling is not None:
        settings = journal.job_settings()
        size = filling.size or (settings.job.group_size if settings is not None else 0)
        note = Advantages({}, "the group is in no batch yet")
        return GroupRecord(group_id, episodes, filling.state, filling.reason, size, None, note)
    dropped = next((episode.dropped for episode in episodes if episode.dropped), "")
    batch = None if dropped else _batch_of(journal, episodes)
    if batch is None:
        note = Advantages({}, "the group was dropped")
        return GroupRecord(group_id, episodes, "dropped", dropped or "no_members", 0, None, note)
    found = batch_advantages(journal, batch, members_of(journal, batch))
    return GroupRecord(group_id, episodes, "batched", "", 0, batch.id, found)


def _batch_of(journal: Journal, episodes: Sequence[Episode]) -> BatchRecord | None:
    trained = next((episode.trained_in for episode in episodes if episode.trained_in is not None), None)
    if trained is not None:
        return batch_record(journal, trained)
    newest = batch_records(journal, None, 1)
    ids = {episode.id for episode in episodes}
    return next((batch for batch in newest if any(ids.intersection(group) for group in batch.groups)), None)


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
