"""HTTP below the routes: from a connection to the run and the body of a request, and from an error to its response.

1. `LimitedConnection` enforces `RequestLimits` on headers, time and framing. Two limits are settings. The others are
   constants far above what clients need; `docs/operations.md` has the table.
2. `RunMiddleware` checks `Host` and finds the run of a path below `/runs/NAME`.
3. `GuardedRoute` checks the guards of a route, which decide from headers and path alone. Then it reads, parses and
   validates the body once, within the limits.
4. `respond_to_error` returns errors: RFC 9457 problem+json on control routes, the error shape of the dialect on
   inference routes. An unexpected exception becomes a 500 here. uvicorn logs it once, with its traceback.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import json
import logging
import math
import re
import resource
import socket
import sys
import termios
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from reprlib import repr as short_repr
from typing import Annotated, Any, TypeVar, cast

import uvicorn
from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.security.utils import get_authorization_scheme_param
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentjet import __version__
from agentjet.config import JobConfig, ServerConfig
from agentjet.config.schema import is_loopback
from agentjet.errors import (
    CheckpointError,
    Forbidden,
    InvalidRequest,
    Later,
    MethodNotAllowed,
    RequestError,
    ServerFailed,
    StorageFailed,
    TooLarge,
    Unauthorized,
    Unprocessable,
    nearest_name,
)
from agentjet.front.calls import Calls
from agentjet.front.concurrency import LARGE, Turns, offload
from agentjet.front.dialects import DIALECTS, error_shape
from agentjet.front.keys import Keys
from agentjet.front.tracing import present_run
from agentjet.protocol import Problem, refusal_of, status_of
from agentjet.types import RUN_NAME

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Handler = Callable[[Request], Coroutine[Any, Any, Response]]

RUN = "agentjet.run"
"""Key in the scope of a request below `/runs/NAME`: the run, as `RunScope`."""
RUN_PATH = re.compile(r"/runs/([^/]*)")
KEY_PATH = re.compile(r"/k/([^/]+)")
INFERENCE_PATH = re.compile(r"^(/k/[^/]+)?/?((?:/inference)?/v1/.*)", re.DOTALL)
"""With a slash too many, too, as behind a base URL that ends with one: the client reads errors of its dialect only."""
BASE_PATH = re.compile(r"(/k/[^/]+)?/?")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""The methods that routes see: a HEAD request is answered as a GET request."""


# ---- connections -----------------------------------------------------------------------------------------------------

RESERVED_FILES = 128
"""Open files and pipes that the server needs besides its connections."""
MIN_BODY_RATE = 64 * 2**10
"""Minimum rate of a body in bytes per second, after the first `header_seconds`."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Sizes in bytes, times in seconds."""

    body_bytes: int
    connections: int
    header_bytes: int = 64 * 2**10
    """Request line and headers."""
    small_body_bytes: int = 4096
    """A body on a route that needs no token."""
    values: int = 300_000
    """Values in a body, including those inside arrays and objects."""
    containers: int = 50_000
    """Arrays and objects in a body."""
    keys: int = 10_000
    """Keys of one object."""
    depth: int = 200
    """Nesting of arrays and objects."""
    header_seconds: float = 30.0
    """From the connection, or from the first byte of a request, to the end of the headers."""
    linger_seconds: float = 10.0
    """For the rest of a body after an early response; then the connection is closed."""
    stall_seconds: float = 300.0
    """For a client that reads nothing of its response; then the connection is closed."""

    @classmethod
    def of(cls, server: ServerConfig) -> RequestLimits:
        """Returns the limits of a server. The limit on open files of the process can lower `connections`."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = server.max_connections if files == resource.RLIM_INFINITY else files - RESERVED_FILES
        return cls(body_bytes=server.max_body_mb * 2**20, connections=max(16, min(server.max_connections, most)))

    @property
    def body_seconds(self) -> float:
        """For a whole body, from the end of the headers."""
        return self.header_seconds + self.body_bytes / MIN_BODY_RATE


UPGRADE = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""Java's client asks for HTTP/2 in this way. It is not served, and the parser drops the body of a request with it."""
GRACE_SECONDS = 5
"""Seconds that open connections have to end after the engine has stopped."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections: the client closes first, so no request meets a closing connection."""


