"""The HTTP applications: `create_app` over the runs of a server, `create_look_app` over what `agentjet look` reads.

`agentjet look` shows the page over runs that are read from folders or from other servers, and studies. Each run has the
read routes of a server, below `/runs/NAME`; paths without a run mean the first one. Further routes list runs and
studies and compare runs. Nothing can be changed. The link of the page has a code that opens viewer sessions as long as
the program runs.

Both have the page: `/` and its files below `/ui/`, with the headers that confine it. The files are read once, at the
start. The style sheets become one file. The index names the modules of the first view, so a browser requests them at
once and not level by level. The URLs contain a digest of all files, so browsers keep them until an upgrade; `/` itself
is always validated. The page needs no token: it contains no data of a run.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import json
import posixpath
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import agentjet
import agentjet.protocol as bodies
from agentjet.config import ServerConfig
from agentjet.errors import InvalidRequest, MethodNotAllowed, NotFound, RequestError, Unauthorized
from agentjet.front import addresses, inference
from agentjet.front.http import (
    BEARER,
    PROBLEM,
    RequestLimits,
    RunMiddleware,
    allowed_hosts,
    bearer_of,
    error_response,
    new_app,
    route_path,
    scope_of,
)
from agentjet.front.keys import Keys
from agentjet.protocol import EpisodeFilters, EpisodeQuery
from agentjet.server import routes
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
    for each in (inference.router, *routers, page_routes, addresses.router):
        app.routes.extend(each.routes)
    app.add_middleware(RunMiddleware, enter=served.enter, allowed=allowed_hosts(runs.default.config.server))
    # A proxy may lack the rules for fronts, and an agent may have a URL of the time when the server had fronts.
    fronted = runs.default.fronted
    refusal = addresses.FrontPath(app.router.not_found, None, fronted.fronts.addresses if fronted else ())
    app.routes.append(Route("/f{front:int}{rest:path}", refusal))
    return app


# --- the page

PAGE_FOLDER = Path(agentjet.__file__).parent / "page"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
FILTERS = "filters.js"
"""A module that is made from the API."""
ENTRY = "app.js"
"""The module that imports those of the first view. The other views are loaded when they open."""
COMMENT = re.compile(rb"^[ \t]*//.*", re.MULTILINE)
IMPORT = re.compile(r'\b(?:from|import) ?"(\.[^"]+)"')


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, plain and compressed."""

    media_type: str
    content: bytes
    compressed: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> PageFile:
        return cls(MEDIA_TYPES[Path(name).suffix], content, gzip.compress(content, 9, mtime=0))

    def response(self, request: Request, headers: Mapping[str, str]) -> Response:
        """Returns the file, compressed if the client accepts it."""
        given = {**SECURITY_HEADERS, **headers, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return Response(self.compressed, headers={**given, "Content-Encoding": "gzip"}, media_type=self.media_type)
        return Response(self.content, headers=given, media_type=self.media_type)


def episode_filters() -> list[dict[str, Any]]:
    """Returns name and label of each filter of the episodes, with `number`, and `options` if it has some."""
    hints = get_type_hints(EpisodeFilters)
    found = []
    for name, one in EpisodeQuery.filters().items():
        kinds = {*get_args(hints[name])} - {type(None)} or {hints[name]}
        options = [option for kind in get_args(hints[name]) for option in get_args(kind)]
        found.append(
            {"name": name, "title": one.title, "number": not kinds.isdisjoint({int, float}), "options": options or None}
        )
    return found


def imported(modules: Mapping[str, bytes], entry: str) -> list[str]:
    """Returns the modules that `entry` imports, directly or through others."""
    names = [entry]
    for name in names:  # It grows meanwhile.
        paths = (posixpath.join(posixpath.dirname(name), path) for path in IMPORT.findall(modules[name].decode()))
        names += [path for path in dict.fromkeys(map(posixpath.normpath, paths)) if path not in names]
    return names[1:]


def style_order(name: str) -> tuple[bool, bool, str]:
    """Sort key of the style sheets: libraries, then colours and type, then the rest."""
    return not name.startswith("vendor/"), name != "style/base.css", name


class Page:
    """The files of the page, by their path below `/ui/DIGEST/`."""

    def __init__(self, folder: Path = PAGE_FOLDER) -> None:
        found = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.suffix in MEDIA_TYPES
        }
        found[FILTERS] = f"export const EPISODE_FILTERS = {json.dumps(episode_filters())};\n".encode()
        # Lines keep their numbers without their comments, which are a tenth of what a browser loads.
        found = {name: COMMENT.sub(b"", content) for name, content in found.items()}
        sheets = [found.pop(name) for name in sorted(found, key=style_order) if name.endswith(".css")]
        found["style.css"] = b"".join(sheets)
        index = found.pop("index.html").decode()
        parts = [part for name, content in found.items() for part in (name.encode(), content)]
        self.digest = hashlib.sha256(b"\0".join([index.encode(), *parts])).hexdigest()[:16]
        self.files = {name: PageFile.of(name, content) for name, content in found.items()}
        links = "".join(f'<link rel="modulepreload" href="ui/{name}">\n' for name in imported(found, ENTRY))
        index = index.replace("</head>", f"{links}</head>").replace('"ui/', f'"ui/{self.digest}/')
        self.index = PageFile.of("index.html", index.encode())


PAGE = Page()
page_routes = APIRouter(tags=["page"], include_in_schema=False)


@page_routes.get("/")
async def get_page(request: Request) -> Response:
    """The PAGE."""
    tag = f'"{PAGE.digest}"'
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=304, headers={**SECURITY_HEADERS, "ETag": tag, "Cache-Control": "no-cache"})
    return PAGE.index.response(request, {"ETag": tag, "Cache-Control": "no-cache"})


@page_routes.get("/ui/{digest}/{name:path}", responses={404: PROBLEM})
async def get_page_file(digest: str, name: str, request: Request) -> Response:
    """A file of the PAGE."""
    file = PAGE.files.get(name)
    if file is None or digest != PAGE.digest:
        raise NotFound("The page was changed by an upgrade of the server: reload it.", code="page_file_not_found")
    return file.response(request, {"Cache-Control": "public, max-age=31536000, immutable"})


# --- agentjet look


class OfflineViewer:
    """The collection on HTTP: its keys and the code of its link."""

    def __init__(self, collection: Collection, forwards: Mapping[str, Forward], server: ServerConfig) -> None:
        """`forwards` are for the runs that other servers have."""
        self.collection = collection
        self.forwards = forwards
        self.limits = RequestLimits.of(server)
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
                    allowed=["GET"],
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
    for each in (router, routes.records, page_routes):
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
