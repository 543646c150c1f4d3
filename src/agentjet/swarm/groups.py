"""The rules of groups: who joins, when a group is complete, when it is dropped and why.

A group is open until all its `group_size` members finished. A lost member frees its place. One that stays short,
with nobody live in it, is closed after `lease_seconds` of waiting for a refill: that long an abort may delay a
batch, but an expired lease adds nothing. Functions on a `Ledger`, inside its transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentjet.config import JobConfig
from agentjet.errors import Later
from agentjet.protocol import BeginRequest
from agentjet.swarm.ledger import Ledger
from agentjet.swarm.records import Episode, Group

RETRY_SECONDS = 1.0
NO_END_RETRY_SECONDS = 60.0


def group_name(request: BeginRequest) -> str:
    """The group as the client knows it; by default its task, told apart from equal ids in other task sets."""
    if request.group:
        return request.group
    return f"{request.task_set}/{request.task_id}" if request.task_set else request.task_id


def trained_out(ledger: Ledger, job: JobConfig) -> bool:
    return 0 < job.max_steps <= ledger.policy_version


def admit(ledger: Ledger, job: JobConfig, request: BeginRequest, now: float) -> Group:
    """The group a new training episode joins, perhaps a new one. Raises `Later` when the present batch needs none."""
    if ledger.pending is not None:
        raise Later("The worker is learning a batch.", code="not_rolling", retry_after=RETRY_SECONDS)
    if trained_out(ledger, job):
        raise Later(
            f"Training is over: job.max_steps = {job.max_steps} is reached.",
            code="not_rolling",
            retry_after=NO_END_RETRY_SECONDS,
        )
    name = group_name(request)
    for group in ledger.groups.values():
        if group.state == "open" and (group.client_id, group.name) == (request.client_id, name):
            if len(group.members) < job.group_size:
                return group
            raise Later(
                f"Group {name!r} has its {job.group_size} episodes.", code="group_full", retry_after=RETRY_SECONDS
            )
    if len(ledger.groups) >= job.batch_size:
        raise Later(f"The batch has its {job.batch_size} groups.", code="batch_full", retry_after=RETRY_SECONDS)
    return Group(ledger.journal.next_group_id(), request.client_id, name, opened=now, touched=now)


def join(ledger: Ledger, group: Group, episode: Episode) -> None:
    ledger.put_group(replace(group, members=(*group.members, episode.id), touched=episode.begun))


def member_finished(ledger: Ledger, job: JobConfig, episode: Episode, now: float) -> None:
    """Close the group when this was the last one it waited for."""
    group = _group_of(ledger, episode)
    if group is None:
        return
    ledger.put_group(replace(group, touched=now))
    if len(group.members) >= job.group_size and not _num_live(ledger, group):
        close(ledger, job, ledger.groups[group.id], now)


def member_lost(ledger: Ledger, episode: Episode, now: float) -> None:
    """Free the place of a member that aborted or expired; a group left with nobody frees its own place in the batch."""
    group = _group_of(ledger, episode)
    if group is None:
        return
    members = tuple(member for member in group.members if member != episode.id)
    touched = now if episode.status == "aborted" else group.touched
    ledger.put_group(replace(group, members=members, touched=touched))
    if not members:
        drop(ledger, ledger.groups[group.id], "no_members", now)


def patience_ends(ledger: Ledger, job: JobConfig, group: Group, opened: float) -> float | None:
    """When a short group with nobody live is closed; None while somebody is. `opened`: when this server started."""
    if group.state != "open" or _num_live(ledger, group):
        return None
    return max(group.touched, opened) + job.lease_seconds


def close(ledger: Ledger, job: JobConfig, group: Group, now: float) -> None:
    """Decide what becomes of a group whose members have all finished: it trains, or is dropped with a reason."""
    members = [ledger.episodes[member] for member in group.members]
    reason = _reason_to_drop(ledger, job, members)
    if reason:
        drop(ledger, group, reason, now)
        return
    short = "short" if len(members) < job.group_size else ""
    ledger.put_group(replace(group, state="complete", reason=short, closed=now))
    _announce(ledger, ledger.groups[group.id])


def _reason_to_drop(ledger: Ledger, job: JobConfig, members: Sequence[Episode]) -> str:
    if len(members) < job.min_group_size:
        return "too_few"
    if not any(member.num_tokens for member in members):
        return "no_tokens"
    if job.algorithm.drop_zero_variance and _all_equal(members):
        cap = job.algorithm.max_dropped_groups or 10 * job.batch_size
        if ledger.journal.dropped_groups(ledger.next_batch).get("zero_variance", 0) < cap:
            return "zero_variance"
    return ""


def _all_equal(members: Sequence[Episode]) -> bool:
    """Whether no role could learn from comparing these episodes."""
    roles = {role for member in members for role in member.by_role}
    rewards = {(m.reward, *(m.by_role.get(role, m.reward) for role in sorted(roles))) for m in members}
    return len(rewards) == 1


def drop(ledger: Ledger, group: Group, reason: str, now: float) -> None:
    """A group that will not be trained, for a reason that is counted."""
    dropped = replace(group, state="dropped", reason=reason, closed=now, for_batch=ledger.next_batch)
    ledger.put_group(dropped)
    for member in group.members:
        ledger.put(replace(ledger.episodes[member], dropped=reason))
    _announce(ledger, dropped)


def _announce(ledger: Ledger, group: Group) -> None:
    body = {"group": group.name, "client_id": group.client_id, "state": group.state, "reason": group.reason}
    ledger.emit("group", {**body, "episodes": list(group.members)})


def _group_of(ledger: Ledger, episode: Episode) -> Group | None:
    return None if episode.group_id is None else ledger.groups.get(episode.group_id)


def _num_live(ledger: Ledger, group: Group) -> int:
    return sum(ledger.episodes[member].status == "live" for member in group.members)
