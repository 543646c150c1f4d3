"""`Swarm`: the client of one server for synchronous code. It holds no logic: `AsyncSwarm` does the work, in an event
loop in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.code import Code
from agentjet.client.connection import Retry
from agentjet.client.endpoint import Endpoint
from agentjet.client.episode import Episode
from agentjet.client.report import EvalReport, TrainReport
from agentjet.client.rollout import Agent
from agentjet.client.threads import LoopThread
from agentjet.errors import AgentJetError
from agentjet.protocol import (
    CheckpointInfo,
    EpisodeList,
    EpisodeTree,
    EpisodeView,
    Event,
    JobBody,
    LeaseView,
    StatusResponse,
)
from agentjet.types import Mode, Reward, Task


class Swarm:
    """A client of one server. May be used from several threads.

    `url` and `token` default to AGENTJET_URL and AGENTJET_TOKEN; `client_id` names this client to the server and should
    be left alone unless several processes are one client. `lease` is the epoch of the lease under which it works: see
    `take_lease`.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        lease: int | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._swarm = AsyncSwarm(url, token, client_id=client_id, lease=lease, retry=retry, transport=transport)
        self._loop = LoopThread()

    @property
    def asynchronous(self) -> AsyncSwarm:
        """A client of the same server under the same name, for the caller's own event loop."""
        return self._swarm.again()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._swarm.url

    def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Episode:
        """See `AsyncSwarm.begin`."""
        begun = self._loop.run(self._swarm.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait))
        return Episode(begun, self._loop.run)

    @contextmanager
    def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Iterator[Episode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        with self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    def finish(self, episode_id: str, reward: float | Reward) -> EpisodeView:
        """See `AsyncSwarm.finish`."""
        return self._loop.run(self._swarm.finish(episode_id, reward))

    def abort(self, episode_id: str, reason: str = "") -> EpisodeView:
        """See `AsyncSwarm.abort`."""
        return self._loop.run(self._swarm.abort(episode_id, reason))

    def train(
        self,
        agent: Agent,
        tasks: Sequence[Task],
        *,
        steps: int,
        concurrency: int = 32,
        seed: int = 0,
        progress: bool = True,
        reload: bool | Code = False,
        code_version: str | None = None,
    ) -> TrainReport:
        """See `AsyncSwarm.train`. Ctrl-C aborts the live episodes, then raises `KeyboardInterrupt`."""
        try:
            return self._loop.run(
                self._swarm.train(
                    agent,
                    tasks,
                    steps=steps,
                    concurrency=concurrency,
                    seed=seed,
                    progress=progress,
                    reload=reload,
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
        at_version: int | Literal["newest"] | None = None,
        endpoint: Endpoint | None = None,
    ) -> EvalReport:
        """See `AsyncSwarm.evaluate`. Ctrl-C aborts the live episodes, then raises `KeyboardInterrupt`."""
        try:
            return self._loop.run(
                self._swarm.evaluate(
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

    def episodes(self, limit: int = 20) -> EpisodeList:
        """See `AsyncSwarm.episodes`."""
        return self._loop.run(self._swarm.episodes(limit))

    def episode_tree(self, episode_id: str) -> EpisodeTree:
        """See `AsyncSwarm.episode_tree`."""
        return self._loop.run(self._swarm.episode_tree(episode_id))

    def status(self) -> StatusResponse:
        """See `AsyncSwarm.status`."""
        return self._loop.run(self._swarm.status())

    def events(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncSwarm.events`."""
        return self._loop.iterate(self._swarm.events(after))

    def job(self) -> JobBody:
        """See `AsyncSwarm.job`."""
        return self._loop.run(self._swarm.job())

    def set_job(self, job: Mapping[str, Any], *, revision: int) -> JobBody:
        """See `AsyncSwarm.set_job`."""
        return self._loop.run(self._swarm.set_job(job, revision=revision))

    def start(self) -> StatusResponse:
        """See `AsyncSwarm.start`."""
        return self._loop.run(self._swarm.start())

    def stop(self) -> StatusResponse:
        """See `AsyncSwarm.stop`."""
        return self._loop.run(self._swarm.stop())

    def take_lease(self, holder: str, seconds: float, *, epoch: int | None = None) -> LeaseView:
        """See `AsyncSwarm.take_lease`."""
        return self._loop.run(self._swarm.take_lease(holder, seconds, epoch=epoch))

    def end_lease(self) -> LeaseView:
        """See `AsyncSwarm.end_lease`."""
        return self._loop.run(self._swarm.end_lease())

    def enter_run(self, name: str, job: Mapping[str, Any]) -> StatusResponse:
        """See `AsyncSwarm.enter_run`."""
        return self._loop.run(self._swarm.enter_run(name, job))

    def checkpoints(self) -> list[CheckpointInfo]:
        """See `AsyncSwarm.checkpoints`."""
        return self._loop.run(self._swarm.checkpoints())

    def checkpoint(self) -> CheckpointInfo:
        """See `AsyncSwarm.checkpoint`."""
        return self._loop.run(self._swarm.checkpoint())

    def export(self) -> CheckpointInfo:
        """See `AsyncSwarm.export`."""
        return self._loop.run(self._swarm.export())

    def close(self) -> None:
        """Close the connections and end the thread."""
        if not self._loop.abandoned:
            self._loop.run(self._swarm.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def told(error: BaseException) -> BaseException:
    """What ends a script, as its author should see it: the sentence, under the line of the script."""
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(
            "interrupted: this client's live episodes were aborted (one that could not be ends with its lease), "
            "what was learned stays learned"
        )
    return error.with_traceback(None)
