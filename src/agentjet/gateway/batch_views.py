"""Views of groups and batches, from a journal alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

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
)
from agentjet.swarm import Episode, Journal
from agentjet.swarm.advantages import Advantages
from agentjet.swarm.batch_forest import is_uniform
from agentjet.swarm.batch_records import (
    BatchRecord,
    batch_advantages,
    batch_record,
    batch_records,
    group_record,
    job_changes,
    lost_episodes,
    members_of,
)
from agentjet.swarm.origin import policies_of


def group(journal: Journal, group_id: int, leases: Mapping[str, float]) -> GroupView:
    """Returns a group. `leases` are the ends of the leases of live episodes. Raises `NotFound`."""
    record = group_record(journal, group_id)
    first = record.episodes[0]
    return GroupView(
        id=record.id,
        name=first.group,
        task_set=first.task_set,
        task_id=first.task_id,
        client_id=first.client_id,
        code_version=first.code_version,
        state=record.state,
        reason=record.reason,
        size=record.size,
        batch=record.batch,
        episodes=[
            MemberView(**facts(one), expires_at=leases.get(one.id), **_advantage(record.advantages, one))
            for one in record.episodes
        ],
        advantages_note=record.advantages.note,
    )


def batch_list(journal: Journal, before: int | None, limit: int) -> BatchList:
    """Returns a page of batches, newest first."""
    found = batch_records(journal, before, limit + 1)
    page = found[:limit]
    return BatchList(batches=list(map(_summary, page)), next=page[-1].id if len(found) > len(page) else None)


def batch(journal: Journal, batch_id: int) -> BatchView:
    """Returns a batch. Raises `NotFound`."""
    record = batch_record(journal, batch_id)
    groups = members_of(journal, record)
    advantages = batch_advantages(journal, record, groups)
    policies = policies_of(journal.origin)
    lost = lost_episodes(journal, record)
    return BatchView(
        id=record.id,
        state=_state(record),
        composed=record.composed,
        metrics=dict(record.metrics or {}),
        groups=[_group(journal, members, advantages, policies) for members in groups if members],
        dropped=[
            LostEpisode(
                episode_id=one.id,
                task_set=one.task_set,
                task_id=one.task_id,
                status=one.status,
                reason=one.reason or one.dropped,
            )
            for one in lost
        ],
        job_changes=[SettingChangeView(**asdict(change)) for change in job_changes(journal, record)],
        advantages_note=advantages.note,
    )


def _group(journal: Journal, members: Sequence[Episode], advantages: Advantages, policies: Sequence[str]) -> BatchGroup:
    first = members[0]
    has_rewards = all(member.reward is not None for member in members)
    return BatchGroup(
        id=first.group_id,
        task_set=first.task_set,
        task_id=first.task_id,
        zero_variance=has_rewards and is_uniform(journal, members, policies, of_turns=False),
        members=[BatchMember(episode_id=one.id, reward=one.reward, **_advantage(advantages, one)) for one in members],
    )


def _advantage(advantages: Advantages, episode: Episode) -> dict[str, Any]:
    """Returns the fields about the advantage of an episode: one number, or those by policy and role."""
    of = advantages.of.get(episode.id, {})
    if of.keys() == {""}:
        return {"advantage": of[""]}
    return {"advantages": {role: value for role, value in of.items() if role}}


def _summary(record: BatchRecord) -> BatchSummary:
    return BatchSummary(
        id=record.id,
        state=_state(record),
        composed=record.composed,
        groups=len(record.groups),
        episodes=sum(map(len, record.groups)),
        reward_mean=(record.metrics or {}).get("reward/mean"),
    )


def _state(record: BatchRecord) -> Any:
    return "pending" if record.metrics is None else "learned"
