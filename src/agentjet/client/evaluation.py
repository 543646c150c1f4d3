"""Evaluations: one `evaluate` call, and evaluations on held-out tasks within a training run.

Episodes of an evaluation are never trained on. A score belongs to one policy version: `pin_policy_version` makes
learning wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from agentjet.client.agent_source import AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.episode import ABORT_SECONDS, begin_episode, wait_for_end
from agentjet.client.inputs import check_counts, payload_digest, pickled_or_itself
from agentjet.client.report import EpisodeResult, EvalReport, Evaluation, Progress, best_of
from agentjet.client.rollout import AgentFailing, RolloutQueue, RolloutSpec, Runner, StartRollout
from agentjet.errors import AgentJetError, Conflict
from agentjet.protocol import BeginRequest, EvaluationRequest
from agentjet.types import Task

EVAL_WAIT = 60.0
"""Longest wait of an evaluation's episode for room."""
CHECKPOINT_WAIT = 600.0
"""Longest wait for a checkpoint: for the batch being learned, and for the disk."""
UNNAMED = "evaluation"
"""Name of the score of tasks without a task set, or of several task sets."""
PIN_TASK_ID = "holding-the-policy-version"
"""Task id of the episode that pins the policy version."""


@asynccontextmanager
async def pin_policy_version(
    connection: Connection, request: BeginRequest, at_version: int | Literal["newest"]
) -> AsyncIterator[int]:
    """Keep the policy at one version, also between two episodes; yields the version.

    An extra episode pins the version, and is aborted at the end. Raises `Conflict` (`version_gone`).
    """
    while True:
        version = (await connection.status()).policy_version if at_version == "newest" else at_version
        try:
            pin = await begin_episode(connection, request.model_copy(update={"at_version": version}), wait=EVAL_WAIT)
            break
        except Conflict as error:  # The policy learned after its status was read.
            if at_version != "newest" or error.code != "version_gone":
                raise
    heartbeats = pin.keep_alive()
    try:
        yield version
    finally:
        heartbeats.cancel()
        aborting = pin.abort("not needed: the evaluation it held the policy version for is over")
        await wait_for_end(aborting, ABORT_SECONDS)


