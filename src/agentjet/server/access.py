"""The runs of a server on HTTP, and who may use which control route: the guards, and answers that viewers share.

The paths of a run begin with `/runs/NAME`; those of the default run also go without it. Invariants:

* a token or a key opens its own run only; the admin token of the default run opens every run;
* the answer to a caller without rights in a run does not depend on the run. It is the same for an open run, for one
  that was ended, and for a name that no run has. Its time differs by a few microseconds.

A route lists its guard among its dependencies. `GuardedRoute` checks it before it reads the first byte of the body.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.requests import HTTPConnection
from starlette.responses import Response

from agentjet.errors import ConfigError, Conflict, Forbidden, NotFound, TooLarge, Unprocessable
from agentjet.front.calls import Calls
from agentjet.front.http import (
    INFERENCE_PATH,
    PROBLEMS,
    Guard,
    GuardedRoute,
    Handler,
    RequestLimits,
    RunScope,
    bearer_of,
    key_of,
    refuse_foreign,
    route_path,
    scope_of,
)
from agentjet.front.keys import KEY_PREFIX, Bearer, Keys, SessionCodes
from agentjet.front.segment import other_front
from agentjet.front.tracing import present_episode
from agentjet.protocol import PREFIX, RunSettings, RunView
from agentjet.server.gateway import Gateway
from agentjet.server.monitoring import Machine
from agentjet.server.read import RunReader
from agentjet.server.runs import Runs
from agentjet.server.ticks import SharedAnswers
from agentjet.swarm import EpisodeRecord
from agentjet.types import DEFAULT_RUN

log = logging.getLogger(__name__)

# --- the run of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadScope(RunScope):
    """A run whose records can be read. The runs of `agentjet look` have no more."""

    open_reader: Callable[[], RunReader]
    """Raises `NotFound` if `agentjet look` has no run."""
    shared: SharedAnswers[Response] | None = None
    """Answers that viewers share; None for a run without events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun(ReadScope):
    """A run of a server. The routes that change something use its gateway, and the server around it."""

    gateway: Gateway
    runs: ServedRuns


def read_scope(request: HTTPConnection) -> ReadScope:
    """Returns the run of a request with its reader."""
    run = scope_of(request)
    assert isinstance(run, ReadScope)
    return run


def served_run(request: HTTPConnection) -> ServedRun:
    """Returns the run of a request with its gateway."""
    run = scope_of(request)
    assert isinstance(run, ServedRun)
    return run


def front_url(gateway: Gateway, episode: EpisodeRecord, request: HTTPConnection) -> str:
    """Returns the URL at which the calls of an episode are answered, up to its last slash."""
    if gateway.fronted is None:
        return str(request.base_url)
    return f"{gateway.fronted.address(episode, str(request.base_url))}{request.scope.get('root_path', '')}/"


def _check_front(gateway: Gateway, episode_id: str, request: HTTPConnection) -> None:
    """See `RunScope.check_front`."""
    assert gateway.fronted is not None
    episode = gateway.swarm.episode(episode_id)
    raise other_front(episode.id, gateway.fronted.front(episode), f"{front_url(gateway, episode, request)}v1")


