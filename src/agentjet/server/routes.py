"""The control routes, under `/swarm/v1/`: episodes, status, events, the job, the engine, checkpoints, evaluations; and
the runs of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import StreamingResponse

from agentjet.errors import CheckpointError, RequestError
from agentjet.gateway.views import view
from agentjet.protocol import (
    PREFIX,
    AbortRequest,
    BeginRequest,
    BeginResponse,
    CheckpointInfo,
    EmptyRequest,
    EpisodeList,
    EpisodeTree,
    EpisodeView,
    EvaluationRequest,
    EvaluationView,
    Event,
    ExportRequest,
    FinishRequest,
    Int64,
    JobBody,
    RunList,
    RunSettings,
    RunView,
    StatusResponse,
    TagRequest,
)
from agentjet.server.deps import (
    ADMIN,
    BEARER,
    CLIENT,
    EPISODE,
    EPISODE_READER,
    EPISODE_SCORER,
    SERVER_ADMIN,
    VIEWER,
    Deps,
    GuardedRoute,
    IdempotencyKey,
    until_disconnect,
)
from agentjet.server.error_handlers import PROBLEM
from agentjet.types import EpisodeStatus

Stored = TypeVar("Stored")
STOP_PATIENCE = 20.0
"""Seconds that a stop request waits for the end of the stop."""

_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    later = {429, 503}
    return {status: {**PROBLEM, **({"headers": _RETRY_AFTER} if status in later else {})} for status in statuses}


router = APIRouter(
    prefix=PREFIX,
    tags=["control"],
    route_class=GuardedRoute,
    dependencies=[Depends(BEARER)],
    responses=problems_of(400, 401, 403, 413, 422, 500),
)
viewer = [Depends(VIEWER)]
client = [Depends(CLIENT)]
admin = [Depends(ADMIN)]
server_admin = [Depends(SERVER_ADMIN)]
of_episode = [Depends(EPISODE)]
of_episode_reader = [Depends(EPISODE_READER)]
of_episode_scorer = [Depends(EPISODE_SCORER)]


@router.post("/episodes", dependencies=client, responses=problems_of(409, 429, 503))
async def begin_episode(
    body: BeginRequest, request: Request, deps: Deps, idempotency_key: IdempotencyKey = None
) -> BeginResponse:
    """Start an episode of the run. If the client disconnects while it waits for room, no episode is started."""
    gateway = deps.gateway
    episode = await until_disconnect(request, gateway.begin(body, idempotency_key=idempotency_key))
    job = gateway.swarm.job
    return BeginResponse(
        episode_id=episode.id,
        base_url=f"{request.base_url}v1",
        api_key=deps.keys.sign(episode.id, episode.begun),
        model=gateway.model_name,
        policies=gateway.policies,
        policy_version=episode.policy_version,
        lease_seconds=job.lease_seconds,
        expires_at=gateway.swarm.expires_at(episode),
    )


@router.get("/episodes", dependencies=viewer, responses=problems_of(404, 503))
async def list_episodes(
    deps: Deps,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    status: EpisodeStatus | None = None,
    before: Annotated[str, Query(max_length=256)] = "",
) -> EpisodeList:
    """List episodes, newest first. Filters: a status, or those that started before the episode `before`."""
    found = await deps.gateway.recent_episodes(limit, status=status, before=before)
    return EpisodeList(episodes=found)


@router.get("/episodes/{episode_id}", dependencies=of_episode_reader, responses=problems_of(404, 503))
async def get_episode(episode_id: str, deps: Deps) -> EpisodeTree:
    """Return an episode with all its calls: messages, tokens and their authors, log-probabilities, versions."""
    return await deps.gateway.episode_tree(episode_id)


@router.post("/episodes/{episode_id}/heartbeat", dependencies=of_episode, responses=problems_of(404, 409, 503))
async def heartbeat(episode_id: str, deps: Deps) -> EpisodeView:
    """Renew the lease of an episode."""
    return view(await deps.gateway.heartbeat(episode_id))


@router.post("/episodes/{episode_id}/finish", dependencies=of_episode_scorer, responses=problems_of(404, 409, 503))
async def finish_episode(
    episode_id: str, body: FinishRequest, deps: Deps, idempotency_key: IdempotencyKey = None
) -> EpisodeView:
    """End an episode with its reward. A repeated request has the same answer."""
    return view(await deps.gateway.finish(episode_id, body, idempotency_key=idempotency_key))


@router.post("/episodes/{episode_id}/abort", dependencies=of_episode, responses=problems_of(404, 409, 503))
async def abort_episode(
    episode_id: str, deps: Deps, body: AbortRequest | None = None, idempotency_key: IdempotencyKey = None
) -> EpisodeView:
    """End a failed episode without a score."""
    return view(await deps.gateway.abort(episode_id, body or AbortRequest(), idempotency_key=idempotency_key))


@router.get("/status", dependencies=viewer)
async def get_status(deps: Deps) -> StatusResponse:
    """Return the state of the run and of its training."""
    return deps.gateway.status()


@router.get(
    "/events",
    dependencies=viewer,
    response_class=StreamingResponse,
    responses={200: {"description": "Server-sent events, each one an `Event`.", "content": {"text/event-stream": {}}}},
)
async def get_events(
    deps: Deps,
    after: Annotated[Int64 | None, Query(ge=0)] = None,
    last_event_id: Annotated[Int64 | None, Header(ge=0, alias="Last-Event-ID")] = None,
) -> StreamingResponse:
    """Stream the events numbered above `Last-Event-ID` (or `after`), then new ones, without end."""
    start = last_event_id if last_event_id is not None else after or 0
    return StreamingResponse(
        _sse(deps.gateway.events(start)), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


@router.get("/job", dependencies=viewer)
async def get_job(deps: Deps) -> JobBody:
    """Return the job settings and their revision."""
    return deps.gateway.job()


@router.put("/job", dependencies=admin, responses=problems_of(409, 503))
async def put_job(body: JobBody, deps: Deps) -> JobBody:
    """Replace the job settings from the next batch on. 409 if they changed since `revision` was read."""
    return await deps.gateway.replace_job(body)


@router.post("/start", dependencies=admin, responses=problems_of(409, 503))
async def start_engine(deps: Deps) -> StatusResponse:
    """Load the policies of the run. The answer does not wait until they are ready."""
    await deps.gateway.start_engine()
    return deps.gateway.status()


@router.post("/stop", dependencies=admin, responses=problems_of(409))
async def stop_engine(deps: Deps) -> StatusResponse:
    """Save a checkpoint and free the policies of the run. If that takes long, the answer's state is `draining`."""
    try:
        async with asyncio.timeout(STOP_PATIENCE):
            await deps.gateway.stop_engine()
    except TimeoutError:
        pass
    return deps.gateway.status()


