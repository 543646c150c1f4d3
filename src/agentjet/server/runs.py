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

from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection
from starlette.types import Scope

from agentjet.errors import ConfigError, Conflict, Forbidden, NotFound
from agentjet.gateway import Gateway
from agentjet.gateway.runs import Runs
from agentjet.protocol import RunSettings, RunView
from agentjet.server.auth import SECRET_FILES, Keys
from agentjet.server.limits import Limits
from agentjet.types import DEFAULT_RUN, RUN_NAME

log = logging.getLogger(__name__)

RUN = "agentjet.run"
"""Key in the scope of a request below `/runs/NAME`: the run, as `AppDeps`."""
RUN_PATH = re.compile(r"/runs/([^/]*)")
KEY_PATH = re.compile(r"/k/([^/]+)")


@dataclass(frozen=True, slots=True)
class AppDeps:
    """The objects that the routes use: a run and its keys, and the server around it."""

    gateway: Gateway
    keys: Keys
    runs: ServedRuns
    limits: Limits

    @property
    def max_age(self) -> float:
        """Seconds that an episode key is valid from the start of its episode."""
        return self.gateway.swarm.job.max_episode_seconds


def deps_of(request: HTTPConnection) -> AppDeps:
    """Returns the run of a request: the default run if its path names none."""
    deps = request.scope.get(RUN) or request.app.state.deps
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


def run_in_path(scope: Scope) -> tuple[str, str] | None:
    """Returns the part of the path that names a run, and the name; None for a path of the default run.

    A name with percent signs, or one that no run can have, is returned with `/runs/` in front: no run has it.
    """
    found = RUN_PATH.match(scope["path"])
    if found is None:
        return None
    is_plain = RUN_NAME.fullmatch(found[1]) and (scope["raw_path"] + b"/").startswith(f"{found[0]}/".encode())
    return found[0], found[1] if is_plain else found[0]


class ServedRuns:
    """The runs of a server, each with its keys."""

    def __init__(self, runs: Runs, keys: Keys, limits: Limits) -> None:
        """`keys` are those of the default run. A run whose keys cannot be read is logged and cannot be entered."""
        self.runs = runs
        self.default = AppDeps(runs.default, keys, self, limits)
        self._keys = {DEFAULT_RUN: keys}
        for view in runs.views()[1:]:
            try:
                self._open_keys(view.name)
            except (ConfigError, OSError) as error:
                log.error("run %s cannot be entered: %s", view.name, error)

    def enter(self, name: str, token: str) -> AppDeps | None:
        """Returns the run `name` for the owner of `token`: a token or key of the run, or the server's admin token.

        None if no run has the token. Raises `Forbidden` for that of another run, and `NotFound` if the run is not open.
        """
        keys, default = self._keys.get(name), self.default.keys
        if (keys or default).knows(token) and keys is not None:
            return AppDeps(self._opened(name, token), keys, self, self.default.limits)
        if default.is_admin(token):
            self.runs.get(name)
            raise NotFound(f"The keys of run {name!r} cannot be read: see the server's log.", code="run_not_found")
        self.refuse_foreign(token)
        return None

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

    def _opened(self, name: str, token: str) -> Gateway:
        """Raises `NotFound` if the run is not open; only the server's admin gets the names of other runs."""
        try:
            return self.runs.get(name)
        except NotFound:
            if self.default.keys.is_admin(token):
                raise
            raise NotFound(
                f"The run {name!r} is not open: the server's admin can open it (agentjet runs create {name}).",
                code="run_not_found",
            ) from None

    def _open_keys(self, name: str) -> None:
        """Reads the keys of a run and creates missing ones. Raises `ConfigError`, `OSError`.

        Keys that are known are read again if a file is missing: the folder may have been removed, and the run with it.
        """
        folder = self.default.gateway.config.server.data_dir / "runs" / name
        if name not in self._keys or not all((folder / file).exists() for file in SECRET_FILES.values()):
            default = self.default.keys
            self._keys[name] = Keys.open(folder, server_admin=default.admin_token, clock=default.clock)