class ServedRuns:
    """The runs of a server, each with its keys."""

    def __init__(self, runs: Runs, keys: Keys) -> None:
        """`keys` are those of the default run. A run whose keys cannot be read is logged and cannot be entered."""
        self.runs = runs
        self.codes = SessionCodes(keys.clock)
        self.machine = Machine()
        self._limits = RequestLimits.of(runs.default.config.server)
        self.default = self._scope(keys, runs.default)
        self._keys = {DEFAULT_RUN: keys}
        for view in runs.views()[1:]:
            try:
                self._open_keys(view.name)
            except (ConfigError, OSError) as error:
                log.error("run %s cannot be entered: %s", view.name, error)

    def _scope(self, keys: Keys, gateway: Gateway) -> ServedRun:
        return ServedRun(
            name=gateway.run,
            keys=keys,
            limits=self._limits,
            calls=gateway.calls if isinstance(gateway.calls, Calls) else None,
            job=None if gateway.fronted is None else lambda: gateway.swarm.job,
            check_front=None if gateway.fronted is None else partial(_check_front, gateway),
            open_reader=lambda: gateway.reader,
            shared=gateway.shared,
            refuse_foreign=self.refuse_foreign,
            gateway=gateway,
            runs=self,
        )

    def enter(self, name: str, request: HTTPConnection) -> ServedRun:
        """Returns the run `name` for the owner of a token or key of the run, or of the server's admin token.

        Raises `Unauthorized`; `Forbidden` for the owner of another run; `NotFound` if the run is not open.
        """
        key, keys, default = key_of(request), self._keys.get(name), self.default.keys
        is_admin = default.bearer(key) == "admin"
        is_known = (keys or default).knows(key) and keys is not None  # The same work for a name without a run.
        if not (is_known or is_admin):
            self.refuse_foreign(key)
            if INFERENCE_PATH.match(route_path(request.scope)):
                default.episode(key, 0.0)
            default.control(key)
            raise AssertionError("no run has this token")
        try:
            gateway = self.runs.get(name)
        except NotFound:  # Only the server's admin gets the names of other runs.
            if is_admin:
                raise
            way_out = f"the server's admin can open it (agentjet runs create {name})"
            raise NotFound(f"The run {name!r} is not open: {way_out}.", code="run_not_found") from None
        if keys is None:
            raise NotFound(f"The keys of run {name!r} cannot be read: see the server's log.", code="run_not_found")
        return self._scope(keys, gateway)

    def exchange(self, code: str) -> tuple[str, Bearer, str, float]:
        """Returns run, role, key and end of the session that a code opens. Raises `Unauthorized`."""
        run, role = self.codes.redeem(code)
        return run, role, *self._keys[run].sign_session(role)

    def refuse_foreign(self, token: str) -> None:
        """Raises `Forbidden` if a run has this token or key."""
        refuse_foreign(token, self._keys.values())

    async def put(self, name: str, settings: RunSettings) -> RunView:
        """Creates or opens a run and its keys: see `Runs.put`."""
        made = await self.runs.put(name, settings)
        try:
            self._open_keys(name)
        except (ConfigError, OSError) as error:
            raise Conflict(f"The run {name!r} cannot be entered: {error}.", code="run_unusable") from None
        return made

    def _open_keys(self, name: str) -> None:
        """Reads the keys of a run and creates missing ones. Raises `ConfigError`, `OSError`."""
        folder, default = self.default.gateway.config.server.data_dir / "runs" / name, self.default.keys
        self._keys[name] = Keys.open(folder, server=default, clock=default.clock)


# --- guards


def _token(needed: Bearer) -> Guard:
    return Guard(lambda run, request: run.keys.control(bearer_of(request), needed))


def _check_episode(run: RunScope, request: Request, needed: Bearer = "client") -> None:
    episode_id = request.path_params["episode_id"]
    run.keys.control(bearer_of(request), needed, episode_id=episode_id, max_age=run.max_age())
    present_episode.set(episode_id)


def _check_scorer(run: RunScope, request: Request) -> None:
    _check_episode(run, request)
    if bearer_of(request).startswith(KEY_PREFIX) and not served_run(request).gateway.config.server.episode_may_finish:
        raise Forbidden(
            "This server does not accept rewards with an episode key: use the token in the file 'token' of its data "
            "dir, or set server.episode_may_finish = true.",
            code="not_your_reward",
        )


def _check_server_admin(run: RunScope, request: Request) -> None:
    if request.scope.get("root_path"):
        raise NotFound("Runs are managed at /swarm/v1/runs: send this request without /runs/NAME.", code="not_found")
    run.keys.control(bearer_of(request), "admin")


