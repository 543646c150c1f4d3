"""`Training`: one `train` call, from the status it starts at to its report.

Side by side run: the agents, the events of the server's steps, a look at what the server waits for whenever it admits
nothing, and one at the agent's files. The run ends when the steps are there, or when one of these raises.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from agentjet.client.beginning import begin
from agentjet.client.code import Code, Version
from agentjet.client.connection import Connection
from agentjet.client.episode import AsyncEpisode
from agentjet.client.live import LiveCode
from agentjet.client.progress import Progress, progress_for
from agentjet.client.report import EpisodeResult, Step, TrainReport
from agentjet.client.rollout import Begun, Runner, Slot, first_to_end, not_needed, training_slots
from agentjet.errors import AgentJetError, Conflict, InvalidRequest
from agentjet.protocol import BeginRequest, StatusResponse
from agentjet.types import Task

QUIET_SECONDS = 10.0
"""So long a run may get no episode before it shows what the server waits for."""
LOOK_SECONDS = 2.0
"""Between two looks at whether it does, and at what the server waits for."""


@dataclass
class Training:
    """What is to be trained, and what came of it so far."""

    connection: Connection
    client_id: str
    version: Version
    tasks: Sequence[Task]
    code: Code | None = None
    """Looked at for a newer version of the agent."""
    results: list[EpisodeResult] = field(default_factory=list)
    learned: list[Step] = field(default_factory=list)

    async def run(self, steps: int, *, concurrency: int, seed: int, progress: bool) -> TrainReport:
        """See `AsyncSwarm.train`."""
        started = time.monotonic()
        status = await self._status()
        target = _target(status, steps)
        with progress_for("training", steps, wanted=progress) as shown:
            live = LiveCode(
                self.version,
                self.code,
                group_size=status.group_size,
                sleep=self.connection.retry.sleep,
                say=shown.say,
            )

            def note(slot: Slot, result: EpisodeResult, last: bool) -> None:
                self.results.append(result)
                live.ended(slot, result, last)
                shown.episode(result)

            opened: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

            async def begun(slot: Slot) -> Begun:
                if slot.spare:  # It joins a group, so one of those that open it must have begun.
                    await opened[slot.group].wait()

                def give_back(episode: AsyncEpisode) -> None:
                    note(slot, not_needed(slot.task, episode), True)

                def ask(code_version: str) -> Coroutine[Any, Any, AsyncEpisode]:
                    request = BeginRequest(
                        task_id=slot.task.id,
                        task_set=slot.task.task_set,
                        group=slot.group,
                        client_id=self.client_id,
                        join_only=slot.spare,
                        code_version=code_version,
                    )
                    return begin(self.connection, request, wait=math.inf, given_back=give_back)

                episode, agent = await live.begin(slot, ask, give_back)
                if status.spare_episodes:
                    opened[slot.group].set()
                return Begun(episode, agent)

            runner = Runner(begun, note)

            async def follow() -> None:
                await self._follow(status, target, shown)
                runner.has_enough = True

            slots = training_slots(self.tasks, status.group_size, seed, status.spare_episodes)
            running = runner.run(slots, concurrency)
            beside = [follow(), self._say_what_it_waits_for(runner, shown)]
            await first_to_end([running, *beside, *([live.watch()] if self.code is not None else [])])
        return TrainReport(
            results=tuple(self.results),
            steps=tuple(self.learned),
            seconds=time.monotonic() - started,
            code_changes=tuple(live.changes),
        )

    async def _follow(self, status: StatusResponse, target: int, shown: Progress) -> None:
        """Take in the server's steps until the policy is at version `target`. Raises `Conflict` when the engine
        fails."""
        version = status.policy_version
        async with aclosing(self.connection.events(after=status.last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    self.learned.append(Step(version, event.body["metrics"]))
                    shown.step(self.learned[-1].metrics)
                    if version >= target:
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _say_what_it_waits_for(self, runner: Runner, shown: Progress) -> None:
        """Without end: while nothing is live and nothing could be begun for a while, ask the server why."""
        sleep, clock = self.connection.retry.sleep, self.connection.retry.clock
        num_begun, since, is_shown = runner.num_begun, clock(), False
        while True:
            await sleep(LOOK_SECONDS)
            if runner.live or runner.num_begun != num_begun:
                num_begun, since = runner.num_begun, clock()
                if is_shown:
                    shown.waits("")
                is_shown = False
            elif clock() - since >= QUIET_SECONDS:
                with suppress(AgentJetError):  # What is wrong with the server is found out by those who need it.
                    shown.waits((await self._status()).waiting_for)
                    is_shown = True

    async def _status(self) -> StatusResponse:
        return StatusResponse.model_validate(await self.connection.request("GET", "/status"))


def _target(status: StatusResponse, steps: int) -> int:
    """The policy version at which `steps` more batches are learned, if the server can get there."""
    if steps < 1:
        raise ValueError(f"steps = {steps}: at least one is needed")
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
