"""Who may begin: the group that a new training episode joins or opens, or why there is none for it just now.

A group has one client, one task set and one code version, so that what is compared is comparable.
"""

from __future__ import annotations

from agentjet.config import JobConfig
from agentjet.errors import Conflict, Later
from agentjet.protocol import BeginRequest
from agentjet.swarm.ledger import Ledger
from agentjet.swarm.records import Group

RETRY_SECONDS = 1.0
NO_END_RETRY_SECONDS = 60.0


def group_name(request: BeginRequest) -> str:
    """The group as the client knows it; by default its task, told apart from equal ids in other task sets."""
    if request.group:
        return request.group
    return f"{request.task_set}/{request.task_id}" if request.task_set else request.task_id


def trained_out(ledger: Ledger, job: JobConfig) -> bool:
    return 0 < job.max_steps <= ledger.policy_version


def batches_ahead(ledger: Ledger, job: JobConfig) -> int:
    """How many batches may be filled at a time.

    A group that waits behind whole batches grows older by one version with each: so many may wait that none gets too
    old.
    """
    return job.max_staleness + 1 - (ledger.pending is not None)


def admit(ledger: Ledger, job: JobConfig, request: BeginRequest, now: float) -> Group:
    """The group a new training episode joins, perhaps a new one.

    Raises `Later` when the present batch needs none, `Conflict` (`group_closed`) when there is none to join.
    """
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
    if len(ledger.groups) >= job.batch_size * batches_ahead(ledger, job) + job.spare_groups:
        raise Later(f"The batch has its {job.batch_size} groups.", code="batch_full", retry_after=RETRY_SECONDS)
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


def outdated(ledger: Ledger, job: JobConfig, request: BeginRequest) -> list[Group]:
    """The short groups of code that the client no longer runs: nobody will refill them.

    Its word for it is that it begins an episode of another version while it has none at work of theirs.
    """
    if job.mix_code_versions or request.mode != "train":
        return []
    mine = [episode for episode in ledger.undecided() if episode.client_id == request.client_id]
    running = {request.code_version} | {episode.code_version for episode in mine if episode.mode == "train"}
    return [
        group
        for group in ledger.groups.values()
        if group.state == "open" and group.client_id == request.client_id and group.code_version not in running
    ]