def _check_small_body(run: RunScope, request: Request) -> None:
    declared, most = request.headers.get("content-length", ""), run.limits.small_body_bytes
    if not (declared.isdecimal() and int(declared[:16]) <= most):
        raise TooLarge(f"The body is too large, or its Content-Length is missing: send at most {most} bytes.")


VIEWER = [Depends(_token("viewer"))]
"""Allows every token of the run, and the server's admin token, as the other guards do."""
CLIENT = [Depends(_token("client"))]
ADMIN = [Depends(_token("admin"))]
SERVER_ADMIN = [Depends(Guard(_check_server_admin))]
"""Allows the admin token of the default run, and no path of another run."""
EPISODE = [Depends(Guard(_check_episode))]
"""Allows the client token, the admin token, and the key of the episode in the path."""
EPISODE_READER = [Depends(Guard(lambda run, request: _check_episode(run, request, "viewer")))]
"""Allows every token of the run, and the key of the episode in the path."""
EPISODE_SCORER = [Depends(Guard(_check_scorer))]
"""As `EPISODE`, but allows the key only if `server.episode_may_finish` is true."""
SMALL_BODY = [Depends(Guard(_check_small_body))]
"""Allows everyone: for a route without a token, which must not read large bodies of strangers."""

# --- parameters of routes


async def _served(request: Request) -> ServedRun:  # async, so that FastAPI does not call it in a thread
    return served_run(request)


async def _reading(request: Request) -> RunReader:
    return read_scope(request).open_reader()


Deps = Annotated[ServedRun, Depends(_served)]
Reading = Annotated[RunReader, Depends(_reading)]
"""The reader of the run of a request."""
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
AT = (
    "Number of an event, such as `last_event` of a tick. The answer has the effects of this event. Viewers that give "
    "it get one answer for up to a second, which is read and encoded once."
)


async def at_event(at: Annotated[int | None, Query(ge=0, description=AT)] = None) -> None:
    """Declares `at` in `/openapi.json`. `ReadRoute` reads it."""


SHARED_VIEWER = [*VIEWER, Depends(at_event)]
"""As `VIEWER`, for the routes whose answers viewers share."""

# --- answers that viewers share

SHARED = tuple(f"{PREFIX}/{name}" for name in ("status", "steps", "health", "waiting", "episodes", "evaluations"))
"""Reads that all viewers do after a tick. All tokens get the same answers."""


class ReadRoute(GuardedRoute):
    """A guarded route whose answers viewers share if they name an event with `at`."""

    def handler(self) -> Handler:
        handle = super().handler()

        async def read(request: Request) -> Response:
            if request.method == "GET" and "at" in request.query_params:
                return await _shared(request, handle)
            return await handle(request)

        return read


async def _shared(request: Request, handle: Handler) -> Response:
    """Returns the answer to a read `at` an event: see `SharedAnswers`. The handler does not get the parameter."""
    at = request.query_params["at"]
    if not at.isdecimal() or len(at) > 18 or not route_path(request.scope).startswith(SHARED):
        raise Unprocessable(
            f"at = {at[:30]!r}: give the number of an event, and only to {', '.join(SHARED)}.",
            code="invalid_value",
            param="at",
        )
    query = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "at"])
    alone = Request({**request.scope, "query_string": query.encode()}, request.receive)
    shared = read_scope(request).shared
    if shared is None:
        return await handle(alone)
    known = await shared.get(f"{route_path(request.scope)}?{query}", int(at), lambda: handle(alone))
    return Response(known.body, known.status_code, media_type=known.media_type)


def new_router(tag: str, **options: Any) -> APIRouter:
    """Returns a router for guarded routes below `/swarm/v1`."""
    return APIRouter(prefix=PREFIX, tags=[tag], route_class=ReadRoute, responses=PROBLEMS, **options)
