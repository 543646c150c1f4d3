"""The HTTP applications: `create_app` over the runs of a server, `create_look_app` over what `agentjet look` reads.

`agentjet look` shows the page over runs that are read from folders or from other servers, and studies. Each run has the
read routes of a server, below `/runs/NAME`; paths without a run mean the first one. Further routes list runs and
studies and compare runs. Nothing can be changed. The link of the page has a code that opens viewer sessions as long as
the program runs.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, FastAPI, Query, Request
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import agentjet.protocol as bodies
from agentjet.config import ServerConfig
from agentjet.errors import InvalidRequest, MethodNotAllowed, NotFound, RequestError, Unauthorized
from agentjet.front import inference
from agentjet.front.http import (
    BEARER,
    Limits,
    RunMiddleware,
    allowed_hosts,
    bearer_of,
    error_response,
    new_app,
    route_path,
    scope_of,
)
from agentjet.front.keys import Keys
from agentjet.server import page, routes
from agentjet.server.access import SMALL_BODY, VIEWER, ReadScope, ServedRuns, new_router
from agentjet.server.collection import Collection
from agentjet.server.read import RunReader
from agentjet.server.runs import Runs
from agentjet.types import DEFAULT_RUN

MOST_COMPARED = 8
OWN_PATHS = ("/look", "/studies/", "/compare", "/sessions")
"""Below `/swarm/v1`: routes that belong to no run."""


Forward = Callable[[str], Awaitable[Any]]
"""Returns the JSON answer of a run's server to a path below `/swarm/v1`, with its query. Raises `RequestError`."""


def create_app(runs: Runs, keys: Keys) -> FastAPI:
    """Returns the application of the runs. The caller starts and closes them. `keys` are those of the default run."""
    served = ServedRuns(runs, keys)
    app = new_app(
        served.default,
        summary="Reinforcement learning for the language models inside agents, as a swarm.",
        root_path_in_servers=False,  # A run that somebody used would appear in everybody's /openapi.json.
    )
    # Routes are tried in this order: the most frequent ones come first. They are shared, because `include_router` would
    # build all of them again at the first request.
    routers = (routes.router, routes.records, routes.sessions, routes.operations)
    for each in (inference.router, *routers, page.router):
        app.routes.extend(each.routes)
    app.add_middleware(RunMiddleware, enter=served.enter, allowed=allowed_hosts(runs.default.config.server))
    return app


# --- agentjet look


class OfflineViewer:
    """The collection on HTTP: its keys and the code of its link."""

    def __init__(self, collection: Collection, forwards: Mapping[str, Forward], server: ServerConfig) -> None:
        """`forwards` are for the runs that other servers have."""
        self.collection = collection
        self.forwards = forwards
        self.limits = Limits.of(server)
        self.keys = Keys({})
        self.code = secrets.token_urlsafe(24)
        self.first = next(iter(collection.runs), DEFAULT_RUN)

    def enter(self, name: str, request: HTTPConnection) -> ReadScope:
        """Returns a run. Raises `Unauthorized`, and `NotFound` for a name without a run."""
        self.keys.control(bearer_of(request))
        self.collection.run(name)
        return self.scope(name)

    def scope(self, name: str) -> ReadScope:
        """Returns a run, without a check. All runs have the same keys."""
        return ReadScope(name, self.keys, self.limits, open_reader=lambda: self._reader(name))

    def _reader(self, name: str) -> RunReader:
        """Raises `NotFound` if no run was given."""
        run = self.collection.run(name)
        assert isinstance(run, RunReader), "requests of other runs are forwarded"
        return run

    def open_session(self, code: str) -> bodies.SessionView:
        """Raises `Unauthorized` for another code than the one of the link."""
        if not hmac.compare_digest(code.encode(errors="replace"), self.code.encode()):
            raise Unauthorized("This link is of another `agentjet look`: open the one it printed.", code="code_invalid")
        key, expires = self.keys.sign_session("viewer")
        return bodies.SessionView(key=key, role="viewer", run=self.first, expires=expires, live=False)


class Forwarding:
    """Middleware that sends the requests of a run that another server has to that server."""

    def __init__(self, app: ASGIApp, look: OfflineViewer) -> None:
        self._app = app
        self._look = look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        name = scope_of(HTTPConnection(scope)).name if path else ""
        forward = self._look.forwards.get(name)
        relative = path.removeprefix(bodies.PREFIX)
        if forward is None or relative == path or relative.startswith(OWN_PATHS):
            await self._app(scope, receive, send)
            return
        try:
            self._look.keys.control(bearer_of(HTTPConnection(scope)))
            if scope["method"] != "GET":
                raise MethodNotAllowed(
                    "`agentjet look` only reads: open the page of the server itself (agentjet open).",
                    code="method_not_allowed",
                )
            if relative == "/events" or not {".", ".."}.isdisjoint(relative.split("/")):
                raise NotFound(f"`agentjet look` has no path {path[:100]!r}.", code="not_found")
            query = scope["query_string"].decode("latin-1")
            answer: Response = JSONResponse(await forward(f"{quote(relative)}{'?' if query else ''}{query}"))
        except RequestError as error:
            answer = error_response(path, error)
        await answer(scope, receive, send)


def create_look_app(look: OfflineViewer, server: ServerConfig) -> FastAPI:
    """Returns the application. The caller closes the collection."""
    app = new_app(look.scope(look.first), openapi_url=None)
    app.state.look = look
    for each in (router, routes.records, page.router):
        app.routes.extend(each.routes)
    app.add_middleware(Forwarding, look=look)
    app.add_middleware(RunMiddleware, enter=look.enter, allowed=allowed_hosts(server))
    return app


router = new_router("look", dependencies=[Depends(BEARER)])


async def _look(request: Request) -> OfflineViewer:
    look: OfflineViewer = request.app.state.look
    return look


Look = Annotated[OfflineViewer, Depends(_look)]
RunNames = Annotated[str, Query(min_length=1, max_length=1000)]
"""Names with commas between them."""


@router.post("/sessions/exchange", dependencies=SMALL_BODY)
async def open_session(look: Look, body: bodies.ExchangeRequest) -> bodies.SessionView:
    """Exchange the code of the link for the key of a viewer session."""
    return look.open_session(body.code)


@router.post("/sessions")
async def refuse_token() -> bodies.SessionView:
    """Refuse tokens: the runs need none here."""
    raise NotFound("`agentjet look` has no tokens: open the link that it printed.", code="no_tokens")


@router.get("/look", dependencies=VIEWER)
async def get_look(look: Look) -> bodies.LookView:
    """List the runs and the studies."""
    return await look.collection.view()


@router.get("/compare", dependencies=VIEWER)
async def compare_runs(look: Look, runs: RunNames) -> bodies.ComparisonView:
    """Return the figures of up to eight runs, and the settings in which they differ."""
    names = list(dict.fromkeys(runs.split(",")))
    if len(names) > MOST_COMPARED:
        raise InvalidRequest(
            f"runs has {len(names)} names: compare at most {MOST_COMPARED} runs.", code="too_many_runs", param="runs"
        )
    return await look.collection.compare(names)


@router.get("/studies/{name}", dependencies=VIEWER)
async def get_study(look: Look, name: str) -> dict[str, Any]:
    """Return the facts of a study."""
    return await look.collection.study(name)
