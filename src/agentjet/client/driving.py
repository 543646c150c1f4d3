"""How a client for synchronous code drives the asynchronous one, which does the work, in an event loop in a thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from agentjet.client.threads import LoopThread
from agentjet.errors import AgentJetError


class Interrupted(SystemExit, KeyboardInterrupt):
    """Ctrl-C during a run. `except KeyboardInterrupt` catches it; a script that does not ends with the sentence and
    status 1, as after `sys.exit(sentence)`, instead of a traceback.
    """


class Closable(Protocol):
    """An asynchronous client."""

    async def close(self) -> None: ...


Client = TypeVar("Client", bound=Closable)
P = ParamSpec("P")
T = TypeVar("T")


class Driver(Generic[Client]):
    """A client for synchronous code; close it, or use it as a context manager."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = LoopThread()

    def close(self) -> None:
        """Close the connections and end the thread."""
        if not self._loop.abandoned:
            self._loop.run(self._client.close())
        self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def driven(
    verb: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Driver[Client], P], T]:
    """A method of the asynchronous client as one that returns when it is done, with the same signature."""

    @wraps(verb)
    def drive(self: Driver[Client], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(verb(self._client, *args, **kwargs))

    return drive


def driven_run(
    verb: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Driver[Client], P], T]:
    """The same for one that runs agents. Ctrl-C aborts the live episodes, then raises `Interrupted`; SIGTERM, then
    `SystemExit`.
    """

    @wraps(verb)
    def run_agents(self: Driver[Client], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self._loop.run_agents(verb(self._client, *args, **kwargs))
        except (AgentJetError, KeyboardInterrupt) as error:
            raise _told(error) from None

    return run_agents


def _told(error: BaseException) -> BaseException:
    """What ends a script, as its author should see it: the sentence, under the line of the script."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(
            "interrupted: this client's live episodes were aborted (one that could not be ends with its lease), "
            "what was learned stays learned"
        )
    return error.with_traceback(None)