def listen(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """Returns a bound socket with TCP_NODELAY. Raises `OSError`.

    Responses are written in pieces. Without TCP_NODELAY, the second piece waits up to 40 ms for the acknowledgement of
    the first. asyncio sets the option only on sockets with an explicit protocol number, which those of `create_server`
    do not have; connections inherit it from the listener.
    """
    listener = socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
    )
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class JoinedWrites:
    """A transport that sends at once what one turn of the event loop writes, such as the head and body of a response.

    A write to a socket takes longer than most of the code behind it.
    """

    MAX_BYTES = 2**16
    """Bytes that wait for the end of a turn. The transport itself holds more back only if the client reads slowly."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, part: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(part)
        self._num_bytes += len(part)
        if self._num_bytes > self.MAX_BYTES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if parts:
            self._transport.write(b"".join(parts))


class LimitedConnection(HttpToolsProtocol):
    """A connection that enforces `RequestLimits`:

    * the number of open connections;
    * the size of the headers and the time they take;
    * the time of the body, and its framing, which must not be larger than its content;
    * the time of the rest of a body after an early response, and of a response that its client does not read.
    """

    def __init__(self, *args: Any, limits: RequestLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head = True
        self._num_bytes = 0
        """Received bytes of the present headers, or of the framing of the present body."""
        self._body_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        if len(self.connections) > self._limits.connections:
            log.warning("connection refused: %d are open (server.max_connections)", len(self.connections) - 1)
            transport.abort()
            return
        self._must_end_within(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._must_end_within(None)

    def data_received(self, data: bytes) -> None:
        while data and self._in_head and not self.transport.is_closing():
            room = self._limits.header_bytes - self._num_bytes
            if not room:
                self._refuse_headers()
                return
            head, data = data[:room], data[room:]
            if head.find(b"h2c", 0, head.find(b"\r\n\r\n")) > 0:
                head = UPGRADE.sub(b"", head, 1)
            self._num_bytes += len(head)
            super().data_received(head)
        if data and not self.transport.is_closing():
            self._num_bytes += len(data)
            super().data_received(data)
            if self._num_bytes > self._body_bytes + self._limits.header_bytes:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._must_end_within(self._limits.header_seconds)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # Trailers after a body are ignored.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._num_bytes, self._body_bytes = False, 0, 0
        self._must_end_within(self._limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes -= len(body)
        self._body_bytes = min(self._body_bytes + len(body), self._limits.body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._num_bytes = True, 0
        if not self.cycle.response_complete:  # After an early response, the connection is closed.
            self._must_end_within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._must_end_within(self._limits.linger_seconds)

    def pause_writing(self) -> None:
        self._must_end_within(self._limits.stall_seconds)
        super().pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._must_end_within(None)

    def shutdown(self) -> None:
        super().shutdown()
        if self.flow.write_paused:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """The request is answered. uvicorn would also advise to install a library, which would change nothing."""

    def _must_end_within(self, seconds: float | None) -> None:
        """Closes the connection after `seconds` unless called again before. None: cancels the deadline.

        While the client does not read, further requests do not change its deadline.
        """
        if self.flow.write_paused:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        """Closes the connection, unless this process is late: it has not read what the client sent."""
        is_early = not self._in_head and self.cycle is not None and self.cycle.response_complete
        unread = fcntl.ioctl(self.transport.get_extra_info("socket"), termios.FIONREAD, bytes(4))
        if self.flow.write_paused or is_early or not (self.flow.read_paused or any(unread)):
            self.transport.abort()
        else:
            self._must_end_within(self._limits.header_seconds)

    def _refuse_headers(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # Else an earlier request is being answered.
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
        self.transport.close()


def uvicorn_config(app: Starlette, server: ServerConfig) -> uvicorn.Config:
    """Returns uvicorn's settings for `app`. The caller provides the sockets."""
    return uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits=app.state.default.limits),  # type: ignore[arg-type]
        log_config=None,
        ws="none",
        access_log=False,  # Request lines can contain keys.
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=server.tls_cert or None,
        ssl_keyfile=server.tls_key or None,
    )


class HttpServer(uvicorn.Server):
    """Does not handle signals: its process does."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


SWITCH_SECONDS = 0.001
"""Time for which a thread that computes may keep Python's lock from the event loop; Python's default is 0.005."""


def tune_python() -> None:
    """Makes full garbage collections rare, and changes between threads frequent. Call it when everything is loaded.

    A full collection visits the trees of all live episodes: half a second for a thousand episodes. It frees little,
    because finished objects are freed by reference counting. Young generations are small: collecting one of 10,000
    objects takes 30 ms.

    The loop gives Python's lock up at each read of a socket or the journal, and then waits for a thread that computes.
    Ten reads within a request would take 50 ms.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 3, 5_000)


