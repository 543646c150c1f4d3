"""Training: one `train` call, from the server's first status to the report.

These coroutines run side by side: the rollouts, the stream of the server's steps, the display of the reason for a wait,
and held-out evaluations. The run ends when the server has learned the steps, when the held-out score no longer
improves, or on an exception.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from agentjet.client.agent_source import AgentSource, AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.episode import AsyncEpisode, begin_episode, close_groups
from agentjet.client.evaluation import HeldOutEvaluations
from agentjet.client.live_reload import LiveReload
from agentjet.client.report import EpisodeResult, Progress, Step, TrainReport
from agentjet.client.rollout import Agent, Groups, RolloutQueue, RolloutSpec, Runner, not_needed, wait_for_first
from agentjet.client.task_stream import StreamQueue, TaskStream
from agentjet.errors import AgentJetError, Conflict, InvalidRequest
from agentjet.protocol import (
    REPORTED_BATCHES,
    BeginRequest,
    GroupName,
    StatusResponse,
    batches_without_variance,
    report_lines,
)
from agentjet.types import Task

DELAYED_SECONDS = 5.0
"""Interval between looks for repeated requests. Shorter delays are not worth a line."""
QUIET_SECONDS = 30.0
"""Time without a new episode after which the display shows what the server waits for."""


@dataclass
class Training:
    """The arguments of one `train` call, and its state.

    Raises `Conflict` if the engine is stopped, and `InvalidRequest` if the job ends before the steps.
    """

    connection: Connection
    status: StatusResponse
    """The server's status at the begin."""
    request: Callable[..., BeginRequest]
    """Makes the request for an episode: `AsyncSwarm.episode_request`."""
    version: AgentVersion
    tasks: Sequence[Task] | TaskStream
    steps: int
    seed: int
    progress: bool
    code: AgentSource | None
    """Watched for newer versions of the agent."""
    held_out: HeldOutEvaluations | None
    reproducible: bool = False

    def __post_init__(self) -> None:
        status, connection = self.status, self.connection
        self._target = target_version(status, self.steps)
        """The last policy version wanted."""
        self._shown = Progress("training", self.steps, wanted=self.progress)
        self._shown.policies = status.policies
        base = f"{self.seed}/{status.policy_version}" if self.reproducible else ""
        self._queue = (
            StreamQueue(self.tasks, Groups(status.group_size, status.spare_episodes, base), self.seed)
            if isinstance(self.tasks, TaskStream)
            else RolloutQueue.training(self.tasks, status.group_size, self.seed, status.spare_episodes, base)
        )
        sleep, notify = connection.retry.sleep, self._shown.notify
        self._live = LiveReload(self.version, self.code, group_size=status.group_size, sleep=sleep, notify=notify)
        self._runner = Runner(
            self._start,
            self._note,
            needs_calls=True,
            is_on_trial=self._live.is_on_trial,
            close_groups=self._close_groups,
        )
        self._results: list[EpisodeResult] = []
        self._has_finished = False
        """True if an episode of this client finished since the last step."""
        self._learned: list[Step] = []

    async def run(self, concurrency: int) -> TrainReport:
        """See `AsyncSwarm.train`. Raises `Conflict` if the engine fails."""
        started, held_out = time.monotonic(), self.held_out
        if self.code is not None:
            self._shown.notify(self.code.described())
        coroutines = [
            self._runner.run(self._queue, concurrency),
            self._watch_steps(),
            self._show_waiting_reason(),
            self._show_delays(),
        ]
        if held_out is not None:
            coroutines.append(self._evaluate(held_out))
        await wait_for_first(coroutines)
        self._live.end()
        if held_out is not None and not held_out.stalled:
            async with self._live.held_out(reload=False) as version:
                await held_out.finish(version, self._target, self._shown.notify)
        return TrainReport(
            results=tuple(self._results),
            steps=tuple(self._learned),
            seconds=time.monotonic() - started,
            code_changes=tuple(self._live.changes),
            evaluations=tuple(held_out.done) if held_out is not None else (),
            stopped_early=len(self._learned) < self.steps,
        )

    async def _start(self, spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
        def on_abort(episode: AsyncEpisode) -> None:
            self._note(spec, not_needed(episode), True)

        async def request(code_version: str) -> AsyncEpisode:
            if not spec.is_wanted:
                raise Conflict(f"The recipe wants {spec.visit.size} episodes of {spec.group!r}.", code="group_closed")
            body = self.request(spec.task.id, spec.task.task_set, spec.group, code_version=code_version)
            update = {
                "join_only": spec.spare,
                "unless_full": self._queue.has_sets,
                "unless_skipped": not self._queue.is_skipped(spec.task.task_set),
                "place": spec.place,
                "seed": spec.seed,
                "ends_at_version": self._target,
            }
            body = body.model_copy(update=update)
            return await begin_episode(self.connection, body, wait=math.inf, on_abort=on_abort)

        if spec.seed is not None:
            await spec.visit.wait_for_turn(spec.place)
        return await self._live.begin(spec, request)

    async def _close_groups(self, specs: Sequence[RolloutSpec], not_needed: bool) -> None:
        names = [GroupName(group=spec.group, task_set=spec.task.task_set) for spec in specs]
        await close_groups(self.connection, names, not_needed=not_needed)

    def _note(self, spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        self._results.append(result)
        self._has_finished = self._has_finished or result.outcome == "finished"
        self._live.ended(spec, result, last)
        self._shown.episode(result)

    async def _watch_steps(self) -> None:
        """Record the server's steps up to the last one wanted. Raises `Conflict` if the engine fails."""
        version = self.status.policy_version
        async with aclosing(self.connection.events(after=self.status.last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    await self._record(Step(version, event.body["metrics"]))
                    if version >= self._target:
                        self._runner.goal_reached = True
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _record(self, step: Step) -> None:
        """Record a step; shows a report once for each streak of batches without a learning signal."""
        self._learned.append(step)
        self._queue.forget_skipped()
        self._shown.step(step.metrics, "" if self._has_finished else "no episode of this client finished meanwhile")
        self._has_finished = False
        if self.held_out is not None and len(self._learned) < self.steps:
            self.held_out.learned(len(self._learned))
        if batches_without_variance([step.metrics for step in self._learned]) == REPORTED_BATCHES:
            with suppress(AgentJetError):  # The rollouts raise if the server is away.
                found = (await self.connection.status()).zero_variance
                if found is not None:
                    self._shown.notify("\n".join(report_lines(found)))

    async def _show_waiting_reason(self) -> None:
        """Without end: show what the server waits for while no episode is live and none could be begun for a while."""
        while True:
            num_begun = self._runner.num_begun
            await self.connection.retry.sleep(QUIET_SECONDS)
            if not self._runner.live and self._runner.num_begun == num_begun:
                with suppress(AgentJetError):  # The rollouts raise if the server is away.
                    self._shown.notify(f"waiting for {(await self.connection.status()).waiting_for}")

    async def _show_delays(self) -> None:
        """Without end: show once why requests are repeated, and their end. Those that are cancelled end nothing."""
        is_shown, resumed = False, 0
        while True:
            await self.connection.retry.sleep(DELAYED_SECONDS)
            reason = self.connection.delay_reason
            if reason and not is_shown:
                self._shown.notify(reason)
                resumed = self.connection.num_resumed
            elif is_shown and not reason and self.connection.num_resumed > resumed:
                self._shown.notify("the server takes requests again")
            is_shown = bool(reason)

    async def _evaluate(self, held_out: HeldOutEvaluations) -> None:
        held_out.learned(0)
        await held_out.watch(self._live.held_out, self._shown.notify)
        self._runner.goal_reached = True


def target_version(status: StatusResponse, steps: int) -> int:
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
