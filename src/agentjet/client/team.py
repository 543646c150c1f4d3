"""Teams: several servers, each training the model of one member, on episodes they share. `Team` calls `AsyncTeam` from
synchronous code.

Servers are asked one after the other, in the order of their addresses. Requests side by side would save a round trip,
but two teams could each hold a place that the other waits for.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Literal, Self, TypeVar
from urllib.parse import quote

from agentjet.client.agent_source import AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.episode import (
    ABORT_SECONDS,
    SERVER_WAIT,
    UNPLAYED,
    AsyncEpisode,
    Endpoint,
    RunCleanup,
    begin_episode,
)
from agentjet.client.evaluation import EVAL_WAIT, PIN_TASK_ID, pin_policy_version, run_evaluation
from agentjet.client.inputs import check_policy, check_run, require_tasks
from agentjet.client.progress import Progress, progress_for
from agentjet.client.report import EpisodeResult, EvalReport, TeamReport
from agentjet.client.rollout import Agent, RolloutQueue, RolloutSpec, Runner, StartedRollout, all_to_end, first_to_end
from agentjet.client.swarm_client import AsyncSwarm, Swarm
from agentjet.client.team_episode import AsyncTeamEpisode, TeamEpisode
from agentjet.client.threads import SyncClient, blocking, blocking_run
from agentjet.client.training import ServerProgress, show_waiting_reason
from agentjet.errors import AgentJetError, Conflict, InvalidRequest, Later, NotFound
from agentjet.protocol import AbortRequest, BeginRequest, EpisodeList, EpisodeView, FinishRequest
from agentjet.types import Mode, Task

INCOMPLETE = "not needed: another server of the team had no room"
RequestFor = Callable[[str], BeginRequest]
"""Makes a member's request, each time its server is asked."""
PREPARED_LISTED = 500
RECOVER_SECONDS = 15.0
"""Interval between two recoveries."""
T = TypeVar("T")


async def begin_on_all(
    swarms: Mapping[str, AsyncSwarm],
    request_for: RequestFor,
    *,
    wait: float,
    outside: Mapping[str, Endpoint] | None = None,
    deciding: set[str] | None = None,
    refused: Callable[[str], Awaitable[None]] | None = None,
    cleanup: RunCleanup | None = None,
) -> AsyncTeamEpisode:
    """An episode of the members of `swarms`, the anchor first; members in `outside` call other models.

    Waits up to `wait` seconds for room everywhere, then raises `Later`. Calls `refused` with each member whose server
    had no room for a while. A place is not held for long while another server has no room.
    """
    outside, cleanup = outside or {}, cleanup or RunCleanup()
    anchor = next(iter(swarms))
    retry = swarms[anchor].connection.retry
    deadline, attempt = retry.clock() + wait, 0
    while True:
        team = f"{anchor}/{uuid.uuid4().hex}"
        parts: dict[str, AsyncEpisode] = {}
        try:
            for member, swarm in swarms.items():
                request = request_for(member).model_copy(update={"team": team})
                if member in outside:
                    parts[member] = outside[member].begin(request)
                    continue
                held = [part.lease_seconds for name, part in parts.items() if name not in outside]
                patience = min(deadline - retry.clock(), min(held) / 2 if held else SERVER_WAIT)
                parts[member] = await begin_episode(swarm.connection, request, wait=max(0.0, patience), cleanup=cleanup)
            return AsyncTeamEpisode(team, parts, deciding)
        except BaseException as error:
            without_room = isinstance(error, Later) or (isinstance(error, Conflict) and error.code == "task_set_full")
            await _give_back(parts, INCOMPLETE if without_room else UNPLAYED, cleanup)
            left = deadline - retry.clock()
            if not isinstance(error, Later) or left <= 0:
                raise
        if refused is not None:
            await refused(member)
        await retry.sleep(min(left, retry.delay(attempt)))
        attempt = attempt + 1 if parts else 0  # Without a held place, the server itself waited.


async def _give_back(parts: Mapping[str, AsyncEpisode], reason: str, cleanup: RunCleanup) -> None:
    """Abort the parts of an incomplete episode. A server that is away is not waited for: the lease ends its part."""
    await asyncio.gather(
        *[cleanup.wait_for_abort(part.abort(reason), at_least=ABORT_SECONDS) for part in parts.values()]
    )


async def recover(connections: Mapping[str, Connection], deciding: Collection[str]) -> int:
    """Settle prepared parts on the servers of these members, except for teams in `deciding`. Returns their number."""
    found = await asyncio.gather(
        *[_episodes(connection, f"status=prepared&limit={PREPARED_LISTED}") for connection in connections.values()]
    )
    settled = 0
    for (member, connection), parts in zip(connections.items(), found, strict=True):
        for part in parts:
            anchor = part.team.partition("/")[0]
            if anchor in connections and anchor != member and part.team not in deciding:
                settled += await _settle(connection, part, connections[anchor])
    return settled


