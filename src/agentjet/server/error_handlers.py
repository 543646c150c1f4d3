"""Error responses: RFC 9457 problem+json on control routes, the error shape of the dialect on inference routes.

An unexpected exception becomes a 500 here. uvicorn logs it once, with its traceback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from http import HTTPStatus
from reprlib import Repr
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from agentjet.errors import InvalidRequest, Later, RequestError
from agentjet.protocol import Problem
from agentjet.server.deps import ClientGone
from agentjet.server.dialects import DIALECTS, error_shape
from agentjet.server.runs import deps_of, route_path

_REPR = Repr()
"""Shortens values in messages: a value can be as large as a body."""
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 100
_REPR.maxlist = _REPR.maxdict = 40
COUNTED = (400, 404, 413, 422, 500)
"""Statuses after which a client does not repeat a call."""
PROBLEM: dict[str, Any] = {"model": Problem, "content": {"application/problem+json": {}}}
"""Documentation of an error response of a control route in `/openapi.json`."""
INFERENCE_PATH = re.compile(r"^(/k/[^/]+)?(/v1/.*)", re.DOTALL)


def install(app: FastAPI) -> None:
    """Registers the error handlers of `app`."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)


def _without_key(path: str) -> str:
    return re.sub(r"^/k/[^/]+", "/k/…", path)


def error_response(path: str, error: RequestError) -> Response:
    """Returns the response to `error` in the shape of the route `path`, which is without `/runs/NAME`."""
    headers = {}
    retry_after: float | None = None
    if isinstance(error, Later):
        retry_after = error.retry_after
        headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
    inference = INFERENCE_PATH.match(path)
    if inference:
        # Without this header, OpenAI's SDKs also repeat requests after a 409 or 500, which cannot help here.
        headers["x-should-retry"] = "true" if retry_after is not None else "false"
        return JSONResponse(error_shape(inference[2]).body(error), error.status, headers)
    problem = Problem(
        title=HTTPStatus(error.status).phrase,
        status=error.status,
        code=error.code,
        detail=error.message,
        param=error.param,
        retry_after=retry_after,
    )
    body = problem.model_dump(exclude_none=True)
    return JSONResponse(body, error.status, headers, media_type="application/problem+json")


async def _refusal(request: Request, error: RequestError) -> Response:
    await count_refusal(request, error)
    return error_response(_path(request), error)


async def count_refusal(request: Request, error: RequestError) -> None:
    """Counts `error` on the episode of the request if it is a final error of a call (see `COUNTED`)."""
    inference = INFERENCE_PATH.match(_path(request))
    is_call = inference is not None and any(inference[2] == dialect.path for dialect in DIALECTS)
    if not is_call or request.method != "POST" or error.status not in COUNTED:
        return
    episode_id = getattr(request.state, "episode_id", None)  # stored by the guard of the route
    if episode_id is not None:
        await deps_of(request).gateway.refused(episode_id, error)


def _path(request: Request) -> str:
    """Returns the path that was routed. `request.url.path` has no line breaks, so `/k/%0D/v1/` would not match."""
    return route_path(request.scope)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return await _refusal(request, error)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    status = 400 if INFERENCE_PATH.match(_path(request)) else 422
    return await _refusal(request, describe_validation(error, status, _known_names(request)))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    what = f"{request.method} {_without_key(_path(request))}: {error.detail}"
    response = await _refusal(
        request,
        RequestError(what, code=codes.get(error.status_code, "invalid_request"), status=error.status_code),
    )
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    return await _refusal(
        request,
        RequestError("Internal error: see the server's log.", code="internal_error", status=500),
    )


def describe_validation(error: RequestValidationError, status: int, known: tuple[str, ...]) -> InvalidRequest:
    """Returns the most specific error of a body: with the key, the value and, for an unknown key, the nearest known."""
    first = _most_specific(error.errors())
    name = _place(first["loc"]) or "the body"
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        return InvalidRequest(f"{name!r} is not a known key{hint}", code="unknown_parameter", status=status, param=name)
    if isinstance(first.get("input"), bytes):
        return InvalidRequest(
            "The body was not read as JSON: send the header 'Content-Type: application/json'.",
            code="not_json",
            status=status,
        )
    shown = _REPR.repr(first.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{name}: {message} (given: {shown})", code="invalid_value", status=status, param=name)


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
