"""`TeamTraining`: one `train` call of a team, from the statuses it starts at to its report."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.code import Version
from agentjet.client.following import Server, say_what_it_waits_for, status_of
from agentjet.client.progress import Progress, progress_for
from agentjet.client.report import EpisodeResult, TeamReport
from agentjet.client.rollout import Begun, Runner, all_to_end, first_to_end
from agentjet.client.slots import Slot, Slots
from agentjet.client.team_beginning import begin_on_all
from agentjet.errors import AgentJetError, InvalidRequest
from agentjet.protocol import BeginRequest
from agentjet.types import Task

RECOVER_SECONDS = 15.0
"""Between two looks for parts that somebody left in doubt."""


@dataclass
class TeamTraining:
    """What is to be trained, by whom, and what came of it so far."""

    swarms: Mapping[str, AsyncSwarm]
    """By member, the anchor's first."""
    version: Version
    tasks: Sequence[Task]
    deciding: set[str]
    recover: Callable[[], Awaitable[int]]
    results: list[EpisodeResult] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    """Members whose servers have learned their `max_steps`: they play on as they are while others learn."""

    async def run(self, steps: int, *, concurrency: int, seed: int, progress: bool) -> TeamReport:
        """See `AsyncTeam.train`."""
        started = time.monotonic()
        await self.recover()
        reached = await asyncio.gather(*[Server.reach(swarm.connection, steps) for swarm in self.swarms.values()])
        servers = dict(zip(self.swarms, reached, strict=True))
        slots = self._slots(servers, seed)
        with progress_for("training", steps, wanted=progress) as shown:

            def note(slot: Slot, result: EpisodeResult, last: bool) -> None:
                self.results.append(result)
                shown.episode(result)

            async def begun(slot: Slot) -> Begun:
                episode = await begin_on_all(
                    self.swarms,
                    lambda member: self._asking(member, slot, unless_full=len(slots.task_sets) > 1),
                    wait=math.inf,
                    deciding=self.deciding,
                    refused=lambda member: self._look_whether_over(member, shown),
                    ending=runner.ending,
                )
                return Begun(episode, self.version.agent)

            runner = Runner(begun, note, needs_calls=True)

            async def follow() -> None:
                await all_to_end(
                    [
                        server.follow(shown.step if place == 0 else lambda metrics: None, partial(_say, shown, member))
                        for place, (member, server) in enumerate(servers.items())
                    ]
                )
                runner.ending.has_enough = True

            waiting = say_what_it_waits_for([swarm.connection for swarm in self.swarms.values()], runner, shown)
            try:
                await first_to_end([runner.run(slots, concurrency), follow(), waiting, self._recover_now_and_then()])
            finally:
                if runner.ending.num_left:
                    shown.say(str(runner.ending))
        with suppress(AgentJetError):
            await self.recover()
        return TeamReport(
            results=tuple(self.results),
            steps={member: tuple(server.learned) for member, server in servers.items()},
            seconds=time.monotonic() - started,
        )

    def _slots(self, servers: Mapping[str, Server], seed: int) -> Slots:
        sizes = {member: server.status.group_size for member, server in servers.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidRequest(
                f"the servers' jobs have different group_size: {sizes}; a team needs the same everywhere",
                param="group_size",
            )
        spare = min(server.status.spare_episodes for server in servers.values())
        return Slots.training(self.tasks, next(iter(sizes.values())), seed, spare)

    def _asking(self, member: str, slot: Slot, *, unless_full: bool) -> BeginRequest:
        task, code, swarm = slot.task, self.version.code_version, self.swarms[member]
        if member in self.over:
            return swarm.asking(task.id, task.task_set, "", "eval", code_version=code)
        request = swarm.asking(task.id, task.task_set, slot.group, "train", code_version=code)
        return request.model_copy(update={"join_only": slot.spare, "unless_full": unless_full})

    async def _look_whether_over(self, member: str, shown: Progress) -> None:
        """A server without room may have no more batches to learn at all."""
        status = await status_of(self.swarms[member].connection)
        if 0 < status.max_steps <= status.policy_version and member not in self.over:
            self.over.add(member)
            shown.say(f"{member} has learned its max_steps = {status.max_steps}: it plays on as it is for the others")

    async def _recover_now_and_then(self) -> None:
        retry = next(iter(self.swarms.values())).connection.retry
        while True:
            await retry.sleep(RECOVER_SECONDS)
            with suppress(AgentJetError):  # A server that is away is recovered when it is back.
                await self.recover()


def _say(shown: Progress, member: str, text: str) -> None:
    shown.say(f"{member}: {text}")
