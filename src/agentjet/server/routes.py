"""The control routes, under `/swarm/v1/`: episodes, status, health, events, the job, the engine, checkpoints,
evaluations; and the runs of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import StreamingResponse

import agentjet.protocol as bodies
from agentjet.gateway.concurrency import offload
from agentjet.gateway.records import view
from agentjet.server.deps import (
    ADMIN,
    BEARER,
    CLIENT,
    EPISODE,
    EPISODE_SCORER,
    SERVER_ADMIN,
    SHARED_VIEWER,
    VIEWER,
    Deps,
    GuardedRoute,
    IdempotencyKey,
    until_disconnect,
)
from agentjet.server.dialects.chat import to_demonstration
from agentjet.server.error_handlers import PROBLEMS

STOP_PATIENCE = 20.0
"""Seconds that a stop request waits for the end of the stop."""
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events, each one an `Event`.", "content": {"text/event-stream": {}}}
}

router = APIRouter(
    prefix=bodies.PREFIX, tags=["control"], route_class=GuardedRoute, dependencies=[Depends(BEARER)], responses=PROBLEMS
)


@router.post("/episodes", dependencies=CLIENT)
async def begin_episode(
    body: bodies.BeginRequest, request: Request, deps: Deps, idempotency_key: IdempotencyKey = None
) -> bodies.BeginResponse:
    """Start an episode of the run. If the client disconnects while it waits for room, no episode is started."""
    gateway = deps.gateway
    episode = await until_disconnect(request, gateway.begin(body, idempotency_key=idempotency_key))
    job = gateway.swarm.job
    return bodies.BeginResponse(
        episode_id=episode.id,
        base_url=f"{request.base_url}v1",
        api_key=deps.keys.sign(episode.id, episode.begun),
        model=gateway.model_name,
        policies=gateway.policies,
        policy_version=episode.policy_version,
        lease_seconds=job.lease_seconds,
        expires_at=gateway.swarm.expires_at(episode),
        group_size=gateway.swarm.queries.group_size(episode),
        max_turns=episode.max_turns,
    )


@router.post("/episodes/{episode_id}/heartbeat", dependencies=EPISODE)
async def heartbeat(episode_id: str, deps: Deps) -> bodies.EpisodeView:
    """Renew the lease of an episode."""
    episode = await deps.gateway.heartbeat(episode_id)
    return view(episode, expires_at=deps.gateway.swarm.expires_at(episode))


@router.post("/episodes/{episode_id}/finish", dependencies=EPISODE_SCORER)
async def finish_episode(
    episode_id: str, body: bodies.FinishRequest, deps: Deps, idempotency_key: IdempotencyKey = None
) -> bodies.EpisodeView:
    """End an episode with its reward. A repeated request has the same answer."""
    return view(await deps.gateway.finish(episode_id, body, idempotency_key=idempotency_key))


@router.post("/episodes/{episode_id}/abort", dependencies=EPISODE)
async def abort_episode(
    episode_id: str, deps: Deps, body: bodies.AbortRequest | None = None, idempotency_key: IdempotencyKey = None
) -> bodies.EpisodeView:
    """End a failed episode without a score."""
    return view(await deps.gateway.abort(episode_id, body or bodies.AbortRequest(), idempotency_key=idempotency_key))


@router.post("/groups/close", dependencies=CLIENT)
async def close_groups(
    body: bodies.CloseGroupsRequest, deps: Deps, idempotency_key: IdempotencyKey = None
) -> bodies.CloseGroupsResponse:
    """Close groups of which the client begins no further episode, so that training does not wait for one."""
    num_waiting = await deps.gateway.close_groups(body, idempotency_key=idempotency_key)
    return bodies.CloseGroupsResponse(num_waiting=num_waiting)


@router.post("/sft", dependencies=CLIENT)
async def learn_demonstrations(
    body: bodies.SftRequest, request: Request, deps: Deps, idempotency_key: IdempotencyKey = None
) -> bodies.SftResponse:
    """Train on conversations with given answers: one batch. The answer does not wait until the batch is learned."""
    num_bytes, images = len(await request.body()), deps.gateway.swarm.job.images
    given = await offload(num_bytes, lambda: [to_demonstration(one, images) for one in body.demonstrations])
    return await deps.gateway.demonstrate(body, given, idempotency_key=idempotency_key)


@router.get("/machine", dependencies=SHARED_VIEWER)
async def get_machine(deps: Deps) -> bodies.MachineView:
    """Return load and memory of the server's machine, measured at most every five seconds."""
    return await deps.runs.machine.view()


