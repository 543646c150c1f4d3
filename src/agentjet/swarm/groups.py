"""The rules of groups: when a group is complete, when it is dropped and why. Who joins is `admission`'s.

A group is open until all its `group_size` members finished; a prepared one keeps it open. A lost member frees its
place. One that stays short, with nobody live in it, is closed after `lease_seconds` of waiting for a refill: that long
an abort may delay a batch (once more after a restart), but an expired lease adds nothing. Functions on a `Store`,
inside its transactions.

Who may begin: the group that a new training episode joins or opens, or why there is none for it just now.

A group has one client, one task set and one code version, so that what is compared is comparable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest
from agentjet.swarm.mixture import RETRY_SECONDS, Mixture, places
from agentjet.swarm.records import Episode, Group
from agentjet.swarm.state_store import Store


def join(ledger: Store, group: Group, episode: Episode) -> None:
    ledger.put_group(replace(group, members=(*group.members, episode.id), touched=episode.begun))


def member_scored(ledger: Store, episode: Episode, now: float) -> None:
    """A member's reward is there, or promised: a sign that somebody works on the group."""
    group = _group_of(ledger, episode)
    if group is not None:
        ledger.put_group(replace(group, touched=now))


def satisfied(ledger: Store, job: JobConfig, episode: Episode) -> Group | None:
    """The episode's group when it has all the rewards it needs and none in doubt: who is live in it is surplus."""
    group = _group_of(ledger, episode)
    if group is None or group.state != "open":
        return None
    statuses = Counter(ledger.episodes[member].status for member in group.members)
    return group if statuses["finished"] >= job.group_size and not statuses["prepared"] else None


def stale(ledger: Store, job: JobConfig) -> list[Group]:
    """The groups with a token too old for the batch that is being filled."""
    too_old = ledger.policy_version - job.max_staleness
    return [
        group
        for group in ledger.groups.values()
        if any(ledger.oldest.get(member, too_old) < too_old for member in group.members)
    ]


def member_lost(ledger: Store, episode: Episode, now: float) -> None:
    """Free the place of a member that aborted or expired; a group left with nobody frees its own place in the batch."""
    group = _group_of(ledger, episode)
    if group is None:
        return
    members = tuple(member for member in group.members if member != episode.id)
    touched = now if episode.status == "aborted" else group.touched
    ledger.put_group(replace(group, members=members, touched=touched))
    if not members:
        drop(ledger, ledger.groups[group.id], "no_members", now)


def refill_deadline(ledger: Store, job: JobConfig, group: Group, opened: float) -> float | None:
    """When a short group that waits for nobody is closed; None while a member is live or prepared.

    `opened`: when this server started.
    """
    if group.state != "open" or any(ledger.episodes[member].ended is None for member in group.members):
        return None
    # Nobody could refill it while the server was down, so a restart grants the wait once more. Once: a server that is
    # restarted again and again would otherwise never close it, so two leases after the last touch it ends in any case.
    begun = min(max(group.touched, opened), group.touched + job.lease_seconds)
    return begun + job.lease_seconds


def missing_refills(ledger: Store, job: JobConfig, opened: float, now: float) -> str:
    """In words: the refill that training waits for, and when it no longer does; empty when every open group has
    somebody live. Of several groups the one that closes first is named.
    """
    short = [
        (ends, group)
        for group in ledger.groups.values()
        if (ends := refill_deadline(ledger, job, group, opened)) is not None
    ]
    if not short:
        return ""
    ends, group = min(short, key=lambda one: (one[0], one[1].id))
    more = f" (and of {len(short) - 1} more)" if len(short) > 1 else ""
    return (
        f"a refill of group {group.name!r} of client {group.client_id!r}{more}, "
        f"which has {len(group.members)} of {job.group_size} episodes and closes in {max(0.0, ends - now):.0f} s"
    )


def close(ledger: Store, job: JobConfig, group: Group, now: float) -> None:
    """Decide what becomes of a group whose members have all finished: it trains, or is dropped with a reason."""
    members = [ledger.episodes[member] for member in group.members]
    reason = _reason_to_drop(ledger, job, members)
    if reason:
        drop(ledger, group, reason, now)
        return
    short = "short" if len(members) < job.group_size else ""
    ledger.put_group(replace(group, state="complete", reason=short, closed=now))
    _announce(ledger, ledger.groups[group.id])


def _reason_to_drop(ledger: Store, job: JobConfig, members: Sequence[Episode]) -> str:
    if len(members) < job.min_group_size:
        return "too_few"
    if not any(member.num_tokens for member in members):
        return "no_tokens"
    if job.algorithm.drop_zero_variance and all_equal(members):
        cap = job.algorithm.max_dropped_groups or 10 * job.batch_size
        if ledger.journal.dropped_groups(ledger.next_batch).get("zero_variance", 0) < cap:
            return "zero_variance"
    return ""


def all_equal(members: Sequence[Episode]) -> bool:
    """True if no role could learn from comparing these episodes: each has the same reward in all of them."""
    roles = {role for member in members for role in member.by_role}
    by_role = [{member.by_role[role] for member in members if role in member.by_role} for role in roles]
    return len({member.reward for member in members}) == 1 and all(len(rewards) == 1 for rewards in by_role)


