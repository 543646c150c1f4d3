"""Dependencies of the routes: guards, the reading of request bodies, and `until_disconnect`.

A guard decides from headers and path alone who may use a route. A route lists its guard among its dependencies, where
it is part of the route's documentation. `GuardedRoute` checks the guard before it reads the first byte of the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Header, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentjet.errors import Forbidden, NotFound, TooLarge, Unauthorized
from agentjet.gateway import observability
from agentjet.gateway.concurrency import offload
from agentjet.server.auth import KEY_PREFIX
from agentjet.server.limits import Limits, parse_body
from agentjet.server.runs import AppDeps, bearer_of, deps_of, key_of


async def _deps(request: Request) -> AppDeps:  # async, so that FastAPI does not call it in a thread
    return deps_of(request)


Deps = Annotated[AppDeps, Depends(_deps)]
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


def hang_up_of(request: Request) -> Callable[[], None]:
    """Returns a function that closes the request's connection at once. In-process transports have no connection."""
    hang_up: Callable[[], None] = getattr(request.state, "hang_up", lambda: None)
    return hang_up


async def until_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises `ClientGone`.

    The body of the request must have been read: the next message is then the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


Check = Callable[[AppDeps, str, Request], object]
"""Arguments: the dependencies, the bearer token or "", the request. Raises `Unauthorized` or `Forbidden`."""
CHECKED = "agentjet.checked"
"""Key in the scope of a request whose guards were checked before its body was read."""


class Guard:
    """One access rule, listed among the dependencies of a route."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def check(self, request: Request) -> None:
        """Raises `Unauthorized`, `Forbidden`, or `NotFound` for a route that the run does not have."""
        deps = deps_of(request)
        try:
            self._check(deps, bearer_of(request), request)
        except Unauthorized:
            if not deps.keys.knows(key_of(request)):
                deps.runs.refuse_foreign(key_of(request))
            raise

    async def __call__(self, request: Request) -> None:
        """Checks the guard on a route that is not a `GuardedRoute`, after its body was read."""
        if CHECKED not in request.scope:
            self.check(request)


def _episode(deps: AppDeps, token: str, request: Request) -> None:
    episode_id = request.path_params["episode_id"]
    deps.keys.client(token, episode_id=episode_id, max_age=deps.max_age)
    observability.episode_id.set(episode_id)


def _episode_reader(deps: AppDeps, token: str, request: Request) -> None:
    episode_id = request.path_params["episode_id"]
    deps.keys.control(token, episode_id=episode_id, max_age=deps.max_age)
    observability.episode_id.set(episode_id)


def _episode_scorer(deps: AppDeps, token: str, request: Request) -> None:
    _episode(deps, token, request)
    if token.startswith(KEY_PREFIX) and not deps.gateway.config.server.episode_may_finish:
        raise Forbidden(
            "This server does not accept rewards with an episode key: use the token in the file 'token' of its data "
            "dir, or set server.episode_may_finish = true.",
            code="not_your_reward",
        )


def _episode_key(deps: AppDeps, token: str, request: Request) -> None:
    request.state.episode_id = deps.keys.episode(key_of(request), deps.max_age)


def _server_admin(deps: AppDeps, token: str, request: Request) -> None:
    if request.scope.get("root_path"):
        raise NotFound("Runs are managed at /swarm/v1/runs: send this request without /runs/NAME.", code="not_found")
    deps.keys.admin(token)


VIEWER = Guard(lambda deps, token, _: deps.keys.control(token))
"""Allows every token of the run, and the server's admin token, as the other guards do."""
CLIENT = Guard(lambda deps, token, _: deps.keys.client(token))
"""Allows the client token and the admin token."""
ADMIN = Guard(lambda deps, token, _: deps.keys.admin(token))
"""Allows the admin token."""
SERVER_ADMIN = Guard(_server_admin)
"""Allows the admin token of the default run, and no path of another run."""
EPISODE = Guard(_episode)
"""Allows the client token, the admin token, and the key of the episode in the path."""
EPISODE_READER = Guard(_episode_reader)
"""Allows every token of the run, and the key of the episode in the path."""
EPISODE_SCORER = Guard(_episode_scorer)
"""As `EPISODE`, but allows the key only if `server.episode_may_finish` is true."""
EPISODE_KEY = Guard(_episode_key)
"""Allows the key of an episode, and stores the episode's id in the state of the request."""

BEARER = HTTPBearer(auto_error=False)
"""Declares the bearer token in `/openapi.json`. `bearer_of` reads it."""


async def key_in_headers(
    token: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)],
    api_key: Annotated[str, Header(alias="x-api-key")] = "",
) -> None:
    """Declares the headers of an episode key in `/openapi.json`. `key_of` reads them."""


async def key_in_path(key: str) -> None:
    """Declares an episode key in the path in `/openapi.json`."""


class GuardedRoute(APIRoute):
    """A route that checks its guards first, then reads, parses and validates the body within the limits."""

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
    """A request whose body was read and validated before FastAPI reads it."""

    def __init__(self, request: Request, body: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._read, self._value = body, value

    async def body(self) -> bytes:
        return self._read

    async def json(self) -> Any:
        """Returns the validated model. FastAPI's validation accepts it unchanged."""
        return self._value


async def _read(request: Request, model: TypeAdapter[Any]) -> Request:
    limits = deps_of(request).limits
    body = await _body(request, limits)
    value = await offload(len(body), parse_body, body, model, limits) if body and _is_json(request) else None
    return _ReadRequest(request, body, value)


async def _body(request: Request, limits: Limits) -> bytes:
    """Raises `TooLarge`, if possible from the headers alone, or `ClientGone`."""
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
    """True if FastAPI reads the body as JSON; it reports every other type of body itself."""
    kind, _, subtype = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
