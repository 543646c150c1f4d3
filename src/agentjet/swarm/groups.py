"""The rules of groups: when a group is complete, when it is dropped and why. Who joins is `admission`'s.

A group is open until all its `group_size` members finished; a prepared one keeps it open. A lost member frees its
place. One that stays short, with nobody live in it, is closed after `lease_seconds` of waiting for a refill: that long
an abort may delay a batch (once more after a restart), but an expired lease adds nothing. Functions on a `Ledger`,
inside its transactions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from agentjet.config import JobConfig
from agentjet.swarm.ledger import Ledger
from agentjet.swarm.records import Episode, Group


def join(ledger: Ledger, group: Group, episode: Episode) -> None:
    ledger.put_group(replace(group, members=(*group.members, episode.id), touched=episode.begun))


def member_scored(ledger: Ledger, episode: Episode, now: float) -> None:
    """A member's reward is there, or promised: a sign that somebody works on the group."""
    group = _group_of(ledger, episode)
    if group is not None:
        ledger.put_group(replace(group, touched=now))


def satisfied(ledger: Ledger, job: JobConfig, episode: Episode) -> Group | None:
    """The episode's group when it has all the rewards it needs and none in doubt: who is live in it is surplus."""
    group = _group_of(ledger, episode)
    if group is None or group.state != "open":
        return None
    statuses = Counter(ledger.episodes[member].status for member in group.members)
    return group if statuses["finished"] >= job.group_size and not statuses["prepared"] else None


def stale(ledger: Ledger, job: JobConfig) -> list[Group]:
    """The groups with a token too old for the batch that is being filled."""
    too_old = ledger.policy_version - job.max_staleness
    return [
        group
        for group in ledger.groups.values()
        if any(ledger.oldest.get(member, too_old) < too_old for member in group.members)
    ]


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
    """When a short group that waits for nobody is closed; None while a member is live or prepared.

    `opened`: when this server started.
    """
    if group.state != "open" or any(ledger.episodes[member].ended is None for member in group.members):
        return None
    # Nobody could refill it while the server was down, so a restart grants the wait once more. Once: a server that is
    # restarted again and again would otherwise never close it, so two leases after the last touch it ends in any case.
    begun = min(max(group.touched, opened), group.touched + job.lease_seconds)
    return begun + job.lease_seconds


def missing_refills(ledger: Ledger, job: JobConfig, opened: float, now: float) -> str:
    """In words: the refill that training waits for, and when it no longer does; empty when every open group has
    somebody live. Of several groups the one that closes first is named.
    """
    short = [
        (ends, group)
        for group in ledger.groups.values()
        if (ends := patience_ends(ledger, job, group, opened)) is not None
    ]
    if not short:
        return ""
    ends, group = min(short, key=lambda one: (one[0], one[1].id))
    more = f" (and of {len(short) - 1} more)" if len(short) > 1 else ""
    return (
        f"a refill of group {group.name!r} of client {group.client_id!r}{more}, "
        f"which has {len(group.members)} of {job.group_size} episodes and closes in {max(0.0, ends - now):.0f} s"
    )


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
    by_role = [{member.by_role[role] for member in members if role in member.by_role} for role in roles]
    return len({member.reward for member in members}) == 1 and all(len(rewards) == 1 for rewards in by_role)


def drop(ledger: Ledger, group: Group, reason: str, now: float) -> None:
    """A group that will not be trained, for a reason that is counted."""
    dropped = replace(group, state="dropped", reason=reason, closed=now, for_batch=ledger.next_batch)
    ledger.put_group(dropped)
    for episode in [ledger.episodes[member] for member in group.members]:
        if episode.status == "finished":
            ledger.put(replace(episode, dropped=reason))
    _announce(ledger, dropped)


def _announce(ledger: Ledger, group: Group) -> None:
    body = {"group": group.name, "client_id": group.client_id, "state": group.state, "reason": group.reason}
    ledger.emit("group", {**body, "episodes": list(group.members)})


def _group_of(ledger: Ledger, episode: Episode) -> Group | None:
    return None if episode.group_id is None else ledger.groups.get(episode.group_id)


def live_members(ledger: Ledger, group: Group) -> list[Episode]:
    """The members of a group that are still at work."""
    return [ledger.episodes[member] for member in group.members if ledger.episodes[member].status == "live"]
