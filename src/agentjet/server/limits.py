"""Limits of a request and of a connection, and the parsing of JSON bodies within them. Every route has the same limits.

Two limits are settings. The others are constants far above what clients need; `docs/operations.md` has the table.
"""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from agentjet.config import ServerConfig
from agentjet.errors import InvalidRequest, TooLarge
from agentjet.gateway.concurrency import LARGE

RESERVED_FILES = 128
"""Open files and pipes that the server needs besides its connections."""
MIN_BODY_RATE = 64 * 2**10
"""Minimum rate of a body in bytes per second, after the first `header_seconds`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    body_bytes: int
    connections: int
    header_bytes: int = 64 * 2**10
    """Request line and headers."""
    small_body_bytes: int = 4096
    """A body on a route that needs no token."""
    values: int = 300_000
    """Values in a body, including those inside arrays and objects."""
    containers: int = 50_000
    """Arrays and objects in a body."""
    keys: int = 10_000
    """Keys of one object."""
    depth: int = 200
    """Nesting of arrays and objects."""
    header_seconds: float = 30.0
    """From the connection, or from the first byte of a request, to the end of the headers."""
    linger_seconds: float = 10.0
    """For the rest of a body after an early response; then the connection is closed."""
    stall_seconds: float = 300.0
    """For a client that reads nothing of its response; then the connection is closed."""

    @classmethod
    def of(cls, server: ServerConfig) -> Limits:
        """Returns the limits of a server. The limit on open files of the process can lower `connections`."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = server.max_connections if files == resource.RLIM_INFINITY else files - RESERVED_FILES
        return cls(body_bytes=server.max_body_mb * 2**20, connections=max(16, min(server.max_connections, most)))

    @property
    def body_seconds(self) -> float:
        """For a whole body, from the end of the headers."""
        return self.header_seconds + self.body_bytes / MIN_BODY_RATE


def parse_body(body: bytes, model: TypeAdapter[Any], limits: Limits) -> Any:
    """Returns a body as a value of `model`. Raises `InvalidRequest`, `TooLarge`, or `RequestValidationError`."""
    if len(body) >= LARGE:  # Counting is cheap; a parsed body of empty objects has 25 times the size of its text.
        _check_counts(body, limits)
    try:
        value = json.loads(body)
    except RecursionError:
        raise _too_deep("", limits) from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", code="invalid_json") from None
    _check_shape(value, limits)
    try:
        return model.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None


def count_values(body: bytes, most: int) -> tuple[int, int]:
    """Returns an upper bound of the number of values in a JSON text, and the number of its arrays and objects.

    Above `most` values the number can be too small, but is above `most`: splitting millions of strings takes seconds.
    """
    without_escapes = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (num_quotes := without_escapes.count(b'"')) > 4 * most:  # A value has at most two strings, with its key.
        return num_quotes // 4, 0
    outside = b"".join(without_escapes.split(b'"')[::2])
    num_opened = outside.count(b"[") + outside.count(b"{")
    return num_opened + outside.count(b",") + 1, num_opened


def _check_counts(body: bytes, limits: Limits) -> None:
    opened = body.count(b"[") + body.count(b"{")
    if opened <= limits.containers and opened + body.count(b",") < limits.values:
        return  # An upper bound, because it includes characters inside strings; enough for most bodies.
    num_values, num_containers = count_values(body, limits.values)
    for found, most, what in (
        (num_containers, limits.containers, "arrays and objects"),
        (num_values, limits.values, "values"),
    ):
        if found > most:
            raise TooLarge(f"The body has {found} {what}, above the limit of {most}: send fewer items.")


def _check_shape(body: Any, limits: Limits) -> None:
    """Goes level by level, because deep nesting would exceed the recursion limit. Errors name the key of the body."""
    level: list[tuple[str, Any]] = [("", body)]
    for depth in range(limits.depth):
        below: list[tuple[str, Any]] = []
        for name, value in level:  # The name is empty outside a key of the body.
            if isinstance(value, dict):
                if len(value) > limits.keys:
                    why = f"has an object with {len(value)} keys, above the limit of {limits.keys}."
                    raise TooLarge(f"{name or 'the body'} {why}", param=name or None)
                below += [(name if depth else key, item) for key, item in value.items() if type(item) in (dict, list)]
            elif isinstance(value, list):
                below += [(name, item) for item in value if type(item) in (dict, list)]
        if not below:
            return
        level = below
    raise _too_deep(level[0][0], limits)


def _too_deep(name: str, limits: Limits) -> InvalidRequest:
    why = f"nests its JSON more than {limits.depth} levels deep: flatten it."
    return InvalidRequest(f"{name or 'the body'} {why}", code="nested_too_deep", param=name or None)