def drop(ledger: Store, group: Group, reason: str, now: float) -> None:
    """A group that will not be trained, for a reason that is counted."""
    dropped = replace(group, state="dropped", reason=reason, closed=now, for_batch=ledger.next_batch)
    ledger.put_group(dropped)
    for episode in [ledger.episodes[member] for member in group.members]:
        if episode.status == "finished":
            ledger.put(replace(episode, dropped=reason))
    _announce(ledger, dropped)


def _announce(ledger: Store, group: Group) -> None:
    body = {"group": group.name, "client_id": group.client_id, "state": group.state, "reason": group.reason}
    ledger.emit("group", {**body, "episodes": list(group.members)})


def _group_of(ledger: Store, episode: Episode) -> Group | None:
    return None if episode.group_id is None else ledger.groups.get(episode.group_id)


def live_members(ledger: Store, group: Group) -> list[Episode]:
    """The members of a group that are still at work."""
    return [ledger.episodes[member] for member in group.members if ledger.episodes[member].status == "live"]


NO_END_RETRY_SECONDS = 60.0


def group_name(request: BeginRequest) -> str:
    """The group as the client knows it; by default its task, told apart from equal ids in other task sets."""
    if request.group:
        return request.group
    return f"{request.task_set}/{request.task_id}" if request.task_set else request.task_id


def training_is_over(ledger: Store, job: JobConfig) -> bool:
    return 0 < job.max_steps <= ledger.policy_version


def admit(ledger: Store, mixing: Mixture, job: JobConfig, request: BeginRequest, now: float) -> Group:
    """The group a new training episode joins, perhaps a new one.

    Raises `Later` when the present batch needs none, `Conflict` when there is none to join (`group_closed`), the task
    set has no weight (`task_set_unknown`), or the client has others to begin than one with its share (`task_set_full`).
    """
    mixing.asked(job, request.task_set)
    if ledger.pending is not None and not job.max_staleness:
        raise Later("The worker is learning a batch.", code="not_sampling", retry_after=RETRY_SECONDS)
    if training_is_over(ledger, job):
        raise Later(
            f"Training is over: job.max_steps = {job.max_steps} is reached.",
            code="not_sampling",
            retry_after=NO_END_RETRY_SECONDS,
        )
    name = group_name(request)
    group = _open_group(ledger, job, request, name)
    if group is not None:
        if len(group.members) < job.group_size + job.spare_episodes:
            return group
        raise Later(f"Group {name!r} has its {job.group_size} episodes.", code="group_full", retry_after=RETRY_SECONDS)
    if request.join_only:
        raise Conflict(f"There is no open group {name!r} to join.", code="group_closed")
    if len(ledger.groups) >= places(ledger, job):
        raise Later(f"The batch has its {job.batch_size} groups.", code="batch_full", retry_after=RETRY_SECONDS)
    try:
        mixing.check_room(job, request.task_set)
    except Later as full:
        if request.unless_full:  # It is not to be waited for.
            raise Conflict(str(full), code=full.code) from None
        raise
    return Group(
        ledger.journal.next_group_id(),
        request.client_id,
        name,
        opened=now,
        touched=now,
        task_set=request.task_set,
        code_version=request.code_version,
    )


def _open_group(ledger: Store, job: JobConfig, request: BeginRequest, name: str) -> Group | None:
    asked = (request.client_id, name, request.task_set)
    return next(
        (
            group
            for group in ledger.groups.values()
            if group.state == "open"
            and (group.client_id, group.name, group.task_set) == asked
            and (job.mix_code_versions or group.code_version == request.code_version)
        ),
        None,
    )


def check_pin(ledger: Store, mixing: Mixture, job: JobConfig, at_version: int, now: float) -> None:
    """An evaluation wants to be answered by one policy version throughout.

    Raises `Conflict` (`version_gone`) when the server is at another one, `Later` (`not_sampling`) when it is about to
    be: while it learns, and when a whole batch has waited for evaluations for `max_episode_seconds`.
    """
    if at_version != ledger.policy_version:
        raise Conflict(
            f"The server is at policy version {ledger.policy_version}, not at {at_version}: begin at that one, or "
            "without at_version at whichever is the newest.",
            code="version_gone",
        )
    chosen = mixing.chosen(job)
    waits_since = max((group.closed or now for group in chosen), default=now) if chosen else now
    if ledger.pending is not None or now - waits_since >= job.max_episode_seconds:
        raise Later(f"Policy version {at_version} is about to learn.", code="not_sampling", retry_after=RETRY_SECONDS)


def outdated(ledger: Store, job: JobConfig, request: BeginRequest) -> list[Group]:
    """The short groups of code that the client no longer runs: nobody will refill them.

    Its word for it is that it begins an episode of another version while it has none at work of theirs.
    """
    if job.mix_code_versions or request.mode != "train":
        return []
    older = [
        group
        for group in ledger.groups.values()
        if group.code_version != request.code_version and group.state == "open" and group.client_id == request.client_id
    ]
    if not older:
        return []
    mine = [episode for episode in ledger.undecided() if episode.client_id == request.client_id]
    running = {episode.code_version for episode in mine if episode.mode == "train"}
    return [group for group in older if group.code_version not in running]
