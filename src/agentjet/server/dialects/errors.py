"""How OpenAI's routes say what went wrong; what `server.problems` answers where no other dialect is spoken, too."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from agentjet.errors import Forbidden, NotFound, RequestError, Unauthorized
from agentjet.server.dialects.dialect import ErrorShape, sse


class OpenAIErrorBody(BaseModel):
    """What OpenAI's SDKs read."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(BaseModel):
    """An error on a route of OpenAI's."""

    error: OpenAIErrorBody


def openai_error(error: RequestError) -> dict[str, Any]:
    """The body of an error."""
    kind = {Unauthorized: "authentication_error", Forbidden: "permission_error", NotFound: "not_found_error"}
    name = kind.get(type(error), "server_error" if error.status >= 500 else "invalid_request_error")
    name = "rate_limit_error" if error.status == 429 else name
    body = OpenAIErrorBody(message=error.message, type=name, param=error.param, code=error.code)
    return OpenAIError(error=body).model_dump()


OPENAI = ErrorShape(model=OpenAIError, body=openai_error, event=lambda error, num_sent: sse(openai_error(error)))
