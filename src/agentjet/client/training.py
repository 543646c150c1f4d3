"""`Training`: one `train` call, from the status it starts at to its report.

Side by side run: the agents, the events of the server's steps, a look at what the server waits for whenever it admits
nothing, and one at the agent's files. The run ends when the steps are there, or when one of these raises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentjet.client.beginning import begin
from agentjet.client.checking import begin_request
from agentjet.client.code import Code, Version
from agentjet.client.connection import Connection
from agentjet.client.episode import AsyncEpisode
from agentjet.client.following import Server, say_what_it_waits_for
from agentjet.client.held_out import HeldOut
from agentjet.client.live import LiveCode
from agentjet.client.progress import progress_for
from agentjet.client.report import EpisodeResult, TrainReport
from agentjet.client.rollout import Begun, Runner, first_to_end, not_needed
from agentjet.client.slots import Slot, Slots
from agentjet.types import Task


@dataclass
class Training:
    """What is to be trained, and what came of it so far."""

    connection: Connection
    version: Version
    tasks: Sequence[Task]
    code: Code | None = None
    """Looked at for a newer version of the agent."""
    held_out: HeldOut | None = None
    results: list[EpisodeResult] = field(default_factory=list)

    async def run(self, steps: int, *, concurrency: int, seed: int, progress: bool) -> TrainReport:
        """See `AsyncSwarm.train`."""
        started = time.monotonic()
        server = await Server.reach(self.connection, steps)
        status = server.status
        slots = Slots.training(self.tasks, status.group_size, seed, status.spare_episodes)
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

            async def begun(slot: Slot) -> Begun:
                def give_back(episode: AsyncEpisode) -> None:
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
                    return begin(self.connection, request, wait=math.inf, given_back=give_back, ending=runner.ending)

                episode, agent = await live.begin(slot, ask, give_back, runner.ending)
                return Begun(episode, agent)

            runner = Runner(begun, note, needs_calls=True, is_on_trial=live.is_on_trial)

            held_out = self.held_out

            def learned(metrics: Mapping[str, float]) -> None:
                shown.step(metrics)
                if held_out is not None and len(server.learned) < steps:
                    held_out.learned(len(server.learned))

            async def follow() -> None:
                await server.follow(learned, shown.say)
                runner.ending.has_enough = True

            async def evaluate(held_out: HeldOut) -> None:
                held_out.learned(0)
                await held_out.watch(lambda: live.current.version, shown.say)
                runner.ending.has_enough = True

            running = runner.run(slots, concurrency)
            beside = [follow(), say_what_it_waits_for([self.connection], runner, shown)]
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