# ---- the run of a request --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunScope:
    """The parts of a run that guards and calls use."""

    name: str
    keys: Keys
    limits: RequestLimits
    calls: Calls | None = None
    """None for a run that answers no calls here: fronts do, or it is one of `agentjet look`."""
    job: Callable[[], JobConfig] | None = None
    """Returns the settings of the job in force, for a run whose calls fronts answer."""
    check_front: Callable[[str, HTTPConnection], object] | None = None
    """Raises `Forbidden` (`other_front`) if another process answers the calls of the episode. None without fronts."""
    refuse_foreign: Callable[[str], None] = lambda token: None
    """Raises `Forbidden` if another run has this token or key."""

    def max_age(self) -> float:
        """Returns the seconds that an episode key is valid from the start of its episode. A changed job applies to keys
        issued before.
        """
        if self.calls is not None:
            return self.calls.swarm.job.max_episode_seconds
        return 0.0 if self.job is None else self.job().max_episode_seconds


def refuse_foreign(token: str, keys: Iterable[Keys]) -> None:
    """Raises `Forbidden` if one of these runs has this token or key."""
    if any(each.knows(token) for each in keys):
        raise Forbidden(
            "This token or key does not belong to the run of this URL: use the URL of its own run, or the token of the "
            "run that you mean.",
            code="not_your_run",
        )


def scope_of(request: HTTPConnection) -> RunScope:
    """Returns the run of a request: the default run if its path names none."""
    run: RunScope = request.scope.get(RUN) or request.app.state.default
    return run


def calls_of(request: HTTPConnection) -> Calls:
    calls = scope_of(request).calls
    assert calls is not None
    return calls


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


# ---- host and run ----------------------------------------------------------------------------------------------------


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
    that arrive together take turns. HEAD becomes GET for the routes, and its answer is sent without the body.
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
                if scope["method"] == "HEAD":
                    # Agents check their base URL with HEAD and without a key. No answer to it depends on the run.
                    if BASE_PATH.fullmatch(route_path(scope)):
                        await Response()(scope, receive, send)
                        return
                    scope, send = {**scope, "method": "GET"}, without_body(send)
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
        scope[RUN] = self._enter_run(name, HTTPConnection(scope))
        present_run.set(name)
        return scope


def without_body(send: Send) -> Send:
    """Returns `send` for a HEAD request: the first piece of the body ends the answer, so that a stream ends, too."""
    is_complete = False

    async def send_head(message: Message) -> None:
        nonlocal is_complete
        if not is_complete:
            is_complete = message["type"] == "http.response.body"
            await send({**message, "body": b"", "more_body": False} if is_complete else message)

    return send_head


def _host(given: str) -> str:
    """Returns a host in lower case without port and brackets, or "" if it is malformed."""
    found = HOST.fullmatch(given.strip().lower())
    return found[1].strip("[]") if found else ""


# ---- guards and bodies -----------------------------------------------------------------------------------------------


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
        self.check(request)


def _check_episode_key(run: RunScope, request: Request) -> None:
    episode_id = run.keys.episode(key_of(request), run.max_age())
    if run.check_front is not None:
        run.check_front(episode_id, request)
    request.state.episode_id = episode_id


EPISODE_KEY = [Depends(Guard(_check_episode_key))]
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


class ClientGone(Exception):
    """The client closed the connection before it was answered."""


class GuardedRoute(APIRoute):
    """A route that checks its guards first, then reads, parses and validates the body within the limits."""

    def get_route_handler(self) -> Handler:
        handle = self.handler()
        guards = [each.dependency for each in self.dependencies if isinstance(each.dependency, Guard)]
        dependant = self.dependant  # FastAPI need not call the guards again.
        dependant.dependencies = [each for each in dependant.dependencies if not isinstance(each.call, Guard)]
        annotation: Any = self.body_field and self.body_field.field_info.annotation
        model: TypeAdapter[Any] | None = TypeAdapter(annotation) if self.body_field else None

        async def guarded(request: Request) -> Response:
            for guard in guards:
                guard.check(request)
            if model is not None:
                limits = scope_of(request).limits
                # Starlette keeps a body that was read in these two fields, and FastAPI takes it from there. A model in
                # place of the JSON value is valid as it is.
                request._body = await _body(request, limits)
                if request._body and _is_json(request):
                    request._json = await offload(len(request._body), parse_body, request._body, model, limits)
            return await handle(request)

        return guarded

    def handler(self) -> Handler:
        """Returns the handler of a request that passed the guards."""
        return super().get_route_handler()


