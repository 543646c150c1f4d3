"""Views for the control API: episodes, steps, and the parts of the status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet import __version__
from agentjet.gateway.loop_lag import Gap
from agentjet.gateway.observability import divergence
from agentjet.protocol import (
    CodeVersionStatus,
    EpisodeList,
    EpisodeView,
    LoopView,
    StepList,
)
from agentjet.swarm import Episode, SwarmState
from agentjet.swarm.queries import Queries
from agentjet.swarm.records import Page, Step
from agentjet.types import EngineState, ProcessStatus

WAITING_FOR = {
    "offline": "a start of the engine",
    "loading": "the worker, which loads the model",
    "draining": "the stop of the engine",
    "failed": "another start of the engine",
}


def view(episode: Episode, *, expires_at: float | None = None) -> EpisodeView:
    """Returns the view of an episode without its calls. `expires_at` is the end of the lease of a live one."""
    return EpisodeView(**facts(episode), expires_at=expires_at)


def facts(episode: Episode) -> dict[str, Any]:
    """Returns the fields of `EpisodeView`, except `expires_at`."""
    same = EpisodeView.model_fields.keys() - {"episode_id", "reason", "expires_at"}
    renamed = {"episode_id": episode.id, "reason": episode.reason or episode.dropped}
    return renamed | {name: getattr(episode, name) for name in same}


def recorded_status(queries: Queries) -> dict[str, Any]:
    """Returns the fields of the status that the journal determines, also without a running server. They are in memory,
    or one row of the journal: `zero_variance`, which reads calls, is not among them.
    """
    job = queries.settings.job
    return {
        "version": __version__,
        "policy_version": queries.policy_version,
        "branched_from": queries.branched_from,
        "batch_size": job.batch_size,
        "group_size": job.group_size,
        "spare_episodes": job.spare_episodes,
        "max_steps": job.max_steps,
        "ends_at_version": queries.ends_at_version,
        "groups_complete": queries.num_groups("complete"),
        "groups_open": queries.num_groups("open"),
        "episodes": queries.status_counts(),
        "dropped": queries.dropped(),
        "last_step": queries.last_step,
        "holding": queries.holding(),
        "places": queries.holders(),
        "code_versions": {
            version: CodeVersionStatus.model_validate(tally, from_attributes=True)
            for version, tally in queries.code_versions().items()
        },
        "task_sets": queries.task_sets(),
    }


def loop(gap: Gap | None) -> LoopView | None:
    """Returns the view of a gap of the event loop."""
    return None if gap is None else LoopView(cpu=gap.cpu, wall=gap.wall, held_by=gap.held_by)


def waiting_for(
    swarm: SwarmState, state: EngineState, reason: str, process: str, doing: str = "", *, names_silent: bool = True
) -> str:
    """Returns the cause that training waits for, or ''. `process`: see `waiting_for_process`; `doing`: slow work."""
    if swarm.store.file.refusal:
        return f"the disk. {swarm.store.file.refusal}"
    if state == "loading":
        return "; ".join(filter(None, [reason, process, doing])) or WAITING_FOR[state]
    if doing and state in ("sampling", "learning", "draining"):
        return f"the engine, {doing}"
    if state not in ("sampling", "learning"):
        return reason or WAITING_FOR[state]
    return process or divergence(swarm.last_step) or swarm.queries.waiting_for(names_silent=names_silent)


def waiting_for_process(processes: Sequence[ProcessStatus]) -> str:
    """Returns the rank or replica without which a policy cannot learn or sample, or ''. `processes` are its own."""
    ranks = [one for one in processes if one.kind == "rank"]
    replicas = [one for one in processes if one.kind == "replica"]
    for process in ranks:
        if not process.is_ready:
            return f"{process.name}, which {process.state}"
    if not replicas and ranks:
        return "a sampler replica"
    if replicas and not any(one.is_ready for one in replicas):
        return f"a sampler replica: {replicas[0].name} {replicas[0].state}"
    return ""


def episode_list(page: Page, leases: Mapping[str, float]) -> EpisodeList:
    """Returns a page of episodes. `leases` are the ends of the leases of live ones."""
    views = [view(episode, expires_at=leases.get(episode.id)) for episode in page.episodes]
    return EpisodeList(episodes=views, next=page.next, total=page.total)


def step_list(steps: Sequence[Step]) -> StepList:
    """Returns steps by column. A step of another recipe may lack metrics."""
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    return StepList(
        versions=[step.version for step in steps],
        times=[step.composed for step in steps],
        metrics={name: [step.metrics.get(name) for step in steps] for name in names},
    )
