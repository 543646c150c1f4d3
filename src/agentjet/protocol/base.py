"""The parts that all bodies of the control API share: base classes, types of fields, the start of the paths.

`duration` and `remaining` are lengths of time for people, in messages of client and server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import isfinite
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from agentjet.errors import (
    Conflict,
    Forbidden,
    InvalidRequest,
    Later,
    MethodNotAllowed,
    NotFound,
    RequestError,
    ServerFailed,
    StorageFailed,
    TooLarge,
    Unauthorized,
    Unavailable,
    Unprocessable,
    UpstreamFailed,
)
from agentjet.types import LARGEST, MAX_NAME, MAX_NUMBERS, MAX_TEMPERATURE, MIN_TEMPERATURE, beginning

PREFIX = "/swarm/v1"
"""Start of every path of the control API, with its version."""
STATUSES: dict[type[RequestError], int] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    Forbidden: 403,
    NotFound: 404,
    MethodNotAllowed: 405,
    Conflict: 409,
    TooLarge: 413,
    Unprocessable: 422,
    Later: 429,
    ServerFailed: 500,
    UpstreamFailed: 502,
    Unavailable: 503,
    StorageFailed: 507,
}
"""The HTTP status of each class of refusals, for the server's answers and for their reading by clients."""
REFUSALS = {status: kind for kind, status in STATUSES.items()}

NO_EFFECT = {"wait", "instance_id", "ends_at_version"}
"""Fields of requests that do not change their effect."""
MAX_REPR = 1000
"""Longest text of a body in a terminal or notebook."""


def _not_too_cold(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"0 is greedy, and any other temperature is at least {MIN_TEMPERATURE:g}")
    return temperature


def _without_empty_name(metrics: dict[str, float]) -> dict[str, float]:
    if "" in metrics:
        raise ValueError(f"the name of a metric is empty: give each metric a name of 1 to {MAX_NAME} characters")
    return metrics


Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False), AfterValidator(_not_too_cold)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Range of integers in SQLite and in the messages to the worker."""
Name = Annotated[str, Field(max_length=MAX_NAME)]


def _as_number(value: object) -> object:
    if isinstance(value, float) and not isfinite(value):  # The bounds alone would be the reason for NaN.
        raise ValueError("NaN and infinity are not finite numbers")
    return float(value) if isinstance(value, bool) else value


Finite = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False, strict=True, ge=-LARGEST, le=LARGEST)]
"""A number. `true` is 1 and `false` is 0. Text is refused."""
NumberMap = Annotated[dict[Name, Finite], Field(max_length=MAX_NUMBERS)]
MetricMap = Annotated[NumberMap, AfterValidator(_without_empty_name)]
MAX_CALL_REWARDS = 4096
CallRewards = Annotated[list[Finite], Field(max_length=MAX_CALL_REWARDS)]


class Request(BaseModel):
    """A request body: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    _digest: str = PrivateAttr("")

    def digest(self) -> str:
        """Returns a digest of the request's JSON, without the fields that do not change its effect.

        It is computed once. A `model_copy` keeps it, so only a server, which copies no request, asks for it.
        """
        if not self._digest:
            digest = hashlib.sha256()
            for piece in self._pieces():
                digest.update(piece.encode())
            self._digest = digest.hexdigest()
        return self._digest

    def _pieces(self) -> Iterator[str]:
        """Yields the JSON. That of a large list in pieces: in a thread, each holds Python's lock for a moment only."""
        yield self.model_dump_json(exclude=NO_EFFECT)


class Response(BaseModel):
    """A response body: a client ignores unknown keys."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    def __repr__(self) -> str:
        """The fields in one line; cut in the middle of a long one, such as an episode with its tokens."""
        text = super().__repr__()
        return text if len(text) <= MAX_REPR else f"{beginning(text, MAX_REPR)} ({len(text)} characters)"


def status_of(error: RequestError) -> int:
    """Returns the HTTP status of a refusal: that of the nearest class in `STATUSES`."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def refusal_of(status: int) -> type[RequestError]:
    """Returns the class of refusals with this HTTP status, for an unknown one by its hundreds."""
    return REFUSALS.get(status, InvalidRequest if status < 500 else ServerFailed)


def duration(seconds: float) -> str:
    """A length of time in at most two units, such as `38 s` or `2 h 11 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, rest = divmod(hours, 24)
    return f"{days} d {rest} h" if rest else f"{days} d"


def remaining(elapsed: float, done: float, total: float) -> str:
    """The time that the rest will take at the pace so far, such as `about 38 s left`; '' before anything is done."""
    if done <= 0 or total <= done:
        return ""
    return f"about {duration(elapsed / done * (total - done))} left"