class Presence:
    """The client of a request whose body has been read: the next message is then its disconnect.

    One task waits for it, until the connection or the response ends.
    """

    def __init__(self, request: Request) -> None:
        self._gone = asyncio.create_task(_disconnected(request))

    async def has_ended(self) -> bool:
        """Returns whether the client has disconnected. A write to a closed connection does not fail."""
        await asyncio.sleep(0)  # The task notes a disconnect in the next turn of the event loop.
        return self._gone.done()

    async def during(self, work: Awaitable[Result]) -> Result:
        """Returns the result of `work`. If the client disconnects first, cancels `work` and raises `ClientGone`."""
        task, waits, has_left = cast("asyncio.Task[Any]", asyncio.current_task()), True, False
        cancellations = task.cancelling()

        def leave(_: asyncio.Task[None]) -> None:
            nonlocal has_left
            has_left = waits and task.cancel()

        self._gone.add_done_callback(leave)
        try:
            return await work
        finally:
            waits = False  # A callback that is due already cannot be removed.
            self._gone.remove_done_callback(leave)
            if has_left and task.uncancel() <= cancellations:
                raise ClientGone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, limits: RequestLimits) -> bytes:
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


def parse_body(body: bytes, model: TypeAdapter[Any], limits: RequestLimits) -> Any:
    """Returns a body as a value of `model`. Raises `InvalidRequest`, `TooLarge`, or `RequestValidationError`."""
    if len(body) >= LARGE:  # Counting is cheap; a parsed body of empty objects has 25 times the size of its text.
        _check_counts(body, limits)
    try:
        value = json.loads(body)
    except RecursionError:
        raise _too_deep("", limits) from None
    except ValueError as error:
        why = "it is compressed with gzip, so send it as it is" if body.startswith(b"\x1f\x8b") else error
        raise InvalidRequest(f"The body is not JSON: {why}.", code="invalid_json") from None
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


def _check_counts(body: bytes, limits: RequestLimits) -> None:
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


def _check_shape(body: Any, limits: RequestLimits) -> None:
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


def _too_deep(name: str, limits: RequestLimits) -> InvalidRequest:
    why = f"nests its JSON more than {limits.depth} levels deep: flatten it."
    return InvalidRequest(f"{name or 'the body'} {why}", code="nested_too_deep", param=name or None)


# ---- errors ----------------------------------------------------------------------------------------------------------

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
    shown_path = re.sub(r"^/k/[^/]+", "/k/…", path)
    match error:
        case ClientGone():
            return Response(status_code=499)
        case RequestError():
            refused = error
        case RequestValidationError():
            kind = InvalidRequest if INFERENCE_PATH.match(path) else Unprocessable
            refused = describe_validation(error, kind, _known_names(request))
        case HTTPException(status_code=HTTPStatus.METHOD_NOT_ALLOWED):
            refused = method_not_allowed(shown_path, allowed_methods(request))
        case HTTPException():
            code = "not_found" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request"
            refused = refusal_of(error.status_code)(f"{request.method} {shown_path}: {error.detail}", code=code)
        case CheckpointError():
            refused = StorageFailed(str(error), code="checkpoint_failed")
        case _:
            refused = internal_error()
    await count_refusal(request, refused)
    return error_response(path, refused)


HANDLED = (ClientGone, RequestError, RequestValidationError, HTTPException, CheckpointError, Exception)
"""The exceptions for which an application calls `respond_to_error`."""


def allowed_methods(request: Request) -> list[str]:
    """Returns the methods that a path takes, of all its routes. The framework names those of its first route."""

    def is_taken(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [*filter(is_taken, METHODS)]


def method_not_allowed(path: str, allowed: Sequence[str]) -> MethodNotAllowed:
    return MethodNotAllowed(f"{path} takes requests with {' or '.join(allowed)}.", allowed=allowed)


def internal_error() -> RequestError:
    return ServerFailed("Internal error: see the server's log.", code="internal_error")


def error_response(path: str, error: RequestError) -> Response:
    """Returns the response to `error` in the shape of the route `path`, which is without `/runs/NAME`."""
    headers, status = {}, status_of(error)
    retry_after = error.retry_after if isinstance(error, Later) else None
    if retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed).replace("GET", "GET, HEAD")
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
        await calls_of(request).refused(episode_id, error)


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
    if first["loc"] == ("body",) and first["type"] == "missing":
        return kind("The request has no body: send JSON.", code="not_json")
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
    field = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(field, "field_info", None), "annotation", None)
    return tuple(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else ()


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
