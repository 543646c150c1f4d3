"""Control routes under `/swarm/v1/`: episodes, the engine, the job, checkpoints, status and events.

Routes about policy versions under `/swarm/v1/`: their scores on held-out tasks, and the tags of checkpoints.

Lease routes under `/swarm/v1/`: a server for one holder alone, who may have it serve runs of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from starlette.responses import StreamingResponse

from agentjet.config import parse_job
from agentjet.errors import CheckpointError, ConfigError, Conflict, InvalidRequest, RequestError
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
    LeaseRequest,
    LeaseView,
    Problem,
    RunRequest,
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
    VIEWER,
    AppDeps,
    Deps,
    GuardedRoute,
    IdempotencyKey,
    LeaseEpoch,
    require_lease,
)
from agentjet.server.disconnect import until_disconnect
from agentjet.types import EpisodeStatus

Stored = TypeVar("Stored")
STOP_PATIENCE = 20.0
"""Seconds a stop is waited for before its present state is answered."""

_PROBLEM: dict[str, Any] = {"model": Problem, "content": {"application/problem+json": {}}}
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    later = {429, 503}
    return {status: {**_PROBLEM, **({"headers": _RETRY_AFTER} if status in later else {})} for status in statuses}


def control_router(tag: str) -> APIRouter:
    """A router of control routes: each of them names who may use it."""
    return APIRouter(
        prefix=PREFIX,
        tags=[tag],
        route_class=GuardedRoute,
        dependencies=[Depends(BEARER)],
        responses=problems_of(400, 401, 403, 413, 422, 500),
    )


router = control_router("control")
viewer = [Depends(VIEWER)]
client = [Depends(CLIENT)]
admin = [Depends(ADMIN)]
leased = [Depends(require_lease)]
"""What nobody but the holder of a lease may do while there is one."""
of_episode = [Depends(EPISODE)]
of_episode_reader = [Depends(EPISODE_READER)]
of_episode_scorer = [Depends(EPISODE_SCORER)]


@router.post("/episodes", dependencies=client + leased, responses=problems_of(409, 429, 503))
async def begin_episode(
    body: BeginRequest, request: Request, wired: Deps, idempotency_key: IdempotencyKey = None
) -> BeginResponse:
    """Begin an episode. A client that goes away while it waits for room gets none."""
    gateway = wired.gateway
    episode = await until_disconnect(request, gateway.begin(body, idempotency_key=idempotency_key))
    job = gateway.swarm.job
    return BeginResponse(
        episode_id=episode.id,
        base_url=f"{request.base_url}v1",
        api_key=wired.keys.sign(episode.id, episode.begun),
        model=gateway.model_name,
        policy_version=episode.policy_version,
        lease_seconds=job.lease_seconds,
        expires_at=gateway.swarm.expires_at(episode),
    )


@router.get("/episodes", dependencies=viewer, responses=problems_of(404, 503))
async def list_episodes(
    wired: Deps,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    team: Annotated[str, Query(max_length=256)] = "",
    status: EpisodeStatus | None = None,
    before: Annotated[str, Query(max_length=256)] = "",
) -> EpisodeList:
    """The newest episodes, newest first: all, those of a team, those of a status, those begun `before` an episode."""
    found = await wired.gateway.recent_episodes(limit, team=team, status=status, before=before)
    return EpisodeList(episodes=found)


@router.get("/episodes/{episode_id}", dependencies=of_episode_reader, responses=problems_of(404, 503))
async def get_episode(episode_id: str, wired: Deps) -> EpisodeTree:
    """An episode with every call: messages, tokens, who wrote them, log-probabilities and versions."""
    return await wired.gateway.episode_tree(episode_id)


@router.post("/episodes/{episode_id}/heartbeat", dependencies=of_episode, responses=problems_of(404, 409, 503))
async def heartbeat(episode_id: str, wired: Deps) -> EpisodeView:
    """Renew an episode's lease."""
    return view(await wired.gateway.heartbeat(episode_id))


