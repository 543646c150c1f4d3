"""The shapes of errors in the APIs of providers, and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from agentjet.errors import ContextOverflow, Forbidden, NotFound, RequestError, Unauthorized
from agentjet.protocol import status_of


def sse(payload: dict[str, Any], *, name: str = "") -> str:
    """Returns one server-sent event."""
    event = f"event: {name}\n" if name else ""
    return f"{event}data: {json.dumps(payload, ensure_ascii=False)}\n\n"


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form of errors. `body` is the answer to a request; `event` ends a stream that failed after n events."""

    model: type[BaseModel]
    body: Callable[[RequestError], dict[str, Any]]
    event: Callable[[RequestError, int], str]


# --- OpenAI


class OpenAIError(BaseModel):
    """An error on a route of OpenAI's API: `message`, `type`, `param` and `code`."""

    error: dict[str, str | None]


def openai_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error."""
    kind = {Unauthorized: "authentication_error", Forbidden: "permission_error", NotFound: "not_found_error"}
    status = status_of(error)
    name = kind.get(type(error), "server_error" if status >= 500 else "invalid_request_error")
    name = "rate_limit_error" if status == 429 else name
    return {"error": {"message": error.message, "type": name, "param": error.param, "code": error.code}}


OPENAI_ERRORS = ErrorShape(OpenAIError, openai_error, lambda error, num_sent: sse(openai_error(error)))
"""Also used where a path belongs to no dialect."""


def responses_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error of the Responses API."""
    body = openai_error(error)
    if error.param == "messages" and error.code != "unknown_parameter":  # That error has the body's own name.
        body["error"]["param"] = "input"
    return body


def _responses_event(error: RequestError, num_sent: int) -> str:
    """Returns the event of OpenAI's reference, with the object that OpenAI's SDKs raise from."""
    body = responses_error(error)
    described = {name: body["error"][name] for name in ("code", "message", "param")}
    return sse({"type": "error", **described, "sequence_number": num_sent, **body}, name="error")


RESPONSES_ERRORS = ErrorShape(OpenAIError, responses_error, _responses_event)


# --- Anthropic

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types by status. Other statuses are `invalid_request_error`, or `api_error` from 500."""


class AnthropicError(BaseModel):
    """An error on a route of Anthropic's API. The message names the key, because no field does."""

    type: Literal["error"]
    error: dict[str, Any]
    """`type`, `message` and `details`: Anthropic's SDKs decide by `details.error_code`."""
    request_id: str | None


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Returns the body of an error."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    if isinstance(error, ContextOverflow):  # Claude Code reads both numbers to compact its history.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum - 1} maximum"
    elif error.code == ContextOverflow.code:
        message = f"prompt is too long: {error.message}"
    message = message.replace(".function.parameters", ".input_schema")  # The grammar uses OpenAI's name.
    details = {"error_code": error.code}
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}, "request_id": None}


ANTHROPIC_ERRORS = ErrorShape(
    AnthropicError, anthropic_error, lambda error, num_sent: sse(anthropic_error(error), name="error")
)
