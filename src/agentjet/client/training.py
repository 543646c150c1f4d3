"""Training: one `train` call, from the server's first status to the report.

These coroutines run side by side:

* the rollouts,
* the stream of the server's steps,
* the display of the reason for a wait,
* the watch on the agent's files,
* held-out evaluations.

The run ends when the server has learned the steps, when the held-out score no longer improves, or on an exception.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from agentjet.client.agent_source import AgentSource, AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.episode import AsyncEpisode, begin_episode
from agentjet.client.evaluation import HeldOutEvaluations
from agentjet.client.live_reload import LiveReload
from agentjet.client.progress import Progress, progress_for
from agentjet.client.report import EpisodeResult, Step, TrainReport
from agentjet.client.rollout import Agent, RolloutQueue, RolloutSpec, Runner, first_to_end, not_needed
from agentjet.errors import AgentJetError, Conflict, InvalidRequest
from agentjet.protocol import REPORTED_BATCHES, BeginRequest, StatusResponse, batches_without_variance, report_lines
from agentjet.types import Task

QUIET_SECONDS = 10.0
"""Time without a new episode after which the display shows what the server waits for."""
POLL_SECONDS = 2.0
"""Interval of that check."""


@dataclass(frozen=True)
class Training:
    """The arguments of one `train` call."""

    connection: Connection
    request: Callable[..., BeginRequest]
    """Makes the request for an episode: `AsyncSwarm.episode_request`."""
    version: AgentVersion
    tasks: Sequence[Task]
    steps: int
    seed: int
    code: AgentSource | None = None
    """Watched for newer versions of the agent."""
    held_out: HeldOutEvaluations | None = None

    async def run(self, *, concurrency: int, progress: bool) -> TrainReport:
        """See `AsyncSwarm.train`.

        Raises `Conflict` if the engine is stopped or fails, and `InvalidRequest` if the job ends before the steps.
        """
        started = time.monotonic()
        status = await self.connection.status()
        target = _target(status, self.steps)
        with progress_for("training", self.steps, wanted=progress) as shown:
            shown.policies = status.policies
            loop = _TrainingLoop(self, status, target, shown)
            await loop.run(concurrency)
        return TrainReport(
            results=tuple(loop.results),
            steps=tuple(loop.learned),
            seconds=time.monotonic() - started,
            code_changes=tuple(loop.live.changes),
            evaluations=tuple(self.held_out.done) if self.held_out is not None else (),
            stopped_early=len(loop.learned) < self.steps,
            num_left=loop.runner.cleanup.num_left,
        )


def _target(status: StatusResponse, steps: int) -> int:
    """The policy version after `steps` more batches, if the server can get there."""
    if status.state in ("offline", "failed"):
        raise Conflict(f"the engine is {status.state}: {status.waiting_for}", code=f"engine_{status.state}")
    target = status.policy_version + steps
    if status.max_steps and target > status.max_steps:
        raise InvalidRequest(
            f"the job ends at max_steps = {status.max_steps} and the policy is at version {status.policy_version}: "
            f"{status.max_steps - status.policy_version} steps are left, {steps} were asked for",
            param="steps",
        )
    return target


class _TrainingLoop:
    """The coroutines of one training run, and their results."""

    def __init__(self, training: Training, status: StatusResponse, target: int, shown: Progress) -> None:
        """`target` is the last policy version wanted."""
        self._training, self._status, self._target, self._shown = training, status, target, shown
        self._connection = training.connection
        self._queue = RolloutQueue.training(training.tasks, status.group_size, training.seed, status.spare_episodes)
        self.live = LiveReload(
            training.version,
            training.code,
            group_size=status.group_size,
            sleep=self._connection.retry.sleep,
            notify=shown.notify,
        )
        self.runner = Runner(self._start, self._note, needs_calls=True, is_on_trial=self.live.is_on_trial)
        self.results: list[EpisodeResult] = []
        self.learned: list[Step] = []

    async def run(self, concurrency: int) -> None:
        held_out = self._training.held_out
        coroutines = [self.runner.run(self._queue, concurrency), self._watch_steps(), self._show_waiting_reason()]
        if self._training.code is not None:
            coroutines.append(self.live.watch())
        if held_out is not None:
            coroutines.append(self._evaluate(held_out))
        try:
            await first_to_end(coroutines)
        finally:
            if self.runner.cleanup.num_left:
                self._shown.notify(str(self.runner.cleanup))
        if held_out is not None and not held_out.stalled:
            await held_out.finish(self.live.current.version, self._target, self._shown.notify)

    async def _start(self, spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
        def on_abort(episode: AsyncEpisode) -> None:
            self._note(spec, not_needed(spec.task, episode), True)

        def request(code_version: str) -> Coroutine[Any, Any, AsyncEpisode]:
            body = self._training.request(spec.task.id, spec.task.task_set, spec.group, code_version=code_version)
            body = body.model_copy(update={"join_only": spec.spare, "unless_full": len(self._queue.task_sets) > 1})
            return begin_episode(self._connection, body, wait=math.inf, on_abort=on_abort, cleanup=self.runner.cleanup)

        return await self.live.begin(spec, request, on_abort, self.runner.cleanup)

    def _note(self, spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        self.results.append(result)
        self.live.ended(spec, result, last)
        self._shown.episode(result)

    async def _watch_steps(self) -> None:
        """Record the server's steps up to the last one wanted. Raises `Conflict` if the engine fails."""
        version, last_event = self._status.policy_version, self._status.last_event
        async with aclosing(self._connection.events(after=last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    await self._learned(Step(version, event.body["metrics"]))
                    if version >= self._target:
                        self.runner.cleanup.goal_reached = True
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _learned(self, step: Step) -> None:
        """Record a step; shows a report once for each streak of batches without a learning signal."""
        held_out = self._training.held_out
        self.learned.append(step)
        self._shown.step(step.metrics)
        if held_out is not None and len(self.learned) < self._training.steps:
            held_out.learned(len(self.learned))
        if batches_without_variance([step.metrics for step in self.learned]) == REPORTED_BATCHES:
            with suppress(AgentJetError):  # The rollouts raise if the server is away.
                found = (await self._connection.status()).zero_variance
                if found is not None:
                    self._shown.notify("\n".join(report_lines(found)))

    async def _show_waiting_reason(self) -> None:
        """Without end: show what the server waits for while no episode is live and none could be begun for a while."""
        runner, retry = self.runner, self._connection.retry
        num_begun, since, is_shown = runner.num_begun, retry.clock(), False
        while True:
            await retry.sleep(POLL_SECONDS)
            if runner.live or runner.num_begun != num_begun:
                num_begun, since = runner.num_begun, retry.clock()
                if is_shown:
                    self._shown.waits("")
                is_shown = False
            elif retry.clock() - since >= QUIET_SECONDS:
                with suppress(AgentJetError):  # The rollouts raise if the server is away.
                    self._shown.waits((await self._connection.status()).waiting_for)
                    is_shown = True

    async def _evaluate(self, held_out: HeldOutEvaluations) -> None:
        held_out.learned(0)
        await held_out.watch(lambda: self.live.current.version, self._shown.notify)
        self.runner.cleanup.goal_reached = True
