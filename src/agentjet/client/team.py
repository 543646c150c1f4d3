"""`AsyncTeam`: several servers, each training the model of one member, on episodes they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Literal, Self, TypeVar

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.checking import check_policy, check_run, some_tasks
from agentjet.client.code import Version, code_version_of
from agentjet.client.endpoint import Endpoint
from agentjet.client.evaluating import EVAL_WAIT, HOLDING, evaluated, held_at
from agentjet.client.report import EvalReport, TeamReport
from agentjet.client.rollout import Agent, Begun
from agentjet.client.slots import Slot
from agentjet.client.team_beginning import begin_on_all
from agentjet.client.team_episode import AsyncTeamEpisode
from agentjet.client.team_recovery import recover
from agentjet.client.team_training import TeamTraining
from agentjet.errors import AgentJetError
from agentjet.protocol import BeginRequest
from agentjet.types import Mode, Task

T = TypeVar("T")


class AsyncTeam:
    """A team: by member, the server that trains its model. Use it from one event loop; close it.

    An episode is begun, finished and aborted on all of them or on none (see `team_episode`). Each server compares
    its own member's rewards with each other: advantages are by member. Servers are asked in the order of their
    addresses, whatever the order given here, so that two teams never wait for each other; the first is the anchor.
    """

    def __init__(self, swarms: Mapping[str, AsyncSwarm]) -> None:
        if len(swarms) < 2:
            raise ValueError(f"a team has at least two members, this one {len(swarms)}: use the swarm itself")
        urls = [swarm.url for swarm in swarms.values()]
        if same := [url for url in urls if urls.count(url) > 1]:
            raise ValueError(
                f"two members share the server {same[0]}: roles of one model are told apart by model='policy@ROLE'"
            )
        for member in swarms:
            if not member or "/" in member or len(member) > 100:
                raise ValueError(f"{member!r} is no name of a member: up to 100 characters, without '/'")
        self._swarms = dict(sorted(swarms.items(), key=lambda item: item[1].url))
        self._connections = {member: swarm.connection for member, swarm in self._swarms.items()}
        self.anchor = next(iter(self._swarms))
        """The member whose server decides."""
        self._deciding: set[str] = set()
        """Ids of the team episodes that this client is just finishing: not to be recovered."""

    # ---- episodes -------------------------------------------------------------------------------------------------

    async def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncTeamEpisode:
        """Begin an episode on every server; whoever begins it must `finish` or `abort` it.

        Waits up to `wait` seconds for room everywhere, then raises `Later`.
        """
        return await begin_on_all(
            self._swarms,
            lambda member: self._swarms[member].asking(task_id, task_set, group, mode),
            wait=wait,
            deciding=self._deciding,
        )

    @asynccontextmanager
    async def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncIterator[AsyncTeamEpisode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        async with await self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    # ---- running agents -------------------------------------------------------------------------------------------

    async def train(
        self,
        agent: Agent,
        tasks: Iterable[Task],
        *,
        steps: int,
        concurrency: int = 32,
        seed: int = 0,
        progress: bool = True,
        code_version: str | None = None,
    ) -> TeamReport:
        """Run `agent(task, episode)` until every server has learned `steps` more batches. `episode[member]` is what a
        member talks to. Agents return rewards as `AsyncTeamEpisode.checked` takes them.

        Otherwise as `AsyncSwarm.train`. The servers' jobs must have the same `group_size`. Parts of episodes that a
        client left in doubt are settled before, meanwhile and in the end. A server may learn more than `steps` batches
        while another is behind (it dropped groups, say); one at its `max_steps` plays on without learning.
        """
        check_run(agent, steps=steps, concurrency=concurrency)
        tasks = some_tasks("train", tasks)
        version = Version(code_version_of(agent) if code_version is None else code_version, agent)
        training = TeamTraining(self._swarms, version, tasks, self._deciding, self.recover)
        try:
            return await training.run(steps, concurrency=concurrency, seed=seed, progress=progress)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None  # The frames inside tell a user nothing.

    async def evaluate(
        self,
        agent: Agent,
        tasks: Iterable[Task],
        *,
        repeats: int = 1,
        concurrency: int = 64,
        progress: bool = True,
        code_version: str | None = None,
        temperature: float | None = None,
        at_version: int | Literal["newest"] | Mapping[str, int] | None = None,
        endpoint: Endpoint | Mapping[str, Endpoint] | None = None,
    ) -> EvalReport:
        """As `AsyncSwarm.evaluate`, over all servers; an episode's reward is the mean of its members'.

        `at_version` is for all members, or by member: those left out are played by whichever version is the newest.
        With `endpoint` all members talk to that model, or those that are named to theirs.
        """
        check_run(agent, repeats=repeats, concurrency=concurrency)
        tasks = some_tasks("evaluate", tasks)
        outside = self._by_member(endpoint, "endpoint", list(self._swarms))
        versions: dict[str, int | Literal["newest"]] = self._by_member(
            at_version, "at_version", [name for name in self._swarms if name not in outside]
        )
        for pinned_to in versions.values() or [None]:
            check_policy(pinned_to, temperature)
        if len(outside) == len(self._swarms) and (at_version, temperature) != (None, None):
            raise ValueError("at_version and temperature are for the policies of servers: no member plays with one")
        version = Version(code_version_of(agent) if code_version is None else code_version, agent)
        try:
            async with AsyncExitStack() as holding:
                pinned = {
                    member: await holding.enter_async_context(
                        held_at(swarm.connection, swarm.asking(HOLDING, mode="eval"), versions[member])
                    )
                    for member, swarm in self._swarms.items()
                    if member in versions
                }

                async def begun(slot: Slot) -> Begun:
                    def asking(member: str) -> BeginRequest:
                        task, code = slot.task, version.code_version
                        request = self._swarms[member].asking(task.id, task.task_set, "", "eval", code_version=code)
                        return request.model_copy(update={"at_version": pinned.get(member), "temperature": temperature})

                    return Begun(
                        await begin_on_all(self._swarms, asking, wait=EVAL_WAIT, outside=outside), version.agent
                    )

                return await evaluated(begun, tasks, repeats=repeats, concurrency=concurrency, progress=progress)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None

    def _by_member(self, given: T | Mapping[str, T] | None, what: str, members: Sequence[str]) -> dict[str, T]:
        """What was given for all, or by name, of those `members` that may have it."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            return dict.fromkeys(members, given)
        if strangers := [name for name in given if name not in members]:
            raise ValueError(f"{what} names {strangers[0]!r}; it can be given for: {', '.join(members) or 'nobody'}")
        return dict(given)

    # ---- recovery -------------------------------------------------------------------------------------------------

    async def recover(self) -> int:
        """Settle what clients that died left in doubt: parts that promised a reward and heard no more. Where the
        anchor finished its part they are finished, where it did not they are aborted; where it still lives, its client
        may, too, and they are left alone. Returns how many were settled. Any client of these servers may do this that
        gives the members the same names.
        """
        return await recover(self._connections, self._deciding)

    async def close(self) -> None:
        """Close the connections."""
        for swarm in self._swarms.values():
            await swarm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
