"""One `evaluate` call: every task so many times, nothing of it trained on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

from agentjet.client.connection import Connection
from agentjet.client.episode import ABORT_SECONDS, begin
from agentjet.client.progress import progress_for
from agentjet.client.report import EpisodeResult, EvalReport
from agentjet.client.rollout import Begin, RolloutQueue, RolloutSpec, Runner, keep_alive
from agentjet.client.training import get_status
from agentjet.errors import AgentJetError, Conflict
from agentjet.protocol import BeginRequest, EvaluationRequest
from agentjet.types import Task

EVAL_WAIT = 60.0
"""How long an evaluation waits for a place."""
CHECKPOINT_WAIT = 600.0
"""A checkpoint waits for the batch being learned and for the disk."""
PIN_TASK_ID = "holding-the-policy-version"
"""Task of the episode that does so."""


@asynccontextmanager
async def pin_policy_version(
    connection: Connection, request: BeginRequest, at_version: int | Literal["newest"]
) -> AsyncIterator[int]:
    """Keep the policy at a version meanwhile, also between one episode and the next; gives the version.

    It is an episode of its own that does it, aborted in the end. Raises `Conflict` (`version_gone`).
    """
    while True:
        version = (await get_status(connection)).policy_version if at_version == "newest" else at_version
        try:
            holder = await begin(connection, request.model_copy(update={"at_version": version}), wait=EVAL_WAIT)
            break
        except Conflict as gone:  # It learned since the look at its status.
            if at_version != "newest" or gone.code != "version_gone":
                raise
    heart = asyncio.create_task(keep_alive(holder))
    try:
        yield version
    finally:
        heart.cancel()
        with suppress(AgentJetError, TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await holder.abort("not needed: the evaluation it held the policy version for is over")


async def run_evaluation(
    begin_slot: Begin, tasks: Sequence[Task], *, repeats: int, concurrency: int, progress: bool
) -> EvalReport:
    """Run the agent that `begin_slot` gives on every task `repeats` times.

    An episode whose agent fails is begun anew up to twice, then reported as aborted: it counts in no mean.
    """
    started = time.monotonic()
    repeated = [task for task in tasks for _ in range(repeats)]
    results: dict[int, EpisodeResult] = {}
    num_repeated = 0
    with progress_for("evaluating", len(repeated), wanted=progress, num_lines=4) as shown:

        def note(slot: RolloutSpec, result: EpisodeResult, last: bool) -> None:
            nonlocal num_repeated
            shown.episode(result, counts=last)
            num_repeated += not last
            if last:
                results[slot.index] = result

        await Runner(begin_slot, note).run(RolloutQueue.once(repeated), min(concurrency, len(repeated)))
    ordered = tuple(results[index] for index in sorted(results))
    return EvalReport(results=ordered, seconds=time.monotonic() - started, num_repeated=num_repeated)


async def record_score(connection: Connection, client_id: str, policy_version: int, report: EvalReport) -> None:
    """Store the score of a version on the server, which may save its checkpoint; nothing when no episode finished."""
    score = report.mean_at_k
    if not score.num_tasks:
        return
    body = EvaluationRequest(
        policy_version=policy_version,
        score=score.value,
        num_tasks=score.num_tasks,
        num_episodes=len(report.finished),
        client_id=client_id,
    )
    await connection.request("POST", "/evaluations", body=body, server_wait=CHECKPOINT_WAIT)
