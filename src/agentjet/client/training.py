"""What a training run sees of a server: the steps it learns, up to the run's last, and what it waits for meanwhile.

`HeldOutEvaluations`: evaluations on held-out tasks within a training run, and whether their score still improves.

They run beside the training episodes; learning waits while a version is evaluated, so every score is of one version.

`Training`: one `train` call, from the status it starts at to its report.

Side by side run: the agents, the events of the server's steps, a look at what the server waits for whenever it admits
nothing, and one at the agent's files. The run ends when the steps are there, or when one of these raises.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from agentjet.client.agent_source import AgentSource, AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.episode import AsyncEpisode, begin
from agentjet.client.inputs import begin_request
from agentjet.client.live_reload import LiveReload
from agentjet.client.progress import Progress, progress_for
from agentjet.client.report import EpisodeResult, EvalReport, Evaluation, Step, TrainReport, best_of
from agentjet.client.rollout import (
    AgentFailing,
    RolloutQueue,
    RolloutSpec,
    Runner,
    StartedRollout,
    first_to_end,
    not_needed,
)
from agentjet.errors import AgentJetError, Conflict, InvalidRequest
from agentjet.protocol import REPORTED_BATCHES, StatusResponse, batches_without_variance, report_lines
from agentjet.types import Task

QUIET_SECONDS = 10.0
"""So long a run may get no episode before it shows what the server waits for."""
LOOK_SECONDS = 2.0
"""Between two looks at whether it does, and at what the server waits for."""


@dataclass
class ServerProgress:
    """A server at the beginning of a run, the policy version that ends it, and what was learned so far."""

    connection: Connection
    status: StatusResponse
    target: int
    learned: list[Step] = field(default_factory=list)

    @classmethod
    async def reach(cls, connection: Connection, steps: int) -> Self:
        """The server as it is now; `steps` more batches are wanted of it.

        Raises `Conflict` when its engine is stopped or failed, `InvalidRequest` when its job ends before.
        """
        status = await get_status(connection)
        return cls(connection, status, _target(status, steps))

    async def follow(self, note: Callable[[Mapping[str, float]], None], say: Callable[[str], None]) -> None:
        """Take in the steps until the policy is at version `target`; `note` is given the metrics of each. Raises
        `Conflict` when the engine fails. Says so when batches in a row could teach nothing, once for each such row."""
        version = self.status.policy_version
        async with aclosing(self.connection.events(after=self.status.last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    self.learned.append(Step(version, event.body["metrics"]))
                    note(self.learned[-1].metrics)
                    if batches_without_variance([step.metrics for step in self.learned]) == REPORTED_BATCHES:
                        await self._report_zero_variance(say)
                    if version >= self.target:
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _report_zero_variance(self, say: Callable[[str], None]) -> None:
        with suppress(AgentJetError):  # What is wrong with the server is found out by those who need it.
            found = (await get_status(self.connection)).zero_variance
            if found is not None:
                say("\n".join(report_lines(found)))


async def get_status(connection: Connection) -> StatusResponse:
    """What a server is doing."""
    return StatusResponse.model_validate(await connection.request("GET", "/status"))


async def show_waiting_reason(connections: Sequence[Connection], runner: Runner, shown: Progress) -> None:
    """Without end: while nothing is live and nothing could be begun for a while, ask the servers why."""
    retry = connections[0].retry
    num_begun, since, is_shown = runner.num_begun, retry.clock(), False
    while True:
        await retry.sleep(LOOK_SECONDS)
        if runner.live or runner.num_begun != num_begun:
            num_begun, since = runner.num_begun, retry.clock()
            if is_shown:
                shown.waits("")
            is_shown = False
        elif retry.clock() - since >= QUIET_SECONDS:
            with suppress(AgentJetError):  # What is wrong with a server is found out by those who need it.
                shown.waits("; ".join([(await get_status(connection)).waiting_for for connection in connections]))
                is_shown = True


def _target(status: StatusResponse, steps: int) -> int:
    """The policy version at which `steps` more batches are learned, if the server can get there."""
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
class HeldOutEvaluations:
    """The evaluations of one run: when they are due, and their scores so far."""

    evaluate: Callable[[AgentVersion], Awaitable[EvalReport]]
    """Evaluates the newest policy version with a version of the agent."""
    every: int
    """Batches from one evaluation to the next."""
    stop_after: int = 0
    """Evaluations in a row that may pass without a new best score; 0: any number."""
    done: list[Evaluation] = field(default_factory=list)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    def learned(self, num_steps: int) -> None:
        """The run has learned so many batches; the first evaluation is due before the first."""
        if num_steps % self.every == 0:
            self.due.set()

    async def watch(self, version: Callable[[], AgentVersion], say: Callable[[str], None]) -> None:
        """Evaluate whenever one is due; ends when the score no longer improves."""
        while not self.stalled:
            await self.due.wait()
            self.due.clear()
            await self.run(version(), say)

    async def finish(self, version: AgentVersion, policy_version: int, say: Callable[[str], None]) -> None:
        """Evaluate the last version of a run, unless that is done."""
        if not self.done or self.done[-1].policy_version != policy_version:
            await self.run(version, say)

    async def run(self, version: AgentVersion, say: Callable[[str], None]) -> None:
        """One evaluation. The run goes on without it when it takes longer than the server holds a version."""
        try:
            report = await self.evaluate(version)
        except Conflict as gone:
            if gone.code != "version_gone":
                raise
            say(f"held-out tasks were not all evaluated before the policy learned on: {gone}")
            return
        except AgentFailing as failing:
            raise AgentFailing(f"held-out evaluation: {failing.fact}", tasks="eval_tasks") from None
        self.done.append(Evaluation(report.policy_versions[0], report))
        best = "; the best so far" if best_of(self.done) is self.done[-1] and len(self.done) > 1 else ""
        say(f"held-out tasks at version {self.done[-1].policy_version}: {report}{best}")

    @property
    def stalled(self) -> bool:
        """True if the last `stop_after` evaluations brought no new best score."""
        return bool(self.stop_after) and best_of(self.done[: -self.stop_after]) is best_of(self.done) is not None


def check(eval_tasks: Sequence[object], every: int, stop_after: int) -> None:
    """Raises `ValueError` for settings of the evaluations that do not fit each other."""
    for name, value in (("eval_every", every), ("stop_after", stop_after)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} = {value!r}: it must be a whole number, 0 for none")
    if bool(eval_tasks) != bool(every):
        given, missing = ("eval_tasks", "eval_every") if eval_tasks else (f"eval_every = {every}", "eval_tasks")
        raise ValueError(f"{given} needs {missing}: held-out tasks, and the number of batches between evaluations")
    if stop_after and not every:
        raise ValueError(f"stop_after = {stop_after} counts evaluations: give eval_tasks and eval_every, too")


@dataclass
class Training:
    """What is to be trained, and what came of it so far."""

    connection: Connection
    version: AgentVersion
    tasks: Sequence[Task]
    code: AgentSource | None = None
    """Looked at for a newer version of the agent."""
    held_out: HeldOutEvaluations | None = None
    results: list[EpisodeResult] = field(default_factory=list)

    async def run(self, steps: int, *, concurrency: int, seed: int, progress: bool) -> TrainReport:
        """See `AsyncSwarm.train`."""
        started = time.monotonic()
        server = await ServerProgress.reach(self.connection, steps)
        status = server.status
        slots = RolloutQueue.training(self.tasks, status.group_size, seed, status.spare_episodes)
        with progress_for("training", steps, wanted=progress) as shown:
            live = LiveReload(
                self.version,
                self.code,
                group_size=status.group_size,
                sleep=self.connection.retry.sleep,
                say=shown.say,
            )

            def note(slot: RolloutSpec, result: EpisodeResult, last: bool) -> None:
                self.results.append(result)
                live.ended(slot, result, last)
                shown.episode(result)

            async def begun(slot: RolloutSpec) -> StartedRollout:
                def trim_malloc(episode: AsyncEpisode) -> None:
                    note(slot, not_needed(slot.task, episode), True)

                def ask(code_version: str) -> Coroutine[Any, Any, AsyncEpisode]:
                    request = begin_request(
                        task_id=slot.task.id,
                        task_set=slot.task.task_set,
                        group=slot.group,
                        client_id=self.connection.settings.client_id,
                        instance_id=self.connection.settings.instance_id,
                        join_only=slot.spare,
                        unless_full=len(slots.task_sets) > 1,
                        code_version=code_version,
                    )
                    return begin(self.connection, request, wait=math.inf, given_back=trim_malloc, ending=runner.ending)

                episode, agent = await live.begin(slot, ask, trim_malloc, runner.ending)
                return StartedRollout(episode, agent)

            runner = Runner(begun, note, needs_calls=True, is_on_trial=live.is_on_trial)

            held_out = self.held_out

            def learned(metrics: Mapping[str, float]) -> None:
                shown.step(metrics)
                if held_out is not None and len(server.learned) < steps:
                    held_out.learned(len(server.learned))

            async def follow() -> None:
                await server.follow(learned, shown.say)
                runner.ending.has_enough = True

            async def evaluate(held_out: HeldOutEvaluations) -> None:
                held_out.learned(0)
                await held_out.watch(lambda: live.current.version, shown.say)
                runner.ending.has_enough = True

            running = runner.run(slots, concurrency)
            beside = [follow(), show_waiting_reason([self.connection], runner, shown)]
            beside += [live.watch()] if self.code is not None else []
            beside += [evaluate(held_out)] if held_out is not None else []
            try:
                await first_to_end([running, *beside])
            finally:
                if runner.ending.num_left:
                    shown.say(str(runner.ending))
            if held_out is not None and not held_out.stalled:
                await held_out.finish(live.current.version, server.target, shown.say)
        return TrainReport(
            results=tuple(self.results),
            steps=tuple(server.learned),
            seconds=time.monotonic() - started,
            code_changes=tuple(live.changes),
            evaluations=tuple(held_out.done) if held_out is not None else (),
            stopped_early=len(server.learned) < steps,
            num_left=runner.ending.num_left,
        )
