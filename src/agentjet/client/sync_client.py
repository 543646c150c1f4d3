"""`Swarm`: a client for synchronous code. It runs the methods of an `AsyncSwarm` on an event loop in a thread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import httpx

from agentjet.client.connection import Retry
from agentjet.client.episode import AsyncEpisode, Episode
from agentjet.client.swarm_client import AsyncSwarm
from agentjet.client.threads import LoopThread, raise_on_signals
from agentjet.errors import AgentJetError
from agentjet.protocol import EpisodeFilters, EpisodeView, Event

P = ParamSpec("P")
T = TypeVar("T")


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C during a run. `except KeyboardInterrupt` catches it. A script that does not catch it ends with the message
    and status 1, as after `sys.exit(message)`, without a traceback. A prompt, or a notebook, gets a plain
    `KeyboardInterrupt`: `SystemExit` would end a prompt."""


def blocking(verb: Callable[Concatenate[AsyncSwarm, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Swarm, P], T]:
    """A method of the asynchronous client as a synchronous method with the same signature."""

    @wraps(verb)
    def run(self: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(verb(self._client, *args, **kwargs))

    return run


def blocking_begin(
    verb: Callable[Concatenate[AsyncSwarm, P], Coroutine[Any, Any, AsyncEpisode]],
) -> Callable[Concatenate[Swarm, P], Episode]:
    """The same for a method that returns an episode."""

    @wraps(verb)
    def begin(self: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> Episode:
        return Episode(self._loop.run(verb(self._client, *args, **kwargs)), self._loop.run)

    return begin


def blocking_run(
    verb: Callable[Concatenate[AsyncSwarm, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Swarm, P], T]:
    """The same for a method that runs agents. Ctrl-C aborts the live episodes, then raises `Interrupted`; SIGTERM, then
    `SystemExit`."""

    @wraps(verb)
    def run_agents(self: Swarm, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with raise_on_signals():
                return self._loop.run(verb(self._client, *args, **kwargs))
        except AgentJetError as error:  # The author of the script sees the message, under the line of the script.
            raise error.with_traceback(None) from None
        except KeyboardInterrupt:
            is_interactive = hasattr(sys, "ps1")
            raise (KeyboardInterrupt if is_interactive else Interrupted)(
                "interrupted: this client's live episodes were aborted (or end with their leases); "
                "finished training steps are kept"
            ) from None

    return run_agents


class Swarm:
    """A client of one run of a server for synchronous code. May be used from several threads. Close it, or use it as a
    context manager.

    Arguments and methods are those of `AsyncSwarm`. Ctrl-C in `train` and `evaluate` aborts the live episodes, then
    raises a `KeyboardInterrupt`; a script that does not catch it ends with a message. SIGTERM aborts them too, then
    raises `SystemExit`. A signal that comes twice within two seconds counts once. A child process makes its own client
    after `fork()`: one that was used before raises `RuntimeError` there.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        client_id: str | None = None,
        instance_id: str | None = None,
        retry: Retry | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        named = {"client_id": client_id, "instance_id": instance_id}
        self._client = AsyncSwarm(url, token, **named, retry=retry, transport=transport)
        self._loop = LoopThread()

    @property
    def url(self) -> str:
        """The server's address."""
        return self._client.url

    def of_run(self, name: str, token: str | None = None) -> Swarm:
        """See `AsyncSwarm.of_run`."""
        swarm = Swarm.__new__(Swarm)
        swarm._client, swarm._loop = self._client.of_run(name, token), LoopThread()
        return swarm

    begin = blocking_begin(AsyncSwarm.begin)
    episode = begin  # An `Episode` is a context manager.
    finish = blocking(AsyncSwarm.finish)
    abort = blocking(AsyncSwarm.abort)
    close_group = blocking(AsyncSwarm.close_group)
    train = blocking_run(AsyncSwarm.train)
    evaluate = blocking_run(AsyncSwarm.evaluate)
    sft = blocking_run(AsyncSwarm.sft)
    episodes = blocking(AsyncSwarm.episodes)
    episode_tree = blocking(AsyncSwarm.episode_tree)
    group = blocking(AsyncSwarm.group)
    batches = blocking(AsyncSwarm.batches)
    batch = blocking(AsyncSwarm.batch)
    steps = blocking(AsyncSwarm.steps)
    evaluations = blocking(AsyncSwarm.evaluations)
    status = blocking(AsyncSwarm.status)
    health = blocking(AsyncSwarm.health)
    waiting = blocking(AsyncSwarm.waiting)
    job = blocking(AsyncSwarm.job)
    change_job = blocking(AsyncSwarm.change_job)
    start = blocking(AsyncSwarm.start)
    stop = blocking(AsyncSwarm.stop)
    cluster = blocking(AsyncSwarm.cluster)
    scale = blocking(AsyncSwarm.scale)
    runs = blocking(AsyncSwarm.runs)
    start_run = blocking(AsyncSwarm.start_run)
    end_run = blocking(AsyncSwarm.end_run)
    checkpoints = blocking(AsyncSwarm.checkpoints)
    checkpoint = blocking(AsyncSwarm.checkpoint)
    tag = blocking(AsyncSwarm.tag)
    untag = blocking(AsyncSwarm.untag)
    export = blocking(AsyncSwarm.export)
    session_code = blocking(AsyncSwarm.session_code)

    def all_episodes(self, **filters: Unpack[EpisodeFilters]) -> Iterator[EpisodeView]:
        """See `AsyncSwarm.all_episodes`."""
        return self._loop.iterate(self._client.all_episodes(**filters))

    def events(self, after: int = 0) -> Iterator[Event]:
        """See `AsyncSwarm.events`."""
        return self._loop.iterate(self._client.events(after))

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_forked:  # The parent closes them.
            return
        if not self._loop.abandoned:
            self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
