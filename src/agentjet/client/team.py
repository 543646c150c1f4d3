"""`AsyncTeam`: several servers, each training the model of one member, on episodes they share."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self
from urllib.parse import quote

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.beginning import begin
from agentjet.client.code import Version, code_version_of
from agentjet.client.connection import Connection
from agentjet.client.episode import GOODBYE_SECONDS, STOPPED, AsyncEpisode
from agentjet.client.evaluating import EVAL_WAIT, evaluated
from agentjet.client.following import Server, say_what_it_waits_for
from agentjet.client.progress import progress_for
from agentjet.client.report import EpisodeResult, EvalReport, TeamReport
from agentjet.client.rollout import Agent, Begun, Runner, all_to_end, first_to_end
from agentjet.client.team_episode import AsyncTeamEpisode
from agentjet.client.turns import Slot, Turns
from agentjet.errors import AgentJetError, Conflict, InvalidRequest, Later, NotFound
from agentjet.protocol import AbortRequest, BeginRequest, EpisodeList, EpisodeView, FinishRequest
from agentjet.types import Mode, Task

RECOVER_SECONDS = 15.0
"""Between two looks for parts that somebody left in doubt, while a team trains."""
INCOMPLETE = "not needed: another server of the team had no room"
PREPARED_LISTED = 500


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
        return await self._begin(wait, lambda swarm: swarm.asking(task_id, task_set, group, mode))

    @asynccontextmanager
    async def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncIterator[AsyncTeamEpisode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        async with await self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    async def _begin(self, wait: float, asking: Callable[[AsyncSwarm], BeginRequest]) -> AsyncTeamEpisode:
        """On all servers, one after the other. A place is not held for long while another server has no room."""
        retry = self._connections[self.anchor].retry
        deadline, attempt = retry.clock() + wait, 0
        while True:
            team = f"{self.anchor}/{uuid.uuid4().hex}"
            parts: dict[str, AsyncEpisode] = {}
            try:
                for member, swarm in self._swarms.items():
                    patience = deadline - retry.clock()
                    if parts:
                        patience = min(patience, min(part.lease_seconds for part in parts.values()) / 2)
                    request = asking(swarm).model_copy(update={"team": team})
                    parts[member] = await begin(swarm.connection, request, wait=max(0.0, patience))
            except BaseException as error:
                await _given_back(parts, INCOMPLETE if isinstance(error, Later) else STOPPED)
                left = deadline - retry.clock()
                if not (isinstance(error, Later) and parts) or left <= 0:
                    raise
                await retry.sleep(min(left, retry.delay(attempt)))
                attempt += 1
                continue
            return AsyncTeamEpisode(team, parts, self._deciding)

    # ---- running agents -------------------------------------------------------------------------------------------

    async def train(
        self,
        agent: Agent,
        tasks: Sequence[Task],
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
        while another is behind (it dropped groups, say).
        """
        if not tasks:
            raise ValueError("there are no tasks to train on")
        version = Version(code_version_of(agent) if code_version is None else code_version, agent)
        try:
            return await self._train(version, tasks, steps, concurrency, seed, progress)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None  # The frames inside tell a user nothing.

    async def _train(
        self, version: Version, tasks: Sequence[Task], steps: int, concurrency: int, seed: int, progress: bool
    ) -> TeamReport:
        started = time.monotonic()
        await self.recover()
        servers = {member: await Server.reach(c, steps) for member, c in self._connections.items()}
        sizes = {member: server.status.group_size for member, server in servers.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidRequest(
                f"the servers' jobs have different group_size: {sizes}; a team needs the same everywhere",
                param="group_size",
            )
        results: list[EpisodeResult] = []
        with progress_for("training", steps, wanted=progress) as shown:

            def note(slot: Slot, result: EpisodeResult, last: bool) -> None:
                results.append(result)
                shown.episode(result)

            async def begun(slot: Slot) -> Begun:
                task = slot.task
                episode = await self._begin(
                    float("inf"),
                    lambda swarm: swarm.asking(
                        task.id, task.task_set, slot.group, "train", code_version=version.code_version
                    ),
                )
                return Begun(episode, version.agent)

            runner = Runner(begun, note, needs_calls=True)

            async def follow() -> None:
                anchor = servers[self.anchor]
                others = [server.follow(lambda metrics: None) for server in servers.values() if server is not anchor]
                await all_to_end([anchor.follow(shown.step), *others])
                runner.has_enough = True

            running = runner.run(Turns.training(tasks, sizes[self.anchor], seed), concurrency)
            waiting = say_what_it_waits_for(list(self._connections.values()), runner, shown)
            await first_to_end([running, follow(), waiting, self._recover_now_and_then()])
        with suppress(AgentJetError):
            await self.recover()
        return TeamReport(
            results=tuple(results),
            steps={member: tuple(server.learned) for member, server in servers.items()},
            seconds=time.monotonic() - started,
        )

    async def evaluate(
        self,
        agent: Agent,
        tasks: Sequence[Task],
        *,
        repeats: int = 1,
        concurrency: int = 64,
        progress: bool = True,
        code_version: str | None = None,
        temperature: float | None = None,
    ) -> EvalReport:
        """As `AsyncSwarm.evaluate`, over all servers; an episode's reward is the mean of its members'."""
        if not tasks:
            raise ValueError("there are no tasks to evaluate on")
        version = Version(code_version_of(agent) if code_version is None else code_version, agent)

        async def begun(slot: Slot) -> Begun:
            task, code = slot.task, version.code_version

            def asking(swarm: AsyncSwarm) -> BeginRequest:
                request = swarm.asking(task.id, task.task_set, "", "eval", code_version=code)
                return request.model_copy(update={"temperature": temperature})

            return Begun(await self._begin(EVAL_WAIT, asking), version.agent)

        try:
            return await evaluated(begun, tasks, repeats=repeats, concurrency=concurrency, progress=progress)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None

    # ---- recovery -------------------------------------------------------------------------------------------------

    async def recover(self) -> int:
        """Settle what clients that died left in doubt: parts that promised a reward and heard no more. Where the
        anchor finished its part they are finished, where it did not they are aborted; where it still lives, its client
        may, too, and they are left alone. Returns how many were settled. Any client of these servers may do this that
        gives the members the same names.
        """
        settled = 0
        for member, connection in self._connections.items():
            for part in await _episodes(connection, f"status=prepared&limit={PREPARED_LISTED}"):
                anchor = part.team.partition("/")[0]
                if anchor in self._connections and anchor != member and part.team not in self._deciding:
                    settled += await self._settle(connection, part, self._connections[anchor])
        return settled

    async def _settle(self, connection: Connection, part: EpisodeView, anchor: Connection) -> bool:
        anchored = await _episodes(anchor, f"team={quote(part.team, safe='')}")
        decisions = {episode.status for episode in anchored}
        body: FinishRequest | AbortRequest
        if "finished" in decisions:
            assert part.reward is not None, "a prepared episode has promised a reward"
            verb, body = "finish", FinishRequest(reward=part.reward, by_role=part.by_role, metrics=part.metrics)
        elif decisions and decisions <= {"aborted", "expired"}:
            verb, body = "abort", AbortRequest(reason="the team's anchor was not finished")
        else:
            return False
        try:
            await connection.request("POST", f"/episodes/{quote(part.episode_id, safe='')}/{verb}", body=body)
        except (Conflict, NotFound):  # Somebody else settled it meanwhile.
            return False
        return True

    async def _recover_now_and_then(self) -> None:
        while True:
            await self._connections[self.anchor].retry.sleep(RECOVER_SECONDS)
            with suppress(AgentJetError):  # A server that is away is recovered when it is back.
                await self.recover()

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


async def _given_back(parts: Mapping[str, AsyncEpisode], reason: str) -> None:
    """Abort what was begun in vain. A server that is away is not waited for: the lease ends its part."""
    with suppress(AgentJetError, TimeoutError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await asyncio.gather(*[part.abort(reason) for part in parts.values()], return_exceptions=True)


async def _episodes(connection: Connection, query: str) -> tuple[EpisodeView, ...]:
    found = EpisodeList.model_validate(await connection.request("GET", f"/episodes?{query}"))
    return tuple(found.episodes)