@router.get("/checkpoints", dependencies=viewer, responses=problems_of(507))
async def list_checkpoints(deps: Deps) -> list[CheckpointInfo]:
    """List the checkpoints on disk, oldest first, with their tags and scores."""
    return await stored(deps.gateway.versions.checkpoints())


@router.post("/checkpoints", dependencies=client, responses=problems_of(409, 503, 507))
async def create_checkpoint(deps: Deps, body: EmptyRequest | None = None) -> CheckpointInfo:
    """Save a checkpoint of the run's policies, between two batches."""
    return await stored(deps.gateway.versions.save())


@router.post("/exports", dependencies=client, responses=problems_of(409, 503, 507))
async def create_export(deps: Deps, body: ExportRequest | None = None) -> CheckpointInfo:
    """Export a present policy to the server's disk, between two batches: a Hugging Face folder or the adapter."""
    wanted = body or ExportRequest()
    return await stored(deps.gateway.versions.export(policy=wanted.policy, adapter=wanted.adapter))


async def stored(work: Awaitable[Stored]) -> Stored:
    """Returns the result of `work`. Raises `RequestError` (507) if the disk fails."""
    try:
        return await work
    except (CheckpointError, OSError) as error:
        raise RequestError(str(error), code="checkpoint_failed", status=507) from error


async def _sse(events: AsyncGenerator[Event | None]) -> AsyncGenerator[str]:
    yield ": connected\n\n"
    async for event in events:
        if event is None:
            yield ": nothing new\n\n"
        else:
            yield f"id: {event.seq}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"


TagName = Annotated[str, Path(max_length=256)]


@router.post("/evaluations", dependencies=client, responses=problems_of(409, 503))
async def record_evaluation(
    body: EvaluationRequest, deps: Deps, idempotency_key: IdempotencyKey = None
) -> list[EvaluationView]:
    """Store an evaluation of a policy version. The answer lists all evaluations, oldest first."""
    return await deps.gateway.versions.record_evaluation(body, idempotency_key=idempotency_key)


@router.get("/evaluations", dependencies=viewer)
async def list_evaluations(deps: Deps) -> list[EvaluationView]:
    """List all evaluations, oldest first."""
    found = deps.gateway.swarm.queries.evaluations()
    await deps.gateway.durable()
    return found


@router.put("/tags/{name}", dependencies=client, responses=problems_of(404, 409, 507))
async def put_tag(name: TagName, body: TagRequest, deps: Deps) -> list[CheckpointInfo]:
    """Tag a checkpoint, which is then kept until the tag is removed. The answer lists the checkpoints."""
    return await stored(deps.gateway.versions.tag(name, body.policy_version))


@router.delete("/tags/{name}", dependencies=client, responses=problems_of(404, 409, 507))
async def delete_tag(name: TagName, deps: Deps) -> list[CheckpointInfo]:
    """Remove a tag. The next checkpoint can then remove the checkpoint that had it."""
    return await stored(deps.gateway.versions.untag(name))


@router.get("/runs", dependencies=server_admin, responses=problems_of(404))
async def list_runs(deps: Deps) -> RunList:
    """List the runs of the server, the default run first."""
    return RunList(runs=deps.runs.runs.views())


@router.put("/runs/{name}", dependencies=server_admin, responses=problems_of(404, 409, 503))
async def put_run(name: str, body: RunSettings, deps: Deps) -> RunView:
    """Create a run, open one that was ended, or change the job of a run. The answer does not wait for the worker."""
    return await deps.runs.put(name, body)


@router.delete("/runs/{name}", dependencies=server_admin, responses=problems_of(404, 409, 503))
async def end_run(name: str, deps: Deps) -> RunView:
    """Save a checkpoint of a run, free its policies and close its journal. Its files remain."""
    return await deps.runs.runs.end(name)
