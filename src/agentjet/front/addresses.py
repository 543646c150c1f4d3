"""Requests at a wrong address: below the path of a front, or at a base URL without `/v1`.

The server and its fronts share these refusals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentjet.errors import Forbidden
from agentjet.front.http import KEY_PATH, METHODS, error_response, route_path
from agentjet.front.inference import CALL_PATHS, wrong_path

FRONT_PATH = re.compile(r"/f(0|[1-9]\d{0,2})(?=/|$)")
"""Path of a front behind a proxy that does not remove it."""


class FrontPath:
    """Middleware that removes `/f{front}` from a path, where a proxy did not, and refuses paths of other fronts."""

    def __init__(self, app: ASGIApp, front: int | None, addresses: Sequence[str]) -> None:
        """`front` is None in the server, which refuses the paths of all fronts; `addresses` are the fronts' URLs."""
        self._app = app
        self._front = front
        self._addresses = addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = FRONT_PATH.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        path, front = scope["path"][found.end() :] or "/", int(found[1])
        if front == self._front:
            raw = scope["raw_path"].removeprefix(found[0].encode()) or b"/"
            await self._app({**scope, "path": path, "raw_path": raw}, receive, send)
            return
        addresses = self._addresses
        if not addresses:
            message = f"This server has no fronts (server.fronts = 0): leave {found[0]} out of the base URL."
        elif front < len(addresses):
            here = "the server" if self._front is None else f"front {self._front}"
            message = f"This is {here}, and the path is one of front {front}: {addresses[front]}."
        else:
            fronts = "front 0 only" if len(addresses) == 1 else f"fronts 0 to {len(addresses) - 1}"
            message = f"There is no front {front}: the server has {fronts} (server.fronts = {len(addresses)})."
        message += (
            " The URL of an episode is the base_url of its begin; check the proxy's rules for /f0/, /f1/ and so on."
        )
        error = Forbidden(message, code="other_front")
        await error_response(route_path({"path": path}), error)(scope, receive, send)


router = APIRouter(include_in_schema=False)
"""Refusals of the paths of inference routes without their `/v1`."""


async def refuse_without_v1(request: Request) -> Response:
    """Refuses a call in the shape of the dialect that the client expects."""
    path = KEY_PATH.sub("", route_path(request.scope), count=1)
    return wrong_path(path, f"/v1{path}", "add /v1 to the base URL, as in the base_url of an episode")


for _path in ("/v1/models", *CALL_PATHS):
    if _path.startswith("/v1/"):
        for _start in ("", "/k/{key}"):
            router.add_api_route(_start + _path.removeprefix("/v1"), refuse_without_v1, methods=[*METHODS])
