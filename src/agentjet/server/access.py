"""The runs of a server on HTTP, and who may use which route: the run of a request, its keys, and the guards of routes.

The paths of a run begin with `/runs/NAME`; those of the default run also go without it. Invariants:

* a token or a key opens its own run only; the admin token of the default run opens every run;
* the answer to a caller without rights in a run does not depend on the run. It is the same for an open run, for one
  that was ended, and for a name that no run has. Its time differs by a few microseconds.

A guard decides from headers and path alone. A route lists its guard among its dependencies. `GuardedRoute` checks it
before it reads the first byte of the body.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from agentjet.errors import ConfigError, Conflict, Forbidden, NotFound, TooLarge, Unauthorized
from agentjet.gateway import Gateway, observability
from agentjet.gateway.read import RunReader
from agentjet.gateway.runs import Runs
from agentjet.gateway.ticks import SharedAnswers
from agentjet.protocol import RunSettings, RunView
from agentjet.server.auth import KEY_PREFIX, Bearer, Keys, SessionCodes
from agentjet.server.http import Limits
from agentjet.server.monitoring import Machine
from agentjet.types import DEFAULT_RUN

log = logging.getLogger(__name__)

RUN = "agentjet.run"
"""Key in the scope of a request below `/runs/NAME`: the run, as `RunScope`."""
CHECKED = "agentjet.checked"
"""Key in the scope of a request whose guards were checked before its body was read."""
RUN_PATH = re.compile(r"/runs/([^/]*)")
KEY_PATH = re.compile(r"/k/([^/]+)")
INFERENCE_PATH = re.compile(r"^(/k/[^/]+)?(/v1/.*)", re.DOTALL)

# --- the run of a request


@dataclass(frozen=True, slots=True)
class RunScope:
    """The parts of a run that guards and read routes use. The runs of `agentjet look` have no more."""

    name: str
    keys: Keys
    limits: Limits
    open_reader: Callable[[], RunReader]
    """Raises `NotFound` if `agentjet look` has no run."""
    shared: SharedAnswers[Response] | None = None
    """Answers that viewers share; None for a run without events."""
    refuse_foreign: Callable[[str], None] = lambda token: None
    """Raises `Forbidden` if another run has this token or key."""
    max_age: Callable[[], float] = lambda: 0.0
    """Returns the seconds that an episode key is valid from the start of its episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun(RunScope):
    """A run of a server. The routes that change something use its gateway, and the server around it."""

    gateway: Gateway
    runs: ServedRuns


def scope_of(request: HTTPConnection) -> RunScope:
    """Returns the run of a request: the default run if its path names none."""
    run: RunScope = request.scope.get(RUN) or request.app.state.default
    return run


def served_run(request: HTTPConnection) -> ServedRun:
    """Returns the run of a request with its gateway."""
    run = scope_of(request)
    assert isinstance(run, ServedRun)
    return run


def route_path(scope: Scope) -> str:
    """Returns the decoded path of a request without `/runs/NAME`."""
    found = RUN_PATH.match(scope["path"])
    return str(scope["path"][found.end() if found else 0 :])


def bearer_of(request: HTTPConnection) -> str:
    """Returns the bearer token of a request, or ""."""
    scheme, token = get_authorization_scheme_param(request.headers.get("Authorization"))
    return token if scheme.lower() == "bearer" else ""


def key_of(request: HTTPConnection) -> str:
    """Returns the episode key of a request, or "".

    OpenAI's SDKs send it as a bearer token, Anthropic's in the header `x-api-key`. Agents that can only set a URL have
    it in the path.
    """
    if in_path := KEY_PATH.match(route_path(request.scope)):
        return in_path[1]
    return bearer_of(request) or request.headers.get("x-api-key", "")


