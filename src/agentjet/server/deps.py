"""Dependencies of the routes: guards, the reading of request bodies, and `until_disconnect`.

A guard decides from headers and path alone who may use a route. A route lists its guard among its dependencies.
`GuardedRoute` checks the guard before it reads the first byte of the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import Depends, Header, Query, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from agentjet.errors import Forbidden, NotFound, TooLarge, Unauthorized, Unprocessable
from agentjet.gateway import observability
from agentjet.gateway.concurrency import offload
from agentjet.gateway.read import RunReader
from agentjet.protocol import PREFIX
from agentjet.server.auth import KEY_PREFIX, Bearer
from agentjet.server.limits import Limits, parse_body
from agentjet.server.runs import AppDeps, EnteredRun, bearer_of, deps_of, entered_run, key_of, route_path


async def _deps(request: Request) -> AppDeps:  # async, so that FastAPI does not call it in a thread
    return deps_of(request)


Deps = Annotated[AppDeps, Depends(_deps)]


async def _reading(request: Request) -> RunReader:
    return entered_run(request).reader


Reading = Annotated[RunReader, Depends(_reading)]
"""The reader of the run of a request."""
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=255)]

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


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


SHARED = tuple(f"{PREFIX}/{name}" for name in ("status", "steps", "health", "waiting", "episodes", "evaluations"))
"""Reads that all viewers do after a tick. All tokens get the same answers."""
AT = (
    "Number of an event, such as `last_event` of a tick. The answer has the effects of this event. Viewers that give "
    "it get one answer for up to a second, which is read and encoded once."
)
CHECKED = "agentjet.checked"
"""Key in the scope of a request whose guards were checked before its body was read."""


class Guard:
    """One access rule. `check` raises `Unauthorized`, `Forbidden`, or `NotFound` for a route the run does not have."""

    def __init__(self, check: Callable[[EnteredRun, Request], object]) -> None:
        self._check = check

    def check(self, request: Request) -> None:
        run = entered_run(request)
        try:
            self._check(run, request)
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


def _check_episode(run: EnteredRun, request: Request, needed: Bearer = "client") -> None:
    episode_id = request.path_params["episode_id"]
    run.keys.control(bearer_of(request), needed, episode_id=episode_id, max_age=run.max_age)
    observability.episode_id.set(episode_id)


def _check_scorer(run: EnteredRun, request: Request) -> None:
    _check_episode(run, request)
    if bearer_of(request).startswith(KEY_PREFIX) and not deps_of(request).gateway.config.server.episode_may_finish:
        raise Forbidden(
            "This server does not accept rewards with an episode key: use the token in the file 'token' of its data "
            "dir, or set server.episode_may_finish = true.",
            code="not_your_reward",
        )


def _check_episode_key(run: EnteredRun, request: Request) -> None:
    request.state.episode_id = run.keys.episode(key_of(request), run.max_age)


def _check_server_admin(run: EnteredRun, request: Request) -> None:
    if request.scope.get("root_path"):
        raise NotFound("Runs are managed at /swarm/v1/runs: send this request without /runs/NAME.", code="not_found")
    run.keys.control(bearer_of(request), "admin")


def _check_small_body(run: EnteredRun, request: Request) -> None:
    declared = request.headers.get("content-length", "")
    if not (declared.isdecimal() and int(declared[:16]) <= run.limits.small_body_bytes):
        most = run.limits.small_body_bytes
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

BEARER = HTTPBearer(auto_error=False)
"""Declares the bearer token in `/openapi.json`. `bearer_of` reads it."""


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
"""As `VIEWER`, for the routes of `SHARED`."""


class GuardedRoute(APIRoute):
    """A route that checks its guards first, then reads, parses and validates the body within the limits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        guards = [each.dependency for each in self.dependencies if isinstance(each.dependency, Guard)]
        annotation: Any = self.body_field and self.body_field.field_info.annotation
        model: TypeAdapter[Any] | None = TypeAdapter(annotation) if self.body_field else None

        async def guarded(request: Request) -> Response:
            for guard in guards:
                guard.check(request)
            request.scope[CHECKED] = True
            if request.method == "GET" and "at" in request.query_params:
                return await _shared(request, handle)
            if model is not None:
                limits = entered_run(request).limits
                body = await _body(request, limits)
                value = None
                if body and _is_json(request):
                    value = await offload(len(body), parse_body, body, model, limits)
                request = _ReadRequest(request, body, value)
            return await handle(request)

        return guarded


async def _shared(request: Request, handle: Callable[[Request], Coroutine[Any, Any, Response]]) -> Response:
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
    shared = entered_run(request).shared
    if shared is None:
        return await handle(alone)
    known = await shared.get(f"{route_path(request.scope)}?{query}", int(at), lambda: handle(alone))
    return Response(known.body, known.status_code, media_type=known.media_type)


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


async def _body(request: Request, limits: Limits) -> bytes:
    """Raises `TooLarge`, if possible from the headers alone, or `ClientGone`."""
    too_large = TooLarge(f"The body is larger than {limits.body_bytes} bytes (server.max_body_mb).")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:16]) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > limits.body_bytes:
                raise too_large
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _is_json(request: Request) -> bool:
    """True if FastAPI reads the body as JSON; it reports every other type of body itself."""
    kind, _, subtype = request.headers.get("content-type", "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))