@router.post("/episodes/{episode_id}/prepare", dependencies=of_episode_scorer, responses=problems_of(404, 409, 503))
async def prepare_episode(
    episode_id: str, body: FinishRequest, wired: Deps, idempotency_key: IdempotencyKey = None
) -> EpisodeView:
    """Promise an episode's reward: a later finish with the same body will be granted. It trains nothing until then."""
    return view(await wired.gateway.prepare(episode_id, body, idempotency_key=idempotency_key))


@router.post("/episodes/{episode_id}/finish", dependencies=of_episode_scorer, responses=problems_of(404, 409, 503))
async def finish_episode(
    episode_id: str, body: FinishRequest, wired: Deps, idempotency_key: IdempotencyKey = None
) -> EpisodeView:
    """End an episode with its reward. Twice gives the same answer twice."""
    return view(await wired.gateway.finish(episode_id, body, idempotency_key=idempotency_key))


@router.post("/episodes/{episode_id}/abort", dependencies=of_episode, responses=problems_of(404, 409, 503))
async def abort_episode(
    episode_id: str, wired: Deps, body: AbortRequest | None = None, idempotency_key: IdempotencyKey = None
) -> EpisodeView:
    """End an episode that failed; it is never scored."""
    return view(await wired.gateway.abort(episode_id, body or AbortRequest(), idempotency_key=idempotency_key))


@router.get("/status", dependencies=viewer)
async def get_status(wired: Deps) -> StatusResponse:
    """What the server does, and what training waits for."""
    return wired.gateway.status()


