"""`Swarm`: the client of one server for synchronous code. It holds no logic: `AsyncSwarm` does the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from agentjet.client.asynchronous import AsyncSwarm
from agentjet.client.connection import Retry
from agentjet.client.driving import Driver, driven, driven_run
from agentjet.client.episode import Episode
from agentjet.protocol import Event
from agentjet.types import Mode


class Swarm(Driver[AsyncSwarm]):
    """A client of one server. May be used from several threads. Its methods are those of `AsyncSwarm`; Ctrl-C in
    `train` and `evaluate` aborts the live episodes, then raises a `KeyboardInterrupt`, which ends a script that does
    not catch it with a sentence; SIGTERM, then `SystemExit`.

    `url` and `token` default to AGENTJET_URL and AGENTJET_TOKEN. `lease` is the epoch of the lease under which it
    works: see `take_lease`.
    `client_id` names this client to the server; without one each client has a random name. A process that begins with
    the `client_id` of an earlier one takes its places over: the episodes which that one left live are aborted. Several
    processes that are one client give the same `instance_id`, too; "" takes nothing over.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        lease: int | None = None,
        instance_id: str | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        named = {"client_id": client_id, "instance_id": instance_id}
        super().__init__(AsyncSwarm(url, token, **named, lease=lease, retry=retry, transport=transport))

    @property
    def asynchronous(self) -> AsyncSwarm:
        """A client of the same server under the same name, for the caller's own event loop."""
        return self._client.again()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    def begin(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Episode:
        """See `AsyncSwarm.begin`."""
        begun = self._loop.run(self._client.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait))
        return begun.driven(self._loop.run)

    @contextmanager
    def episode(
        self, task_id: str, *, task_set: str = "", group: str = "", mode: Mode = "train", wait: float = 60.0
    ) -> Iterator[Episode]:
        """An episode as a context: leaving it without `finish`, or by an exception, aborts."""
        with self.begin(task_id, task_set=task_set, group=group, mode=mode, wait=wait) as episode:
            yield episode

    finish = driven(AsyncSwarm.finish)
    abort = driven(AsyncSwarm.abort)
    train = driven_run(AsyncSwarm.train)
    evaluate = driven_run(AsyncSwarm.evaluate)
    episodes = driven(AsyncSwarm.episodes)
    episode_tree = driven(AsyncSwarm.episode_tree)
    evaluations = driven(AsyncSwarm.evaluations)
    status = driven(AsyncSwarm.status)
    job = driven(AsyncSwarm.job)
    set_job = driven(AsyncSwarm.set_job)
    change_job = driven(AsyncSwarm.change_job)
    start = driven(AsyncSwarm.start)
    stop = driven(AsyncSwarm.stop)
    take_lease = driven(AsyncSwarm.take_lease)
    end_lease = driven(AsyncSwarm.end_lease)
    enter_run = driven(AsyncSwarm.enter_run)
    checkpoints = driven(AsyncSwarm.checkpoints)
    checkpoint = driven(AsyncSwarm.checkpoint)
    tag = driven(AsyncSwarm.tag)
    untag = driven(AsyncSwarm.untag)
    export = driven(AsyncSwarm.export)

    def events(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncSwarm.events`."""
        return self._loop.iterate(self._client.events(after))