class ServedRuns:
    """The runs of a server, each with its keys."""

    def __init__(self, runs: Runs, keys: Keys) -> None:
        """`keys` are those of the default run. A run whose keys cannot be read is logged and cannot be entered."""
        self.runs = runs
        self.codes = SessionCodes(keys.clock)
        self.machine = Machine()
        self._limits = Limits.of(runs.default.config.server)
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
            open_reader=lambda: gateway.reader,
            shared=gateway.shared,
            refuse_foreign=self.refuse_foreign,
            max_age=lambda: gateway.swarm.job.max_episode_seconds,  # A changed job applies to keys issued before.
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
        if any(keys.knows(token) for keys in self._keys.values()):
            raise Forbidden(
                "This token or key does not belong to the run of this URL: use the URL of its own run, or the token "
                "of the run that you mean.",
                code="not_your_run",
            )

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


@dataclass(frozen=True)
class Guard:
    """One access rule. Raises `Unauthorized`, `Forbidden`, or `NotFound` for a route the run does not have."""

    rule: Callable[[RunScope, Request], object]

    def check(self, request: Request) -> None:
        run = scope_of(request)
        try:
            self.rule(run, request)
        except Unauthorized:
            if not run.keys.knows(key_of(request)):
                run.refuse_foreign(key_of(request))
            raise

    async def __call__(self, request: Request) -> None:
        """Checks the guard on a route that is not a `GuardedRoute`, after its body was read."""
        if CHECKED not in request.scope:
            self.check(request)


def _token(needed: Bearer) -> Guard:
    return Guard(lambda run, request: run.keys.control(bearer_of(request), needed))


def _check_episode(run: RunScope, request: Request, needed: Bearer = "client") -> None:
    episode_id = request.path_params["episode_id"]
    run.keys.control(bearer_of(request), needed, episode_id=episode_id, max_age=run.max_age())
    observability.episode_id.set(episode_id)


def _check_scorer(run: RunScope, request: Request) -> None:
    _check_episode(run, request)
    if bearer_of(request).startswith(KEY_PREFIX) and not served_run(request).gateway.config.server.episode_may_finish:
        raise Forbidden(
            "This server does not accept rewards with an episode key: use the token in the file 'token' of its data "
            "dir, or set server.episode_may_finish = true.",
            code="not_your_reward",
        )


def _check_episode_key(run: RunScope, request: Request) -> None:
    request.state.episode_id = run.keys.episode(key_of(request), run.max_age())


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
EPISODE_KEY = [Depends(Guard(_check_episode_key))]
"""Allows the key of an episode, and stores the episode's id in the state of the request."""
SMALL_BODY = [Depends(Guard(_check_small_body))]
"""Allows everyone: for a route without a token, which must not read large bodies of strangers."""

# --- parameters of routes


async def _served(request: Request) -> ServedRun:  # async, so that FastAPI does not call it in a thread
    return served_run(request)


async def _reading(request: Request) -> RunReader:
    return scope_of(request).open_reader()


Deps = Annotated[ServedRun, Depends(_served)]
Reading = Annotated[RunReader, Depends(_reading)]
"""The reader of the run of a request."""
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
BEARER = HTTPBearer(auto_error=False)
"""Declares the bearer token in `/openapi.json`. `bearer_of` reads it."""
AT = (
    "Number of an event, such as `last_event` of a tick. The answer has the effects of this event. Viewers that give "
    "it get one answer for up to a second, which is read and encoded once."
)


async def key_in_headers(
    token: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    api_key: Annotated[str, Header(alias="x-api-key")] = "",
) -> None:
    """Declares the headers of an episode key in `/openapi.json`. `key_of` reads them."""


async def key_in_path(key: str) -> None:
    """Declares an episode key in the path in `/openapi.json`."""


async def at_event(at: Annotated[int | None, Query(ge=0, description=AT)] = None) -> None:
    """Declares `at` in `/openapi.json`. `GuardedRoute` reads it."""


SHARED_VIEWER = [*VIEWER, Depends(at_event)]
"""As `VIEWER`, for the routes whose answers viewers share."""