async def run_evaluation(
    start: StartRollout, tasks: Sequence[Task], *, repeats: int, concurrency: int, progress: bool, base: str = ""
) -> EvalReport:
    """Run every task `repeats` times with the agent of `start`. `base` seeds the episodes.

    A failed episode is attempted up to twice more, then reported as aborted: it counts in no mean.
    """
    started = time.monotonic()
    num = repeats * len(tasks)
    results: dict[int, EpisodeResult] = {}
    num_repeated = 0
    shown = Progress("evaluating", num, wanted=progress, num_lines=4)

    def note(spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        nonlocal num_repeated
        shown.episode(result, counts=last)
        num_repeated += not last
        if last:
            results[spec.index] = result

    await Runner(start, note).run(RolloutQueue.once(tasks, repeats, base), min(concurrency, num))
    ordered = tuple(results[index] for index in sorted(results))
    return EvalReport(results=ordered, seconds=time.monotonic() - started, num_repeated=num_repeated)


async def record_score(
    connection: Connection, policy_version: int, report: EvalReport, task_list: str, *, held_out: bool
) -> None:
    """Store a version's score on the server, which may save its checkpoint. Does nothing if no episode finished.

    `task_list` is the identity of the tasks: see `TaskList`.
    """
    score = report.mean_at_k
    if not score.num_tasks:
        return
    task_sets = {result.task_set for result in report.results}
    body = EvaluationRequest(
        policy_version=policy_version,
        score=score.value,
        num_tasks=score.num_tasks,
        num_episodes=len(report.finished),
        name=(task_sets.pop() if len(task_sets) == 1 else "") or UNNAMED,
        task_list=task_list,
        held_out=held_out,
        client_id=connection.settings.client_id,
    )
    await connection.request("POST", "/evaluations", body=body, server_wait=CHECKPOINT_WAIT)


async def record_if_possible(connection: Connection, report: EvalReport, task_list: str) -> str:
    """Store the score of an evaluation that saw one policy version. Returns the reason if it is not stored, else ''.

    A failure is not raised, because the report is worth more than its record.
    """
    first, last = report.policy_versions
    try:
        last = max(last, (await connection.status()).policy_version)
        if first == last and report.finished:
            await record_score(connection, first, report, task_list, held_out=False)
            return ""
    except AgentJetError as error:
        return str(error)
    if first == last:
        return "no episode finished"
    return (
        f"the policy learned during the evaluation, from version {first} to {last}, and a score belongs to one "
        "version. With at_version = 'newest' learning waits for the evaluation"
    )


@dataclass
class HeldOutEvaluations:
    """The evaluations on held-out tasks within one training run. They run beside the training episodes."""

    evaluate: Callable[[AgentVersion], Awaitable[EvalReport]]
    """Evaluates the newest policy version with a version of the agent."""
    every: int
    """Batches from one evaluation to the next."""
    stop_after: int = 0
    """Evaluations in a row without a new best score, after which the run ends; 0: never."""
    done: list[Evaluation] = field(default_factory=list)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    def learned(self, num_steps: int) -> None:
        """Called with the number of batches learned. The first evaluation is due at 0."""
        if num_steps % self.every == 0:
            self.due.set()

    async def watch(
        self, version: Callable[[], AbstractAsyncContextManager[AgentVersion]], notify: Callable[[str], None]
    ) -> None:
        """Evaluate whenever one is due; returns when the score no longer improves. `version` keeps the agent's version
        during an evaluation.
        """
        while not self.stalled:
            await self.due.wait()
            self.due.clear()
            async with version() as kept:
                await self.run(kept, notify)

    async def finish(self, version: AgentVersion, policy_version: int, notify: Callable[[str], None]) -> None:
        """Evaluate the last policy version of a run, unless that is done."""
        if not self.done or self.done[-1].policy_version != policy_version:
            await self.run(version, notify)

    async def run(self, version: AgentVersion, notify: Callable[[str], None]) -> None:
        """One evaluation. It is skipped if it takes longer than the server holds a version."""
        try:
            report = await self.evaluate(version)
        except Conflict as error:
            if error.code != "version_gone":
                raise
            notify(f"held-out tasks were not all evaluated before the policy learned on: {error}")
            return
        except AgentFailing as failing:
            raise AgentFailing(f"held-out evaluation: {failing}") from None
        self.done.append(Evaluation(report.policy_versions[0], report))
        best = "; the best so far" if best_of(self.done) is self.done[-1] and len(self.done) > 1 else ""
        notify(f"held-out tasks at version {self.done[-1].policy_version}: {report}{best}")

    @property
    def stalled(self) -> bool:
        """True if the last `stop_after` evaluations brought no new best score."""
        return bool(self.stop_after) and best_of(self.done[: -self.stop_after]) is best_of(self.done) is not None


def trained_held_out(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> str:
    """Returns a sentence if held-out tasks are also trained on, else ''. Lists may use equal ids for other payloads."""

    def content(task: Task) -> tuple[str, bytes]:
        return task.id, payload_digest(task.payload, pickled_or_itself)

    ids = {task.id for task in eval_tasks}
    trained = {content(task) for task in tasks if task.id in ids}
    num = sum(content(task) in trained for task in eval_tasks) if trained else 0
    if not num:
        return ""
    return (
        f"{num} of {len(eval_tasks)} held-out tasks are also trained on: their score shows what was memorised, too. "
        "Leave them out of the training tasks"
    )


def check_held_out(eval_tasks: Sequence[object], every: int, stop_after: int) -> None:
    """Raises `ValueError` for settings of held-out evaluations that contradict each other."""
    check_counts(0, eval_every=every, stop_after=stop_after)
    if bool(eval_tasks) != bool(every):
        given, missing = ("eval_tasks", "eval_every") if eval_tasks else (f"eval_every = {every}", "eval_tasks")
        raise ValueError(f"{given} needs {missing}: held-out tasks, and the number of batches between evaluations")
    if stop_after and not every:
        raise ValueError(f"stop_after = {stop_after} counts evaluations: give eval_tasks and eval_every, too")
