"""From a request to its route, and from an error to its response.

1. `RunMiddleware` checks `Host` and finds the run of a path below `/runs/NAME`.
2. `GuardedRoute` checks the guards, then reads, parses and validates the body once, within the limits.
3. `respond_to_error` returns errors: RFC 9457 problem+json on control routes, the error shape of the dialect on
   inference routes. An unexpected exception becomes a 500 here. uvicorn logs it once, with its traceback.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from reprlib import repr as short_repr
from typing import Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentjet import __version__
from agentjet.config import ServerConfig
from agentjet.config.schema import is_loopback
from agentjet.errors import (
    CheckpointError,
    InvalidRequest,
    Later,
    RequestError,
    ServerFailed,
    StorageFailed,
    TooLarge,
    Unprocessable,
    nearest_name,
)
from agentjet.gateway import observability
from agentjet.gateway.concurrency import LARGE, Turns, offload
from agentjet.protocol import PREFIX, Problem, refusal_of, status_of
from agentjet.server.access import (
    CHECKED,
    INFERENCE_PATH,
    RUN,
    RUN_PATH,
    Guard,
    RunScope,
    route_path,
    scope_of,
    served_run,
)
from agentjet.server.dialects import DIALECTS, error_shape
from agentjet.server.http import Limits
from agentjet.types import RUN_NAME

Result = TypeVar("Result")

# --- host and run


HOST = re.compile(r"([\w.-]+|\[[\da-f:.]+\])(:\d{1,5})?", re.ASCII)
"""Syntax of `Host` in lower case: a name or an address, with or without a port."""
REQUESTS_A_ROUND = 8
"""Requests that begin in one round of the event loop. A request usually takes 0.5 ms until it waits for something."""


def allowed_hosts(server: ServerConfig) -> frozenset[str] | None:
    """Returns the allowed host names besides those of loopback, in lower case, without ports.

    None allows every name: the server has a non-loopback address and `server.allowed_hosts` is empty.
    """
    named = frozenset(_host(name) for name in server.allowed_hosts.split(",") if name.strip())
    if not is_loopback(server.host) and not named:
        return None
    return named | {server.host.lower()}


class RunMiddleware:
    """Middleware that checks `Host`, and finds the run of a path below `/runs/NAME`, or refuses the request.

    Loopback names and those in `allowed` are allowed; None allows every name. This prevents DNS rebinding: a web page
    can resolve its own host name to 127.0.0.1 and send requests to this server, but the browser then sends that name in
    `Host`. Starlette's `TrustedHostMiddleware` is not used: it answers in plain text and accepts a repeated `Host`.

    `/runs/NAME` becomes the root path, so routes match the rest and `request.base_url` is that of the run. Requests
    that arrive together take turns.
    """

    def __init__(
        self, app: ASGIApp, enter: Callable[[str, HTTPConnection], RunScope], allowed: frozenset[str] | None
    ) -> None:
        """`enter` returns a run if the request may enter it, else raises `RequestError`."""
        self._app = app
        self._enter_run = enter
        self._allowed = allowed
        self._turns = Turns(REQUESTS_A_ROUND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._turns.turn()
            try:
                self._check_host(Headers(scope=scope).getlist("host"))
                if named := RUN_PATH.match(scope["path"]):
                    scope = self._enter({**scope, "root_path": named[0]}, named[1])
            except RequestError as error:
                await error_response(route_path(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_host(self, given: list[str]) -> None:
        host = _host(given[0]) if len(given) == 1 else ""
        any_host = self._allowed is None and (host or not given)  # HTTP/1.0 requests can have no Host.
        if not (any_host or is_loopback(host) or host in (self._allowed or ())):
            raise InvalidRequest(
                f"The host {', '.join(given)[:200]!r} is not allowed: to allow it, add it to server.allowed_hosts.",
                code="host_not_allowed",
            )

    def _enter(self, scope: Scope, name: str) -> Scope:
        """A name with percent signs, or one that no run can have, is looked up as a path, which no run has."""
        root = scope["root_path"]
        if not (RUN_NAME.fullmatch(name) and (scope["raw_path"] + b"/").startswith(f"{root}/".encode())):
            name = root
        # Agents check their base URL with HEAD and without a key. No answer to it depends on the run.
        if scope["method"] != "HEAD":
            scope[RUN] = self._enter_run(name, HTTPConnection(scope))
            observability.run.set(name)
        return scope


def _host(given: str) -> str:
    """Returns a host in lower case without port and brackets, or "" if it is malformed."""
    found = HOST.fullmatch(given.strip().lower())
    return found[1].strip("[]") if found else ""


# --- guards and bodies


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


SHARED = tuple(f"{PREFIX}/{name}" for name in ("status", "steps", "health", "waiting", "episodes", "evaluations"))
"""Reads that all viewers do after a tick. All tokens get the same answers."""


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
                limits = scope_of(request).limits
                # Starlette keeps a body that was read in these two fields, and FastAPI takes it from there. A model in
                # place of the JSON value is valid as it is.
                request._body = await _body(request, limits)
                if request._body and _is_json(request):
                    request._json = await offload(len(request._body), parse_body, request._body, model, limits)
            return await handle(request)

        return guarded


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
    shared = scope_of(request).shared
    if shared is None:
        return await handle(alone)
    known = await shared.get(f"{route_path(request.scope)}?{query}", int(at), lambda: handle(alone))
    return Response(known.body, known.status_code, media_type=known.media_type)


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


def parse_body(body: bytes, model: TypeAdapter[Any], limits: Limits) -> Any:
    """Returns a body as a value of `model`. Raises `InvalidRequest`, `TooLarge`, or `RequestValidationError`."""
    if len(body) >= LARGE:  # Counting is cheap; a parsed body of empty objects has 25 times the size of its text.
        _check_counts(body, limits)
    try:
        value = json.loads(body)
    except RecursionError:
        raise _too_deep("", limits) from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", code="invalid_json") from None
    _check_shape(value, limits)
    try:
        return model.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None


def count_values(body: bytes, most: int) -> tuple[int, int]:
    """Returns an upper bound of the number of values in a JSON text, and the number of its arrays and objects.

    Above `most` values the number can be too small, but is above `most`: splitting millions of strings takes seconds.
    """
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (num_quotes := without_escapes.count(b'"')) > 4 * most:  # A value has at most two strings, with its key.
        return num_quotes // 4, 0
    outside = b"".join(without_escapes.split(b'"')[::2])
    num_opened = outside.count(b"[") + outside.count(b"{")
    return num_opened + outside.count(b",") + 1, num_opened


def _check_counts(body: bytes, limits: Limits) -> None:
    opened = body.count(b"[") + body.count(b"{")
    if opened <= limits.containers and opened + body.count(b",") < limits.values:
        return  # An upper bound, because it includes characters inside strings; enough for most bodies.
    num_values, num_containers = count_values(body, limits.values)
    for found, most, what in (
        (num_containers, limits.containers, "arrays and objects"),
        (num_values, limits.values, "values"),
    ):
        if found > most:
            raise TooLarge(f"The body has {found} {what}, above the limit of {most}: send fewer items.")


def _check_shape(body: Any, limits: Limits) -> None:
    """Goes level by level, because deep nesting would exceed the recursion limit. Errors name the key of the body."""
    level: list[tuple[str, Any]] = [("", body)]
    for depth in range(limits.depth):
        below: list[tuple[str, Any]] = []
        for name, value in level:  # The name is empty outside a key of the body.
            if isinstance(value, dict):
                if len(value) > limits.keys:
                    why = f"has an object with {len(value)} keys, above the limit of {limits.keys}."
                    raise TooLarge(f"{name or 'the body'} {why}", param=name or None)
                below += [(name if depth else key, item) for key, item in value.items() if type(item) in (dict, list)]
            elif isinstance(value, list):
                below += [(name, item) for item in value if type(item) in (dict, list)]
        if not below:
            return
        level = below
    raise _too_deep(level[0][0], limits)


def _too_deep(name: str, limits: Limits) -> InvalidRequest:
    why = f"nests its JSON more than {limits.depth} levels deep: flatten it."
    return InvalidRequest(f"{name or 'the body'} {why}", code="nested_too_deep", param=name or None)


# --- errors

COUNTED = (400, 404, 413, 422, 500)
"""Statuses after which a client does not repeat a call."""
PROBLEM: dict[str, Any] = {"model": Problem, "content": {"application/problem+json": {}}}
"""Documentation of an error response of a control route in `/openapi.json`."""
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    **dict.fromkeys((400, 401, 403, 404, 409, 413, 422, 500, 507), PROBLEM),
    **{status: {**PROBLEM, "headers": RETRY_AFTER} for status in (429, 503)},
}


async def respond_to_error(request: Request, error: Exception) -> Response:
    """Returns the response to an exception of a route, and counts it on the episode of the request."""
    path = route_path(request.scope)  # `request.url.path` has no line breaks, so `/k/%0D/v1/` would not match.
    headers: Mapping[str, str] = {}
    match error:
        case ClientGone():
            return Response(status_code=499)
        case RequestError():
            refused = error
        case RequestValidationError():
            kind = InvalidRequest if INFERENCE_PATH.match(path) else Unprocessable
            refused = describe_validation(error, kind, _known_names(request))
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
            shown_path = re.sub(r"^/k/[^/]+", "/k/…", path)
            refused = refusal_of(error.status_code)(f"{request.method} {shown_path}: {error.detail}", code=code)
            headers = error.headers or {}
        case CheckpointError():
            refused = StorageFailed(str(error), code="checkpoint_failed")
        case _:
            refused = internal_error()
    await count_refusal(request, refused)
    response = error_response(path, refused)
    response.headers.update(headers)
    return response


HANDLED = (ClientGone, RequestError, RequestValidationError, HTTPException, CheckpointError, Exception)
"""The exceptions for which an application calls `respond_to_error`."""


def internal_error() -> RequestError:
    return ServerFailed("Internal error: see the server's log.", code="internal_error")


def error_response(path: str, error: RequestError) -> Response:
    """Returns the response to `error` in the shape of the route `path`, which is without `/runs/NAME`."""
    headers, status = {}, status_of(error)
    retry_after = error.retry_after if isinstance(error, Later) else None
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    if inference := INFERENCE_PATH.match(path):
        # Without this header, OpenAI's SDKs also repeat requests after a 409 or 500, which cannot help here.
        headers["x-should-retry"] = "true" if retry_after is not None else "false"
        return JSONResponse(error_shape(inference[2]).body(error), status, headers)
    problem = Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=error.code,
        detail=error.message,
        param=error.param,
        retry_after=retry_after,
    )
    body = problem.model_dump(exclude_none=True)
    return JSONResponse(body, status, headers, media_type="application/problem+json")


async def count_refusal(request: Request, error: RequestError) -> None:
    """Counts `error` on the episode of the request if it is a final error of a call (see `COUNTED`)."""
    inference = INFERENCE_PATH.match(route_path(request.scope))
    is_call = inference is not None and any(inference[2] == dialect.path for dialect in DIALECTS)
    episode_id = getattr(request.state, "episode_id", None)  # stored by the guard of the route
    if is_call and request.method == "POST" and status_of(error) in COUNTED and episode_id is not None:
        await served_run(request).gateway.calls.refused(episode_id, error)


def describe_validation(
    error: RequestValidationError, kind: type[InvalidRequest], known: tuple[str, ...]
) -> InvalidRequest:
    """Returns the most specific error of a body: with the key, the value and, for an unknown key, the nearest known."""
    first = _most_specific(error.errors())
    name = _place(first["loc"]) or "the body"
    if first["type"] == "extra_forbidden":
        near = nearest_name(str(first["loc"][-1]), known)
        hint = f"; did you mean {near!r}?" if near else "."
        return kind(f"{name!r} is not a known key{hint}", code="unknown_parameter", param=name)
    if isinstance(first.get("input"), bytes):
        return kind(
            "The body was not read as JSON: send the header 'Content-Type: application/json'.",
            code="not_json",
        )
    given = short_repr(first.get("input"))[:80]  # a value can be as large as a body
    message = first["msg"].removeprefix("Value error, ")
    return kind(f"{name}: {message} (given: {given})", code="invalid_value", param=name)


def _most_specific(errors: Sequence[Any]) -> Any:
    """Returns the deepest error at or below the place of the first one.

    pydantic reports one error for each member of a union. The deepest one, other than a wrong type, belongs to the
    member that was meant.
    """
    place = _place(errors[0]["loc"])
    related = [error for error in errors if f"{_place(error['loc'])}.".startswith(f"{place}.")]
    return max(related, key=lambda error: (len(_place(error["loc"])), not error["type"].endswith("_type")))


def _place(loc: Sequence[int | str]) -> str:
    """Returns the dotted place in the body, without pydantic's names of union members (`list[ContentPart]`, `str`)."""
    inner = [part for part in loc[1:-1] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    last = [part for part in loc[1:][-1:] if part not in ("str", "constrained-str") and "[" not in str(part)]
    return ".".join(map(str, [*inner, *last]))


def _known_names(request: Request) -> tuple[str, ...]:
    """Returns the field names of the body model of the route."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(field, "field_info", None), "annotation", None)
    return tuple(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else ()


def new_router(tag: str, **options: Any) -> APIRouter:
    """Returns a router for guarded routes below `/swarm/v1`."""
    return APIRouter(prefix=PREFIX, tags=[tag], route_class=GuardedRoute, responses=PROBLEMS, **options)


def new_app(default: RunScope, **options: Any) -> FastAPI:
    """Returns an application without routes. `default` is the run of paths that name none."""
    app = FastAPI(
        title="AgentJet",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # FastAPI's own traces would contain request paths, and thus episode keys.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        exception_handlers=dict.fromkeys(HANDLED, respond_to_error),
        **options,
    )
    app.state.default = default
    return app