@router.get(
    "/events",
    dependencies=viewer,
    response_class=StreamingResponse,
    responses={200: {"description": "Server-sent events, each one an `Event`.", "content": {"text/event-stream": {}}}},
)
async def get_events(
    wired: Deps,
    after: Annotated[Int64 | None, Query(ge=0)] = None,
    last_event_id: Annotated[Int64 | None, Header(ge=0, alias="Last-Event-ID")] = None,
) -> StreamingResponse:
    """Events numbered above `Last-Event-ID` (or `after`), then those that come, without end."""
    start = last_event_id if last_event_id is not None else after or 0
    return StreamingResponse(
        _sse(wired.gateway.events(start)), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


@router.get("/job", dependencies=viewer)
async def get_job(wired: Deps) -> JobBody:
    """The job settings and their revision."""
    return wired.gateway.job()


@router.put("/job", dependencies=admin + leased, responses=problems_of(409, 503))
async def put_job(body: JobBody, wired: Deps) -> JobBody:
    """Replace the job settings, unless they changed since `revision` was read. They hold from the next batch on."""
    return await wired.gateway.replace_job(body)


@router.post("/start", dependencies=admin + leased, responses=problems_of(409, 503))
async def start_engine(wired: Deps) -> StatusResponse:
    """Bring the worker up; the answer does not wait for it."""
    await wired.gateway.start_engine()
    return wired.gateway.status()


@router.post("/stop", dependencies=admin + leased, responses=problems_of(409))
async def stop_engine(wired: Deps) -> StatusResponse:
    """Save a checkpoint and end the worker. When that takes long the answer's state is still `draining`."""
    try:
        async with asyncio.timeout(STOP_PATIENCE):
            await wired.gateway.stop_engine()
    except TimeoutError:
        pass
    return wired.gateway.status()


@router.get("/checkpoints", dependencies=viewer, responses=problems_of(507))
async def list_checkpoints(wired: Deps) -> list[CheckpointInfo]:
    """The checkpoints on disk, oldest first, with their tags and scores."""
    return await stored(wired.gateway.versions.checkpoints())


@router.post("/checkpoints", dependencies=client + leased, responses=problems_of(409, 503, 507))
async def create_checkpoint(wired: Deps, body: EmptyRequest | None = None) -> CheckpointInfo:
    """Save a checkpoint of the present policy, between two batches."""
    return await stored(wired.gateway.versions.save())


@router.post("/exports", dependencies=client + leased, responses=problems_of(409, 503, 507))
async def create_export(wired: Deps, body: ExportRequest | None = None) -> CheckpointInfo:
    """Write the present policy on the server's disk, between two batches: as a plain Hugging Face folder, or its
    adapter alone.
    """
    return await stored(wired.gateway.versions.export(adapter=body is not None and body.adapter))


async def stored(work: Awaitable[Stored]) -> Stored:
    """The result of work on checkpoints; what the disk refuses is answered with 507."""
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

versions_router = control_router("versions")


@versions_router.post("/evaluations", dependencies=client + leased, responses=problems_of(409, 503))
async def record_evaluation(
    body: EvaluationRequest, wired: Deps, idempotency_key: IdempotencyKey = None
) -> list[EvaluationView]:
    """Store the score of a policy version; the answer lists every evaluation, in the order they came."""
    return await wired.gateway.versions.record_evaluation(body, idempotency_key=idempotency_key)


@versions_router.get("/evaluations", dependencies=viewer)
async def list_evaluations(wired: Deps) -> list[EvaluationView]:
    """Every evaluation, in the order they came."""
    found = wired.gateway.swarm.queries.evaluations()
    await wired.gateway.durable()
    return found


@versions_router.put("/tags/{name}", dependencies=client + leased, responses=problems_of(404, 409, 507))
async def put_tag(name: TagName, body: TagRequest, wired: Deps) -> list[CheckpointInfo]:
    """Name a checkpoint: it is kept until the tag is removed. The answer lists the checkpoints."""
    return await stored(wired.gateway.versions.tag(name, body.policy_version))


@versions_router.delete("/tags/{name}", dependencies=client + leased, responses=problems_of(404, 409, 507))
async def delete_tag(name: TagName, wired: Deps) -> list[CheckpointInfo]:
    """Remove a name; its checkpoint is rotated like any other from the next one on."""
    return await stored(wired.gateway.versions.untag(name))


lease_router = control_router("lease")


@lease_router.get("/lease", dependencies=viewer)
async def get_lease(wired: Deps) -> LeaseView:
    """Who has the server for itself, and which run it serves."""
    return _view(wired)


@lease_router.put("/lease", dependencies=admin, responses=problems_of(409))
async def put_lease(body: LeaseRequest, wired: Deps) -> LeaseView:
    """Take the lease, or renew it. Whoever does not show its epoch in `AgentJet-Lease` begins no episode meanwhile."""
    wired.lease.take(body)
    return _view(wired)


@lease_router.delete("/lease", dependencies=admin)
async def delete_lease(wired: Deps) -> LeaseView:
    """End the lease, whoever has it; the server goes back to its own run."""
    await wired.runs.enter("", None)
    wired.lease.end()
    return _view(wired)


@lease_router.put("/run", dependencies=admin, responses=problems_of(409, 503))
async def put_run(body: RunRequest, wired: Deps, epoch: LeaseEpoch = None) -> StatusResponse:
    """Serve a run of the lease's holder: from the base model, or from where it was left. The answer does not wait for
    the worker.
    """
    if epoch is None:
        raise Conflict("Runs are served under a lease: take one first, and show its epoch.", code="no_lease")
    wired.lease.check(epoch)
    try:
        job = parse_job(body.job)
    except ConfigError as error:
        raise InvalidRequest(str(error), code="invalid_setting", status=422, param="job") from None
    try:
        await wired.runs.enter(body.name, job)
    except ConfigError as error:
        raise Conflict(f"Run {body.name!r} cannot be served here: {error}.", code="run_refused") from None
    return wired.gateway.status()


def _view(wired: AppDeps) -> LeaseView:
    lease = wired.lease
    left = lease.seconds_left
    return LeaseView(holder=lease.holder if left else "", epoch=lease.epoch, seconds_left=left, run=wired.runs.name)
