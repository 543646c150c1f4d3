"""What a dialect is: how one API's bodies become canonical requests, and what is sampled becomes its answers.

Pure translation, without I/O, clock or state. `server.inference` does the rest, once for all of them: keys, roles,
retries, delivery, the stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from agentjet.errors import InvalidRequest, NotFound, RequestError
from agentjet.gateway.requests import CallChunk, CallRequest
from agentjet.server.dialects.bodies import RequestBody
from agentjet.server.dialects.request_keys import RequestKeys
from agentjet.types import Conversation, Message

POLICY_ALIAS = "policy"
MAX_ROLE = 128
"""Characters of an agent role's name: it must fit where rewards are given by role."""

Asked = TypeVar("Asked", bound=RequestBody)
Answer = TypeVar("Answer", bound=BaseModel)
Chunks = AsyncGenerator[CallChunk]
Past = Callable[[str], tuple[Conversation, Message] | None]
"""What a call of this episode and role was asked, and what it answered, by the call's id; None for any other id."""


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer says of itself before anything is sampled. `id` is that of the (first choice's) call."""

    id: str
    model: str
    created: int


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of a stream, as it is sent."""

    text: str


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """How errors look: `body` is the answer to a request, `event` the end of a stream that broke behind n events."""

    model: type[BaseModel]
    body: Callable[[RequestError], dict[str, Any]]
    event: Callable[[RequestError, int], str]


@dataclass(frozen=True, slots=True)
class Dialect(Generic[Asked, Answer]):
    """One route of an API.

    `to_request` raises `RequestError` naming the first thing that cannot be honoured. The chunks that `to_answer` and
    `to_events` take are those of `Gateway.call`; both end when the chunks do.
    """

    path: str
    keys: RequestKeys
    """The treatment of every key of a request."""
    answer: type[Answer]
    errors: ErrorShape
    to_request: Callable[[Asked, Past], CallRequest]
    to_answer: Callable[[Chunks, Asked, Head], Coroutine[Any, Any, Answer]]
    to_events: Callable[[Chunks, Asked, Head], AsyncGenerator[Event]]


DONE = Event("data: [DONE]\n\n")
"""How OpenAI's older dialects end a stream."""


def sse(payload: dict[str, Any], *, name: str = "") -> str:
    """One server-sent event."""
    event = f"event: {name}\n" if name else ""
    return f"{event}data: {json.dumps(payload, ensure_ascii=False)}\n\n"


def role_of(model: str, served: str, header: str, aliases: str = "") -> str:
    """The agent role a request speaks as: its header, or what follows `@` in the model's name.

    `aliases` are further names, comma-separated, with `*` for anything. Raises `NotFound` for another model.
    """
    for name in (served, POLICY_ALIAS, *_matching(model, aliases)):
        if model == name:
            return header
        if model.startswith(name + "@"):
            role = model[len(name) + 1 :]
            if len(role) > MAX_ROLE:
                raise InvalidRequest(
                    f"The model's name says a role of {len(role)} characters; it may have {MAX_ROLE}.", param="model"
                )
            if header and header != role:
                raise InvalidRequest(f"The model's name says role {role!r}, the header {header!r}.", param="model")
            return role
    near = get_close_matches(model, [served, POLICY_ALIAS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f": it serves {served!r}, also called {POLICY_ALIAS!r}."
    hint += " server.model_aliases lets it answer to other names."
    raise NotFound(f"The model {model!r} is not served here{hint}", code="model_not_found", param="model")


def _matching(model: str, aliases: str) -> list[str]:
    """The name in `model`, before its role, when an alias allows it."""
    name = model.partition("@")[0]
    patterns = (pattern.strip() for pattern in aliases.split(","))
    return [name] if any(fnmatchcase(name, pattern) for pattern in patterns if pattern) else []
