"""Error responses: RFC 9457 problem+json on control routes, the error shape of the dialect on inference routes.

An unexpected exception becomes a 500 here. uvicorn logs it once, with its traceback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from reprlib import repr as short_repr
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from agentjet.errors import (
    CheckpointError,
    InvalidRequest,
    Later,
    RequestError,
    ServerFailed,
    StorageFailed,
    Unprocessable,
    nearest_name,
)
from agentjet.protocol import Problem, refusal_of, status_of
from agentjet.server.deps import ClientGone
from agentjet.server.dialects import DIALECTS, error_shape
from agentjet.server.runs import INFERENCE_PATH, deps_of, route_path

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
        await deps_of(request).gateway.calls.refused(episode_id, error)


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
