"""`Team`: a team for synchronous code. It holds no logic: `AsyncTeam` does the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from agentjet.client.driving import Driver, driven, driven_run
from agentjet.client.synchronous import Swarm
from agentjet.client.team import AsyncTeam
from agentjet.client.team_episode import TeamEpisode
from agentjet.types import Mode


class Team(Driver[AsyncTeam]):
    """A team: by member, the server that trains its model. May be used from several threads. Its methods are those of
    `AsyncTeam`; Ctrl-C in `train` and `evaluate` aborts the live episodes, then raises a `KeyboardInterrupt`;
    SIGTERM, then `SystemExit`.
    """

    def __init__(self, swarms: Mapping[str, Swarm]) -> None:
        super().__init__(AsyncTeam({member: swarm.asynchronous for member, swarm in swarms.items()}))

    def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> TeamEpisode:
        """See `AsyncTeam.begin`."""
        begun = self._loop.run(self._client.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait))
        return begun.driven(self._loop.run)

    @contextmanager
    def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Iterator[TeamEpisode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        with self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    train = driven_run(AsyncTeam.train)
    evaluate = driven_run(AsyncTeam.evaluate)
    recover = driven(AsyncTeam.recover)
