"""`Team`: a team for synchronous code. It holds no logic: `AsyncTeam` does the work, in an event loop in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self

from agentjet.client.endpoint import Endpoint
from agentjet.client.report import EvalReport, TeamReport
from agentjet.client.rollout import Agent
from agentjet.client.synchronous import Swarm, told
from agentjet.client.team import AsyncTeam
from agentjet.client.team_episode import TeamEpisode
from agentjet.client.threads import LoopThread
from agentjet.errors import AgentJetError
from agentjet.types import Mode, Task


class Team:
    """A team: by member, the server that trains its model. May be used from several threads. See `AsyncTeam`."""

    def __init__(self, swarms: Mapping[str, Swarm]) -> None:
        self._team = AsyncTeam({member: swarm.asynchronous for member, swarm in swarms.items()})
        self._loop = LoopThread()

    def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> TeamEpisode:
        """See `AsyncTeam.begin`."""
        begun = self._loop.run(self._team.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait))
        return begun.driven(self._loop.run)

    @contextmanager
    def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Iterator[TeamEpisode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        with self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    def train(
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
        """See `AsyncTeam.train`. Ctrl-C aborts what is live, raises `KeyboardInterrupt`; SIGTERM `SystemExit`."""
        try:
            return self._loop.run_agents(
                self._team.train(
                    agent,
                    tasks,
                    steps=steps,
                    concurrency=concurrency,
                    seed=seed,
                    progress=progress,
                    code_version=code_version,
                )
            )
        except (AgentJetError, KeyboardInterrupt) as error:
            raise told(error) from None

    def evaluate(
        self,
        agent: Agent,
        tasks: Sequence[Task],
        *,
        repeats: int = 1,
        concurrency: int = 64,
        progress: bool = True,
        code_version: str | None = None,
        temperature: float | None = None,
        at_version: int | Literal["newest"] | Mapping[str, int] | None = None,
        endpoint: Endpoint | Mapping[str, Endpoint] | None = None,
    ) -> EvalReport:
        """See `AsyncTeam.evaluate`. Ctrl-C aborts what is live, raises `KeyboardInterrupt`; SIGTERM `SystemExit`."""
        try:
            return self._loop.run_agents(
                self._team.evaluate(
                    agent,
                    tasks,
                    repeats=repeats,
                    concurrency=concurrency,
                    progress=progress,
                    code_version=code_version,
                    temperature=temperature,
                    at_version=at_version,
                    endpoint=endpoint,
                )
            )
        except (AgentJetError, KeyboardInterrupt) as error:
            raise told(error) from None

    def recover(self) -> int:
        """See `AsyncTeam.recover`."""
        return self._loop.run(self._team.recover())

    def close(self) -> None:
        """Close the connections and end the thread."""
        if not self._loop.abandoned:
            self._loop.run(self._team.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
