"""Who may begin: the group that a new training episode joins or opens, or why there is none for it just now.

A group has one client, one task set and one code version, so that what is compared is comparable.
"""

from __future__ import annotations

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest
from agentjet.swarm.ledger import Ledger
from agentjet.swarm.mixing import RETRY_SECONDS, Mixing, places
from agentjet.swarm.records import Group

NO_END_RETRY_SECONDS = 60.0


def group_name(request: BeginRequest) -> str:
    """The group as the client knows it; by default its task, told apart from equal ids in other task sets."""
    if request.group:
        return request.group
    return f"{request.task_set}/{request.task_id}" if request.task_set else request.task_id


def trained_out(ledger: Ledger, job: JobConfig) -> bool:
    return 0 < job.max_steps <= ledger.policy_version


def admit(ledger: Ledger, mixing: Mixing, job: JobConfig, request: BeginRequest, now: float) -> Group:
    """The group a new training episode joins, perhaps a new one.

    Raises `Later` when the present batch needs none, `Conflict` when there is none to join (`group_closed`), the task
    set has no weight (`task_set_unknown`), or the client has others to begin than one with its share (`task_set_full`).
    """
    mixing.asked(job, request.task_set)
    if ledger.pending is not None and not job.max_staleness:
        raise Later("The worker is learning a batch.", code="not_rolling", retry_after=RETRY_SECONDS)
    if trained_out(ledger, job):
        raise Later(
            f"Training is over: job.max_steps = {job.max_steps} is reached.",
            code="not_rolling",
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


def _open_group(ledger: Ledger, job: JobConfig, request: BeginRequest, name: str) -> Group | None:
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


def check_pin(ledger: Ledger, mixing: Mixing, job: JobConfig, at_version: int, now: float) -> None:
    """An evaluation wants to be answered by one policy version throughout.

    Raises `Conflict` (`version_gone`) when the server is at another one, `Later` (`not_rolling`) when it is about to
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
        raise Later(f"Policy version {at_version} is about to learn.", code="not_rolling", retry_after=RETRY_SECONDS)


def outdated(ledger: Ledger, job: JobConfig, request: BeginRequest) -> list[Group]:
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
