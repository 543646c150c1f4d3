"""What every route has at hand: the gateway, the keys, the lease and the limits.

Who may use a route, told by its headers and its path alone, and before one byte of its body is read.

A route names its guard among its dependencies, where it documents itself; `GuardedRoute` asks it first. Then it reads,
counts, parses and validates the body, large ones in a thread: see `json_body`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentjet.errors import Forbidden, TooLarge
from agentjet.gateway import Gateway, observability
from agentjet.gateway.concurrency import offload
from agentjet.server.auth import KEY_PREFIX, Keys
from agentjet.server.disconnect import ClientGone
from agentjet.server.limits import Limits, parse_body
from agentjet.server.server_lease import Lease, RunSwitcher


@dataclass(frozen=True, slots=True)
class AppDeps:
    """Put on the app by `create_app`."""

    runs: RunSwitcher
    keys: Keys
    lease: Lease
    limits: Limits

    @property
    def gateway(self) -> Gateway:
        return self.runs.gateway

    @property
    def max_age(self) -> float:
        """Seconds that a key is good from its episode's beginning: an episode lives no longer."""
        return self.gateway.swarm.job.max_episode_seconds


def deps_of(request: Request) -> AppDeps:
    wiring = request.app.state.deps
    assert isinstance(wiring, AppDeps)
    return wiring


async def _wiring(request: Request) -> AppDeps:
    return deps_of(request)


Deps = Annotated[AppDeps, Depends(_wiring)]
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]
LeaseEpoch = Annotated[int | None, Header(alias="AgentJet-Lease", ge=0, le=2**53)]
"""The epoch of the lease that the caller believes to have."""


async def require_lease(wired: Deps, epoch: LeaseEpoch = None) -> None:
    """The present lease's epoch, while there is one. What a lease that ran out left being served is left."""
    wired.lease.check(epoch)
    if not wired.lease.seconds_left:
        await wired.runs.enter("", None)


Check = Callable[[AppDeps, str, Request], None]
"""Gets the bearer token, empty when there is none. Raises `Unauthorized` or `Forbidden`."""


CHECKED = "agentjet.checked"
"""Key of a request's scope: its guards were asked before its body."""


class Guard:
    """One rule. It stands among a route's dependencies."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def check(self, request: Request) -> None:
        """Raises `Unauthorized` or `Forbidden`."""
        self._check(deps_of(request), bearer_of(request), request)

    async def __call__(self, request: Request) -> None:
        """Checks a route that is not a `GuardedRoute`, whose body was read before."""
        if CHECKED not in request.scope:
            self.check(request)


def bearer_of(request: Request) -> str:
    """The bearer token of a request; empty when there is none."""
    scheme, token = get_authorization_scheme_param(request.headers.get("Authorization"))
    return token if scheme.lower() == "bearer" else ""


def key_of(request: Request) -> str:
    """The episode's key, wherever the request has it; empty when there is none.

    OpenAI's SDKs send it as a bearer token, Anthropic's in a header of its own, and agents that can set a URL only have
    it in the path.
    """
    if "key" in request.path_params:
        return str(request.path_params["key"])
    return bearer_of(request) or request.headers.get("x-api-key", "")


def _viewer(wired: AppDeps, token: str, request: Request) -> None:
    wired.keys.control(token)


def _client(wired: AppDeps, token: str, request: Request) -> None:
    wired.keys.client(token)


def _admin(wired: AppDeps, token: str, request: Request) -> None:
    wired.keys.admin(token)


def _episode(wired: AppDeps, token: str, request: Request) -> None:
    episode_id = request.path_params["episode_id"]
    wired.keys.client(token, episode_id=episode_id, max_age=wired.max_age)
    observability.episode_id.set(episode_id)


def _episode_reader(wired: AppDeps, token: str, request: Request) -> None:
    episode_id = request.path_params["episode_id"]
    wired.keys.control(token, episode_id=episode_id, max_age=wired.max_age)
    observability.episode_id.set(episode_id)


def _episode_scorer(wired: AppDeps, token: str, request: Request) -> None:
    _episode(wired, token, request)
    if token.startswith(KEY_PREFIX) and not wired.gateway.config.server.episode_may_finish:
        raise Forbidden(
            "An episode's key does not set its reward here: this takes the token in the file 'token' of the server's "
            "data dir, or server.episode_may_finish = true.",
            code="not_your_reward",
        )


def _episode_key(wired: AppDeps, token: str, request: Request) -> None:
    request.state.episode_id = wired.keys.episode(key_of(request), wired.max_age)


VIEWER = Guard(_viewer)
"""Any token of the server."""
CLIENT = Guard(_client)
"""A token of the server, client's or admin's."""
ADMIN = Guard(_admin)
"""The admin token."""
EPISODE = Guard(_episode)
"""A client's or admin's token, or the key of this very episode."""
EPISODE_READER = Guard(_episode_reader)
"""Any token of the server, or the key of this very episode."""
EPISODE_SCORER = Guard(_episode_scorer)
"""As `EPISODE`, unless `server.episode_may_finish` keeps rewards to the tokens."""
EPISODE_KEY = Guard(_episode_key)
"""The key of an episode, whose id it leaves in the request's state."""


BEARER = HTTPBearer(auto_error=False)
"""Tells `/openapi.json` that a token is needed; `bearer_of` reads it."""


async def key_in_headers(
    token: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    api_key: Annotated[str, Header(alias="x-api-key")] = "",
) -> None:
    """Tells `/openapi.json` where a key may stand; `key_of` reads it."""


async def key_in_path(key: str) -> None:
    """The same of a key in the path."""


class GuardedRoute(APIRoute):
    """A route that asks its guards before it reads a body, and reads one within the limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        guards = [each.dependency for each in self.dependencies if isinstance(each.dependency, Guard)]
        model: TypeAdapter[Any] | None = None
        if self.body_field is not None and (annotation := self.body_field.field_info.annotation) is not None:
            model = TypeAdapter(annotation)

        async def guarded(request: Request) -> Response:
            for guard in guards:
                guard.check(request)
            request.scope[CHECKED] = True
            return await handle(request if model is None else await _read(request, model))

        return guarded


class _ReadRequest(Request):
    """A request whose body was read and validated before FastAPI asks for it."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._read, self._value = body, value

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> Any:
        """The model's instance, which FastAPI's own validation passes on as it is."""
        return self._value


async def _read(request: Request, model: TypeAdapter[Any]) -> Request:
    limits = deps_of(request).limits
    body = await _body(request, limits)
    value = await offload(len(body), parse_body, body, model, limits) if body and _is_json(request) else None
    return _ReadRequest(request, body, value)


async def _body(request: Request, limits: Limits) -> bytes:
    """Raises `TooLarge`, as early as the headers tell, or `ClientGone`."""
    declared = request.headers.get("content-length", "")
    pieces, size = [], int(declared) if declared.isdecimal() and len(declared) < 16 else 0
    try:
        if size <= limits.body_bytes:
            size = 0
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                if size > limits.body_bytes:
                    break
    except ClientDisconnect:
        raise ClientGone from None
    if size > limits.body_bytes:
        raise TooLarge(f"The body is larger than {limits.body_bytes} bytes (server.max_body_mb).")
    return b"".join(pieces)


def _is_json(request: Request) -> bool:
    """As FastAPI has it, which says what is wrong with any other type of body."""
    kind, _, subtype = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