async def _settle(connection: Connection, part: EpisodeView, anchor: Connection) -> bool:
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


async def _episodes(connection: Connection, query: str) -> tuple[EpisodeView, ...]:
    found = EpisodeList.model_validate(await connection.request("GET", f"/episodes?{query}"))
    return tuple(found.episodes)


@dataclass
class TeamTraining:
    """One `train` call of a team."""

    swarms: Mapping[str, AsyncSwarm]
    """By member, the anchor's first."""
    version: AgentVersion
    tasks: Sequence[Task]
    deciding: set[str]
    recover: Callable[[], Awaitable[int]]
    results: list[EpisodeResult] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    """Members whose servers have learned their `max_steps`: they continue without learning."""

    async def run(self, steps: int, *, concurrency: int, seed: int, progress: bool) -> TeamReport:
        """See `AsyncTeam.train`."""
        started = time.monotonic()
        await self.recover()
        reached = await asyncio.gather(
            *[ServerProgress.start(swarm.connection, steps) for swarm in self.swarms.values()]
        )
        servers = dict(zip(self.swarms, reached, strict=True))
        slots = self._slots(servers, seed)
        with progress_for("training", steps, wanted=progress) as shown:

            def note(slot: RolloutSpec, result: EpisodeResult, last: bool) -> None:
                self.results.append(result)
                shown.episode(result)

            async def begun(slot: RolloutSpec) -> StartedRollout:
                episode = await begin_on_all(
                    self.swarms,
                    lambda member: self._request(member, slot, unless_full=len(slots.task_sets) > 1),
                    wait=math.inf,
                    deciding=self.deciding,
                    refused=lambda member: self._look_whether_over(member, shown),
                    cleanup=runner.cleanup,
                )
                return StartedRollout(episode, self.version.agent)

            runner = Runner(begun, note, needs_calls=True)

            async def follow() -> None:
                await all_to_end(
                    [
                        server.watch_steps(
                            shown.step if i == 0 else lambda metrics: None, partial(_notify, shown, member)
                        )
                        for i, (member, server) in enumerate(servers.items())
                    ]
                )
                runner.cleanup.goal_reached = True

            waiting = show_waiting_reason([swarm.connection for swarm in self.swarms.values()], runner, shown)
            try:
                await first_to_end([runner.run(slots, concurrency), follow(), waiting, self._recover_now_and_then()])
            finally:
                if runner.cleanup.num_left:
                    shown.notify(str(runner.cleanup))
        with suppress(AgentJetError):
            await self.recover()
        return TeamReport(
            results=tuple(self.results),
            steps={member: tuple(server.learned) for member, server in servers.items()},
            seconds=time.monotonic() - started,
        )

    def _slots(self, servers: Mapping[str, ServerProgress], seed: int) -> RolloutQueue:
        sizes = {member: server.status.group_size for member, server in servers.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidRequest(
                f"the servers' jobs have different group_size: {sizes}; a team needs the same everywhere",
                param="group_size",
            )
        spare = min(server.status.spare_episodes for server in servers.values())
        return RolloutQueue.training(self.tasks, next(iter(sizes.values())), seed, spare)

    def _request(self, member: str, slot: RolloutSpec, *, unless_full: bool) -> BeginRequest:
        task, code, swarm = slot.task, self.version.code_version, self.swarms[member]
        if member in self.over:
            return swarm.episode_request(task.id, task.task_set, "", "eval", code_version=code)
        request = swarm.episode_request(task.id, task.task_set, slot.group, "train", code_version=code)
        return request.model_copy(update={"join_only": slot.spare, "unless_full": unless_full})

    async def _look_whether_over(self, member: str, shown: Progress) -> None:
        """A server without room may have no more batches to learn at all."""
        status = await self.swarms[member].connection.status()
        if 0 < status.max_steps <= status.policy_version and member not in self.over:
            self.over.add(member)
            shown.notify(
                f"{member} has learned its max_steps = {status.max_steps}: it plays on as it is for the others"
            )

    async def _recover_now_and_then(self) -> None:
        retry = next(iter(self.swarms.values())).connection.retry
        while True:
            await retry.sleep(RECOVER_SECONDS)
            with suppress(AgentJetError):  # A server that is away is recovered when it is back.
                await self.recover()


def _notify(shown: Progress, member: str, text: str) -> None:
    shown.notify(f"{member}: {text}")


class AsyncTeam:
    """A team: by member, the server that trains its model. Use it from one event loop; close it.

    An episode is begun, finished and aborted on all servers or on none (see `team_episode`). Each server compares its
    own member's rewards with each other: advantages are by member. Servers are asked in the order of their addresses,
    so that two teams never wait for each other. The first server is the anchor.
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
        self._deciding: set[str] = set()
        """Ids of the team episodes that this client is finishing: `recover` skips them."""

    # ---- episodes -------------------------------------------------------------------------------------------------

    async def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> AsyncTeamEpisode:
        """Begin an episode on every server. The caller must `finish` or `abort` it.

        Waits up to `wait` seconds for room everywhere, then raises `Later`.
        """
        return await begin_on_all(
            self._swarms,
            lambda member: self._swarms[member].episode_request(task_id, task_set, group, mode),
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
        """Run `agent(task, episode)` until every server has learned `steps` more batches. The agent calls the model of
        a member through `episode[member]`, and returns rewards as `AsyncTeamEpisode.checked` takes them.

        Otherwise as `AsyncSwarm.train`. The servers' jobs must have the same `group_size`. Unsettled parts of earlier
        episodes are settled before, during and after the run. A server may learn more than `steps` batches while
        another is behind. A server at its `max_steps` continues without learning.
        """
        check_run(agent, steps=steps, concurrency=concurrency)
        tasks = require_tasks("train", tasks)
        version = AgentVersion.of(agent, code_version)
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

        `at_version` is for all members, or by member; the others use their newest version. With `endpoint` all members
        call that model, or only the named ones.
        """
        check_run(agent, repeats=repeats, concurrency=concurrency)
        tasks = require_tasks("evaluate", tasks)
        outside = self._by_member(endpoint, "endpoint", list(self._swarms))
        versions: dict[str, int | Literal["newest"]] = self._by_member(
            at_version, "at_version", [name for name in self._swarms if name not in outside]
        )
        for pinned_to in versions.values() or [None]:
            check_policy(pinned_to, temperature)
        if len(outside) == len(self._swarms) and (at_version, temperature) != (None, None):
            raise ValueError("at_version and temperature are for the policies of servers: no member plays with one")
        version = AgentVersion.of(agent, code_version)
        try:
            async with AsyncExitStack() as holding:
                pinned = {
                    member: await holding.enter_async_context(
                        pin_policy_version(
                            swarm.connection, swarm.episode_request(PIN_TASK_ID, mode="eval"), versions[member]
                        )
                    )
                    for member, swarm in self._swarms.items()
                    if member in versions
                }

                async def begun(slot: RolloutSpec) -> StartedRollout:
                    def request_for(member: str) -> BeginRequest:
                        task, code = slot.task, version.code_version
                        request = self._swarms[member].episode_request(
                            task.id, task.task_set, "", "eval", code_version=code
                        )
                        return request.model_copy(update={"at_version": pinned.get(member), "temperature": temperature})

                    return StartedRollout(
                        await begin_on_all(self._swarms, request_for, wait=EVAL_WAIT, outside=outside), version.agent
                    )

                return await run_evaluation(begun, tasks, repeats=repeats, concurrency=concurrency, progress=progress)
        except (AgentJetError, asyncio.CancelledError) as error:
            raise error.with_traceback(None) from None

    def _by_member(self, given: T | Mapping[str, T] | None, what: str, members: Sequence[str]) -> dict[str, T]:
        """Values by member, given for all or by name. Only `members` may have one."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            return dict.fromkeys(members, given)
        if strangers := [name for name in given if name not in members]:
            raise ValueError(f"{what} names {strangers[0]!r}; it can be given for: {', '.join(members) or 'nobody'}")
        return dict(given)

    # ---- recovery -------------------------------------------------------------------------------------------------

    async def recover(self) -> int:
        """Settle parts that promised a reward and then lost their client. Returns their number.

        If the anchor finished its part they are finished; if the anchor's part ended otherwise they are aborted. If the
        anchor's part is live, they are left alone, since the client may be, too. Every client of these servers with the
        same member names may recover.
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


class Team(SyncClient[AsyncTeam]):
    """A team: by member, the server that trains its model. May be used from several threads. Its methods are those of
    `AsyncTeam`; Ctrl-C in `train` and `evaluate` aborts the live episodes, then raises a `KeyboardInterrupt`; SIGTERM,
    then `SystemExit`."""

    def __init__(self, swarms: Mapping[str, Swarm]) -> None:
        super().__init__(AsyncTeam({member: swarm.asynchronous for member, swarm in swarms.items()}))

    def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> TeamEpisode:
        """See `AsyncTeam.begin`."""
        begun = self._loop.run(self._client.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait))
        return begun.blocking(self._loop.run)

    @contextmanager
    def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Iterator[TeamEpisode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        with self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    train = blocking_run(AsyncTeam.train)
    evaluate = blocking_run(AsyncTeam.evaluate)
    recover = blocking(AsyncTeam.recover)
