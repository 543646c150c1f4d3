"""The routes under `/swarm/v1/` that control a run and read its records, those of sessions, and those for operators.

`records` is a separate router. Its routes need the reader of a run and no gateway, so that `agentjet look` has the
same ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from starlette.responses import JSONResponse, Response, StreamingResponse

import agentjet.protocol as bodies
from agentjet.errors import Forbidden
from agentjet.front.concurrency import offload
from agentjet.front.dialects.completions import to_demonstration
from agentjet.front.http import BEARER, PROBLEM, Presence, bearer_of
from agentjet.front.keys import CODE_SECONDS, LEVELS, SESSION_PREFIX, Bearer
from agentjet.server.access import (
    ADMIN,
    CLIENT,
    EPISODE,
    EPISODE_READER,
    EPISODE_SCORER,
    SERVER_ADMIN,
    SHARED_VIEWER,
    SMALL_BODY,
    VIEWER,
    Deps,
    IdempotencyKey,
    Reading,
    ReadRoute,
    front_url,
    new_router,
)
from agentjet.server.monitoring import exposition
from agentjet.server.records import view
from agentjet.types import EngineState

STOP_PATIENCE = 20.0
"""Seconds that a stop request waits for the end of the stop."""
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events, each one an `Event`.", "content": {"text/event-stream": {}}}
}

router = new_router("control", dependencies=[Depends(BEARER)])
records = new_router("records", dependencies=[Depends(BEARER)])
sessions = new_router("page")
operations = APIRouter(tags=["operations"], route_class=ReadRoute)

# --- control


@router.post("/episodes", dependencies=CLIENT)
async def begin_episode(
    body: bodies.BeginRequest, request: Request, deps: Deps, idempotency_key: IdempotencyKey = None
) -> bodies.BeginResponse:
    """Start an episode of the run. If the client disconnects while it waits for room, no episode is started."""
    gateway = deps.gateway
    episode = await Presence(request).during(gateway.begin(body, idempotency_key=idempotency_key))
    job = gateway.swarm.job
    return bodies.BeginResponse(
        episode_id=episode.id,
        base_url=f"{front_url(gateway, episode, request)}v1",
        api_key=deps.keys.sign(episode.id, episode.begun),
        model=gateway.hosted.model_name,
        policies=gateway.hosted.names,
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


# --- records


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@records.get("/status", dependencies=SHARED_VIEWER)
async def get_status(reader: Reading) -> bodies.StatusResponse:
    """Return the state of the run and of its training."""
    return await reader.status()


@records.get("/health", dependencies=SHARED_VIEWER)
async def get_health(reader: Reading) -> bodies.HealthView:
    """Return the trend of the training reward with an interval, and the health rules with their results."""
    return await reader.health()


@records.get("/waiting", dependencies=SHARED_VIEWER)
async def get_waiting(reader: Reading) -> bodies.WaitingView:
    """Return the groups that fill the present batch, with the state of each episode."""
    return await reader.waiting()


@records.get("/job", dependencies=VIEWER)
async def get_job(reader: Reading) -> bodies.JobBody:
    """Return the job settings and their revision."""
    return await reader.job()


@records.get("/cluster", dependencies=VIEWER)
async def get_cluster(reader: Reading) -> bodies.ClusterView:
    """List the processes that host the weights of the run."""
    return reader.cluster()


@records.get("/checkpoints", dependencies=VIEWER)
async def list_checkpoints(reader: Reading) -> list[bodies.CheckpointInfo]:
    """List the checkpoints on disk, oldest first, with their tags and scores."""
    return await reader.checkpoints()


@records.get("/evaluations", dependencies=SHARED_VIEWER)
async def list_evaluations(reader: Reading) -> list[bodies.EvaluationView]:
    """List all evaluations, oldest first."""
    return await reader.evaluations()


@records.get("/episodes", dependencies=SHARED_VIEWER, response_model=bodies.EpisodeList)
async def list_episodes(reader: Reading, query: Annotated[bodies.EpisodeQuery, Query()]) -> Response:
    """Return a page of the episodes that match every given filter, newest first, or in the order of `sort`."""
    return _json(await reader.episodes(query))


@records.get(
    "/episodes/{episode_id}", dependencies=EPISODE_READER, response_model=bodies.EpisodeTree | bodies.EpisodeRuns
)
async def get_episode(episode_id: str, reader: Reading, form: bodies.EpisodeForm = "tokens") -> Response:
    """Return an episode with all its calls: messages, tokens and their authors, log-probabilities, versions. The form
    `runs` is shorter.
    """
    return _json(await reader.episode(episode_id, form))


Number = Annotated[bodies.Int64, Path(ge=0)]


@records.get("/groups/{group_id}", dependencies=VIEWER, response_model=bodies.GroupView)
async def get_group(group_id: Number, reader: Reading) -> Response:
    """Return a group with its episodes and, once it is in a batch, their advantages."""
    return _json(await reader.group(group_id))


@records.get("/batches", dependencies=VIEWER, response_model=bodies.BatchList)
async def list_batches(
    reader: Reading,
    before: Annotated[bodies.Int64 | None, Query(ge=0)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Return a page of batches, newest first: the newest ones, or those before batch `before`."""
    return _json(await reader.batches(before, limit))


