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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from agentjet.client.agent_source import AgentSource, AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.episode import AsyncEpisode, begin_episode
from agentjet.client.evaluation import HeldOutEvaluations
from agentjet.client.inputs import build_request
from agentjet.client.live_reload import LiveReload
from agentjet.client.progress import Progress, progress_for
from agentjet.client.report import EpisodeResult, Step, TrainReport
from agentjet.client.rollout import RolloutQueue, RolloutSpec, Runner, StartedRollout, first_to_end, not_needed
from agentjet.errors import AgentJetError, Conflict, InvalidRequest
from agentjet.protocol import REPORTED_BATCHES, BeginRequest, StatusResponse, batches_without_variance, report_lines
from agentjet.types import Task

QUIET_SECONDS = 10.0
"""Time without a new episode after which the display shows what the server waits for."""
POLL_SECONDS = 2.0
"""Interval of that check."""


@dataclass
class ServerProgress:
    """The steps that a server learns during a run: its first status, the last version wanted, and the steps so far."""

    connection: Connection
    status: StatusResponse
    target: int
    learned: list[Step] = field(default_factory=list)

    @classmethod
    async def start(cls, connection: Connection, steps: int) -> Self:
        """Progress towards `steps` more batches.

        Raises `Conflict` if the engine is stopped or failed, and `InvalidRequest` if the job ends before.
        """
        status = await connection.status()
        return cls(connection, status, _target(status, steps))

    async def watch_steps(self, note: Callable[[Mapping[str, float]], None], notify: Callable[[str], None]) -> None:
        """Record steps until the policy is at version `target`; calls `note` with the metrics of each.

        Calls `notify` once for each streak of batches without a learning signal. Raises `Conflict` if the engine fails.
        """
        version = self.status.policy_version
        async with aclosing(self.connection.events(after=self.status.last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    self.learned.append(Step(version, event.body["metrics"]))
                    note(self.learned[-1].metrics)
                    if batches_without_variance([step.metrics for step in self.learned]) == REPORTED_BATCHES:
                        await self._report_zero_variance(notify)
                    if version >= self.target:
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _report_zero_variance(self, notify: Callable[[str], None]) -> None:
        with suppress(AgentJetError):  # The rollouts raise if the server is away.
            found = (await self.connection.status()).zero_variance
            if found is not None:
                notify("\n".join(report_lines(found)))


async def show_waiting_reason(connections: Sequence[Connection], runner: Runner, shown: Progress) -> None:
    """Without end: show what the servers wait for while no episode is live and none could be begun for a while."""
    retry = connections[0].retry
    num_begun, since, is_shown = runner.num_begun, retry.clock(), False
    while True:
        await retry.sleep(POLL_SECONDS)
        if runner.live or runner.num_begun != num_begun:
            num_begun, since = runner.num_begun, retry.clock()
            if is_shown:
                shown.waits("")
            is_shown = False
        elif retry.clock() - since >= QUIET_SECONDS:
            with suppress(AgentJetError):  # The rollouts raise if a server is away.
                shown.waits("; ".join([(await connection.status()).waiting_for for connection in connections]))
                is_shown = True


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


@dataclass
class Training:
    """The arguments of one `train` call."""

    connection: Connection
    version: AgentVersion
    tasks: Sequence[Task]
    code: AgentSource | None = None
    """Watched for newer versions of the agent."""
    held_out: HeldOutEvaluations | None = None

    async def run(self, steps: int, *, concurrency: int, seed: int, progress: bool) -> TrainReport:
        """See `AsyncSwarm.train`."""
        started = time.monotonic()
        server = await ServerProgress.start(self.connection, steps)
        with progress_for("training", steps, wanted=progress) as shown:
            loop = _TrainingLoop(self, server, shown, seed)
            await loop.run(steps, concurrency)
        return TrainReport(
            results=tuple(loop.results),
            steps=tuple(server.learned),
            seconds=time.monotonic() - started,
            code_changes=tuple(loop.live.changes),
            evaluations=tuple(self.held_out.done) if self.held_out is not None else (),
            stopped_early=len(server.learned) < steps,
            num_left=loop.runner.cleanup.num_left,
        )


class _TrainingLoop:
    """The coroutines of one training run, and their results."""

    def __init__(self, training: Training, server: ServerProgress, shown: Progress, seed: int) -> None:
        self._training, self._server, self._shown = training, server, shown
        self._connection = training.connection
        status = server.status
        self._queue = RolloutQueue.training(training.tasks, status.group_size, seed, status.spare_episodes)
        self.live = LiveReload(
            training.version,
            training.code,
            group_size=status.group_size,
            sleep=self._connection.retry.sleep,
            notify=shown.notify,
        )
        self.runner = Runner(self._start, self._note, needs_calls=True, is_on_trial=self.live.is_on_trial)
        self.results: list[EpisodeResult] = []

    async def run(self, steps: int, concurrency: int) -> None:
        training, server, shown = self._training, self._server, self._shown
        held_out = training.held_out
        coroutines = [
            self.runner.run(self._queue, concurrency),
            self._watch_steps(steps),
            show_waiting_reason([self._connection], self.runner, shown),
        ]
        if training.code is not None:
            coroutines.append(self.live.watch())
        if held_out is not None:
            coroutines.append(self._evaluate(held_out))
        try:
            await first_to_end(coroutines)
        finally:
            if self.runner.cleanup.num_left:
                shown.notify(str(self.runner.cleanup))
        if held_out is not None and not held_out.stalled:
            await held_out.finish(self.live.current.version, server.target, shown.notify)

    async def _start(self, spec: RolloutSpec) -> StartedRollout:
        def on_abort(episode: AsyncEpisode) -> None:
            self._note(spec, not_needed(spec.task, episode), True)

        def request(code_version: str) -> Coroutine[Any, Any, AsyncEpisode]:
            body = build_request(
                BeginRequest,
                task_id=spec.task.id,
                task_set=spec.task.task_set,
                group=spec.group,
                client_id=self._connection.settings.client_id,
                instance_id=self._connection.settings.instance_id,
                join_only=spec.spare,
                unless_full=len(self._queue.task_sets) > 1,
                code_version=code_version,
            )
            return begin_episode(self._connection, body, wait=math.inf, on_abort=on_abort, cleanup=self.runner.cleanup)

        episode, agent = await self.live.begin(spec, request, on_abort, self.runner.cleanup)
        return StartedRollout(episode, agent)

    def _note(self, spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        self.results.append(result)
        self.live.ended(spec, result, last)
        self._shown.episode(result)

    async def _watch_steps(self, steps: int) -> None:
        held_out, server = self._training.held_out, self._server

        def learned(metrics: Mapping[str, float]) -> None:
            self._shown.step(metrics)
            if held_out is not None and len(server.learned) < steps:
                held_out.learned(len(server.learned))

        await server.watch_steps(learned, self._shown.notify)
        self.runner.cleanup.goal_reached = True

    async def _evaluate(self, held_out: HeldOutEvaluations) -> None:
        held_out.learned(0)
        await held_out.watch(lambda: self.live.current.version, self._shown.notify)
        self.runner.cleanup.goal_reached = True
