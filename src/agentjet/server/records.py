"""The read routes, under `/swarm/v1/`: state and records of a run.

They need the reader of a run and no gateway, so that `agentjet look` has the same routes.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

import agentjet.protocol as bodies
from agentjet.server.deps import BEARER, EPISODE_READER, SHARED_VIEWER, VIEWER, GuardedRoute, Reading
from agentjet.server.error_handlers import PROBLEMS

router = APIRouter(
    prefix=bodies.PREFIX, tags=["records"], route_class=GuardedRoute, dependencies=[Depends(BEARER)], responses=PROBLEMS
)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@router.get("/status", dependencies=SHARED_VIEWER)
async def get_status(reader: Reading) -> bodies.StatusResponse:
    """Return the state of the run and of its training."""
    return await reader.status()


@router.get("/health", dependencies=SHARED_VIEWER)
async def get_health(reader: Reading) -> bodies.HealthView:
    """Return the trend of the training reward with an interval, and the health rules with their results."""
    return await reader.health()


@router.get("/waiting", dependencies=SHARED_VIEWER)
async def get_waiting(reader: Reading) -> bodies.WaitingView:
    """Return the groups that fill the present batch, with the state of each episode."""
    return await reader.waiting()


@router.get("/job", dependencies=VIEWER)
async def get_job(reader: Reading) -> bodies.JobBody:
    """Return the job settings and their revision."""
    return await reader.job()


@router.get("/cluster", dependencies=VIEWER)
async def get_cluster(reader: Reading) -> bodies.ClusterView:
    """List the processes that host the weights of the run."""
    return reader.cluster()


@router.get("/checkpoints", dependencies=VIEWER)
async def list_checkpoints(reader: Reading) -> list[bodies.CheckpointInfo]:
    """List the checkpoints on disk, oldest first, with their tags and scores."""
    return await reader.checkpoints()


@router.get("/evaluations", dependencies=SHARED_VIEWER)
async def list_evaluations(reader: Reading) -> list[bodies.EvaluationView]:
    """List all evaluations, oldest first."""
    return await reader.evaluations()


@router.get("/episodes", dependencies=SHARED_VIEWER, response_model=bodies.EpisodeList)
async def list_episodes(reader: Reading, query: Annotated[bodies.EpisodeQuery, Query()]) -> Response:
    """Return a page of the episodes that match every given filter, newest first, or in the order of `sort`."""
    return _json(await reader.episodes(query))


@router.get(
    "/episodes/{episode_id}", dependencies=EPISODE_READER, response_model=bodies.EpisodeTree | bodies.EpisodeRuns
)
async def get_episode(episode_id: str, reader: Reading, form: bodies.EpisodeForm = "tokens") -> Response:
    """Return an episode with all its calls: messages, tokens and their authors, log-probabilities, versions. The form
    `runs` is shorter.
    """
    return _json(await reader.episode(episode_id, form))


Number = Annotated[bodies.Int64, Path(ge=0)]


@router.get("/groups/{group_id}", dependencies=VIEWER, response_model=bodies.GroupView)
async def get_group(group_id: Number, reader: Reading) -> Response:
    """Return a group with its episodes and, once it is in a batch, their advantages."""
    return _json(await reader.group(group_id))


@router.get("/batches", dependencies=VIEWER, response_model=bodies.BatchList)
async def list_batches(
    reader: Reading,
    before: Annotated[bodies.Int64 | None, Query(ge=0)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Return a page of batches, newest first: the newest ones, or those before batch `before`."""
    return _json(await reader.batches(before, limit))


@router.get("/batches/{batch_id}", dependencies=VIEWER, response_model=bodies.BatchView)
async def get_batch(batch_id: Number, reader: Reading) -> Response:
    """Return a batch: metrics, groups with rewards and advantages, episodes that were lost before it, and changed job
    settings.
    """
    return _json(await reader.batch(batch_id))


@router.get("/steps", dependencies=SHARED_VIEWER, response_model=bodies.StepList)
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
