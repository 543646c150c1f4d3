"""How a request of OpenAI's two older dialects says what its answer is sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from agentjet.gateway.requests import CallRequest
from agentjet.protocol import Int64, Temperature
from agentjet.server.dialects.bodies import Body, Finite, RequestBody, StopString, StopStrings
from agentjet.server.dialects.request_keys import RequestKeys, honoured
from agentjet.types import ANY_ANSWER, Constraint, Conversation


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class SampledBody(RequestBody):
    """The keys for it, without the length of the answer."""

    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int64, Field(ge=-1)] | None = None
    """An extension: sample among the k likeliest tokens; 0 and -1 truncate nothing."""
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    stream_options: StreamOptions | None = None


SAMPLED_KEYS: RequestKeys = {
    "model": honoured("and the role, after `@`"),
    "temperature": honoured("0, or from 0.01 to 2; 0 is refused in training"),
    "top_p": honoured(),
    "top_k": honoured("an extension; 0 and -1 truncate nothing"),
    "seed": honoured("a whole number of 64 bits"),
    "stop": honoured("up to 16 of up to 1,000 characters"),
    "n": honoured("up to 64"),
    "stream": honoured(),
    "stream_options": honoured("`include_usage`"),
}
"""Of both dialects."""


def sampled_request(
    body: SampledBody,
    conversation: Conversation,
    max_tokens: int | None,
    constraint: Constraint = ANY_ANSWER,
    notes: Sequence[str] = (),
) -> CallRequest:
    """The canonical request that a body is."""
    return CallRequest(
        conversation=conversation,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        constraint=constraint,
        choices=body.n or 1,
        stream=bool(body.stream),
        model=body.model,
        notes=tuple(dict.fromkeys(notes)),
    )
