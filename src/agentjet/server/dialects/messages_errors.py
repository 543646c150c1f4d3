"""How Anthropic's routes say what went wrong."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from agentjet.errors import ContextOverflow, RequestError
from agentjet.server.dialects.dialect import ErrorShape, sse

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status; the rest are `invalid_request_error` or, from 500 on, `api_error`."""


class AnthropicErrorDetails(BaseModel):
    """What Anthropic's SDKs act upon."""

    error_code: str


class AnthropicErrorBody(BaseModel):
    """What Anthropic's SDKs read. There is no place for the offending key: the message names it."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicError(BaseModel):
    """An error on a route of Anthropic's, also sent as the last event of a broken stream."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None = None


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    if isinstance(error, ContextOverflow):  # Claude Code reads both numbers to compact its history.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum - 1} maximum"
    elif error.code == ContextOverflow.code:
        message = f"prompt is too long: {error.message}"
    message = message.replace(".function.parameters", ".input_schema")  # What the grammar calls it in any dialect.
    details = AnthropicErrorDetails(error_code=error.code)
    return AnthropicError(error=AnthropicErrorBody(type=kind, message=message, details=details)).model_dump()


ANTHROPIC = ErrorShape(
    model=AnthropicError, body=anthropic_error, event=lambda error, num_sent: sse(anthropic_error(error), name="error")
)