@router.get("/events", dependencies=VIEWER, response_class=StreamingResponse, responses=EVENT_STREAM)
async def get_events(
    deps: Deps,
    after: Annotated[bodies.Int64 | None, Query(ge=0)] = None,
    last_event_id: Annotated[bodies.Int64 | None, Header(ge=0, alias="Last-Event-ID")] = None,
    form: bodies.EventForm = "event",
) -> StreamingResponse:
    """Stream the events numbered above `Last-Event-ID` (or `after`), then new ones, without end. The form `tick` is for
    viewers: at most one message in 0.7 seconds, a `Tick` with the number of new events of each kind.
    """
    start = last_event_id if last_event_id is not None else after or 0
    gateway = deps.gateway
    stream: AsyncGenerator[str | bytes] = (
        _ticks(gateway.ticks.follow(start)) if form == "tick" else _sse(gateway.event_stream(start))
    )
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.put("/job", dependencies=ADMIN)
async def put_job(body: bodies.JobBody, deps: Deps) -> bodies.JobBody:
    """Replace the job settings from the next batch on. 409 if they changed since `revision` was read."""
    return await deps.gateway.replace_job(body)


@router.post("/start", dependencies=ADMIN)
async def start_engine(deps: Deps) -> bodies.StatusResponse:
    """Load the policies of the run. The answer does not wait until they are ready."""
    deps.gateway.engine.start()
    return deps.gateway.status()


@router.post("/stop", dependencies=ADMIN)
async def stop_engine(deps: Deps) -> bodies.StatusResponse:
    """Save a checkpoint and free the policies of the run. If that takes long, the answer's state is `draining`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_PATIENCE):
            await deps.gateway.engine.stop()
    return deps.gateway.status()


@router.post("/cluster/scale", dependencies=ADMIN)
async def scale_cluster(body: bodies.ScaleRequest, deps: Deps) -> bodies.ClusterView:
    """Change the number of sampler replicas of a policy. The answer does not wait until new ones sample."""
    return await deps.gateway.hosted.scale(body)


@router.post("/checkpoints", dependencies=CLIENT)
async def create_checkpoint(deps: Deps, body: bodies.EmptyRequest | None = None) -> bodies.CheckpointInfo:
    """Save a checkpoint of the run's policies, between two batches."""
    return await deps.gateway.versions.save()


@router.post("/exports", dependencies=CLIENT)
async def create_export(deps: Deps, body: bodies.ExportRequest | None = None) -> bodies.CheckpointInfo:
    """Export a present policy to the server's disk, between two batches: a Hugging Face folder or the adapter."""
    wanted = body or bodies.ExportRequest()
    return await deps.gateway.versions.export(policy=wanted.policy, adapter=wanted.adapter)


async def _sse(pages: AsyncGenerator[bytes | None]) -> AsyncGenerator[bytes]:
    yield b": connected\n\n"
    async for page in pages:
        yield b": nothing new\n\n" if page is None else page


async def _ticks(ticks: AsyncGenerator[str | None]) -> AsyncGenerator[str]:
    yield ": connected\n\n"
    async for tick in ticks:
        yield ": nothing new\n\n" if tick is None else f"event: tick\ndata: {tick}\n\n"


TagName = Annotated[str, Path(max_length=256)]


@router.post("/evaluations", dependencies=CLIENT)
async def record_evaluation(
    body: bodies.EvaluationRequest, deps: Deps, idempotency_key: IdempotencyKey = None
) -> list[bodies.EvaluationView]:
    """Store an evaluation of a policy version. The answer lists all evaluations, oldest first."""
    return await deps.gateway.versions.record_evaluation(body, idempotency_key=idempotency_key)


@router.put("/tags/{name}", dependencies=CLIENT)
async def put_tag(name: TagName, body: bodies.TagRequest, deps: Deps) -> list[bodies.CheckpointInfo]:
    """Tag a checkpoint, which is then kept until the tag is removed. The answer lists the checkpoints."""
    return deps.gateway.versions.tag(name, body.policy_version)


@router.delete("/tags/{name}", dependencies=CLIENT)
async def delete_tag(name: TagName, deps: Deps) -> list[bodies.CheckpointInfo]:
    """Remove a tag. The next checkpoint can then remove the checkpoint that had it."""
    return deps.gateway.versions.untag(name)


@router.get("/runs", dependencies=SERVER_ADMIN)
async def list_runs(deps: Deps) -> bodies.RunList:
    """List the runs of the server, the default run first."""
    return bodies.RunList(runs=deps.runs.runs.views())


@router.put("/runs/{name}", dependencies=SERVER_ADMIN)
async def put_run(name: str, body: bodies.RunSettings, deps: Deps) -> bodies.RunView:
    """Create a run, open one that was ended, or change the job of a run. The answer does not wait for the worker."""
    return await deps.runs.put(name, body)


@router.delete("/runs/{name}", dependencies=SERVER_ADMIN)
async def end_run(name: str, deps: Deps) -> bodies.RunView:
    """Save a checkpoint of a run, free its policies and close its journal. Its files remain."""
    return await deps.runs.runs.end(name)