@records.get("/batches/{batch_id}", dependencies=VIEWER, response_model=bodies.BatchView)
async def get_batch(batch_id: Number, reader: Reading) -> Response:
    """Return a batch: metrics, groups with rewards and advantages, episodes that were lost before it, and changed job
    settings.
    """
    return _json(await reader.batch(batch_id))


@records.get("/steps", dependencies=SHARED_VIEWER, response_model=bodies.StepList)
async def list_steps(
    reader: Reading,
    after: Annotated[bodies.Int64 | None, Query(ge=0)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    metric: Annotated[list[Annotated[str, Query(max_length=1024)]], Query(max_length=256)] = [],  # noqa: B006
) -> Response:
    """Return metrics of learned batches. With `after`, the oldest `limit` steps to versions above it, else the newest
    `limit`. `metric` may be repeated: only these metrics are returned.
    """
    return _json(await reader.steps(after, limit, frozenset(metric)))


# --- sessions
#
# A token gives a one-time code, and the code gives a session key. So the browser never receives a token, and the URL
# contains nothing that is valid for more than a minute.


@sessions.post("/sessions", dependencies=[Depends(BEARER), *VIEWER])
async def create_session_code(
    deps: Deps, request: Request, body: bodies.SessionRequest | None = None
) -> bodies.SessionCode:
    """Create a one-time code for a session of the page. Needs a token; a session cannot prolong itself."""
    token, wanted = bearer_of(request), (body or bodies.SessionRequest()).role
    if token.startswith(SESSION_PREFIX):
        raise Forbidden("A session cannot open another one: run `agentjet open`.", code="token_needed")
    held: Bearer | None = deps.keys.bearer(token)
    if held is None or LEVELS.index(held) < LEVELS.index(wanted):
        raise Forbidden(
            f"role = {wanted!r} needs a token of that role or above: this one is the {held} token.",
            code=f"{wanted}_token_needed",
        )
    return bodies.SessionCode(code=deps.runs.codes.create(deps.gateway.run, wanted), expires_in=CODE_SECONDS)


@sessions.post("/sessions/exchange", dependencies=SMALL_BODY)
async def exchange_session_code(deps: Deps, body: bodies.ExchangeRequest) -> bodies.SessionView:
    """Exchange a one-time code for the key of a session. Needs no token; the code names the run."""
    run, role, key, expires = deps.runs.exchange(body.code)
    return bodies.SessionView(key=key, role=role, run=run, expires=expires)


# --- operations

READY: tuple[EngineState, ...] = ("sampling", "learning")


@operations.get("/healthz", responses={400: PROBLEM})
async def healthz() -> dict[str, str]:
    """Answers 200 while the process is alive. Needs no token."""
    return {"status": "alive"}


@operations.get("/readyz", responses={400: PROBLEM, 503: {"description": "The server answers no calls now."}})
async def readyz(deps: Deps) -> JSONResponse:
    """Answers 200 while the engine samples or learns and the disk can be written, else 503.

    Needs no token for the default run.
    """
    state = deps.gateway.phase.state
    is_ready = state in READY and not deps.gateway.swarm.file.refusal
    return JSONResponse({"ready": is_ready, "state": state}, 200 if is_ready else 503)


METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}},
    **dict.fromkeys((400, 401, 403, 500), PROBLEM),
}


@operations.get("/metrics", dependencies=[Depends(BEARER), *VIEWER], response_class=Response, responses=METRICS)
async def get_metrics(deps: Deps) -> Response:
    """Metrics of the run for Prometheus. Needs a token of the run; use the viewer token."""
    gateway = deps.gateway
    metrics = exposition(gateway.status(), gateway.phase.seconds_in_state(), gateway.folder)
    return Response(metrics, media_type=CONTENT_TYPE)
