"""The runs of a server on HTTP: the run of a request, the keys of each run, and the decision who may enter a run.

The paths of a run begin with `/runs/NAME`; those of the default run also go without it. Invariants:

* a token or a key opens its own run only; the admin token of the default run opens every run;
* the answer to a caller without rights in a run does not depend on the run. It is the same for an open run, for one
  that was ended, and for a name that no run has. Its time differs by a few microseconds.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Protocol

from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Scope

from agentjet.errors import ConfigError, Conflict, Forbidden, NotFound
from agentjet.gateway import Gateway
from agentjet.gateway.read import RunReader
from agentjet.gateway.runs import Runs
from agentjet.gateway.ticks import SharedAnswers
from agentjet.protocol import RunSettings, RunView
from agentjet.server.auth import Bearer, Keys, SessionCodes
from agentjet.server.limits import Limits
from agentjet.server.machine import Machine
from agentjet.types import DEFAULT_RUN

log = logging.getLogger(__name__)

RUN = "agentjet.run"
"""Key in the scope of a request below `/runs/NAME`: the run, as `EnteredRun`."""
RUN_PATH = re.compile(r"/runs/([^/]*)")
KEY_PATH = re.compile(r"/k/([^/]+)")
INFERENCE_PATH = re.compile(r"^(/k/[^/]+)?(/v1/.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EnteredRun:
    """The parts of a run that guards and read routes use. The runs of `agentjet look` have no more."""

    keys: Keys
    limits: Limits

    @property
    def reader(self) -> RunReader:
        raise NotImplementedError

    @property
    def shared(self) -> SharedAnswers[Response] | None:
        """Answers that viewers share; None for a run without events."""
        return None

    @property
    def max_age(self) -> float:
        """Seconds that an episode key is valid from the start of its episode."""
        return 0.0

    def refuse_foreign(self, token: str) -> None:
        """Raises `Forbidden` if another run has this token or key."""


class Entrance(Protocol):
    """The runs of an application."""

    def enter(self, name: str, request: HTTPConnection) -> EnteredRun:
        """Returns the run `name` if the request may enter it, else raises `RequestError`."""


@dataclass(frozen=True, slots=True)
class AppDeps(EnteredRun):
    """The objects that the routes use: a run and its keys, and the server around it."""

    gateway: Gateway
    runs: ServedRuns

    @property
    def shared(self) -> SharedAnswers[Response]:
        return self.gateway.shared

    @property
    def max_age(self) -> float:
        return self.gateway.swarm.job.max_episode_seconds

    @property
    def reader(self) -> RunReader:
        return self.gateway.reader

    def refuse_foreign(self, token: str) -> None:
        self.runs.refuse_foreign(token)


def entered_run(request: HTTPConnection) -> EnteredRun:
    """Returns the run of a request: the default run if its path names none."""
    run: EnteredRun = request.scope.get(RUN) or request.app.state.deps
    return run


def deps_of(request: HTTPConnection) -> AppDeps:
    """Returns the run of a request with its gateway."""
    deps = entered_run(request)
    assert isinstance(deps, AppDeps)
    return deps


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

    def __init__(self, runs: Runs, keys: Keys, limits: Limits) -> None:
        """`keys` are those of the default run. A run whose keys cannot be read is logged and cannot be entered."""
        self.runs = runs
        self.codes = SessionCodes(keys.clock)
        self.machine = Machine()
        self.default = AppDeps(keys, limits, runs.default, self)
        self._keys = {DEFAULT_RUN: keys}
        for view in runs.views()[1:]:
            try:
                self._open_keys(view.name)
            except (ConfigError, OSError) as error:
                log.error("run %s cannot be entered: %s", view.name, error)

    def enter(self, name: str, request: HTTPConnection) -> AppDeps:
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
        return AppDeps(keys, self.default.limits, gateway, self)

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
