"""Limits of a request and of a connection, and the parsing of JSON bodies within them. Every route has the same limits.

Two limits are settings. The others are constants, because they are far above what clients need; `docs/operations.md`
has the table.

A large body is counted before it is parsed: counting is cheap, and a parsed body of empty objects takes twenty-five
times the memory of its text.
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
    values: int = 300_000
    """Values in a body, including those inside arrays and objects."""
    containers: int = 50_000
    """Arrays and objects in a body."""
    keys: int = 10_000
    """Keys of one object."""
    depth: int = 200
    """Nesting of arrays and objects."""
    header_seconds: float = 30.0
    """From the connection, or from the first byte of a later request, to the end of the headers."""
    linger_seconds: float = 10.0
    """For the rest of a body after an early response; then the connection is closed."""

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


CHUNK_BYTES = 64 * 2**10
"""Bytes counted in one step. Other threads can run between two steps."""


def parse_body(body: bytes, model: TypeAdapter[Any], limits: Limits) -> Any:
    """Returns a body as a value of `model`. Raises `InvalidRequest`, `TooLarge`, or `RequestValidationError`."""
    if len(body) >= LARGE:
        _check_counts(body, limits)
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error.msg}.", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body cannot be read as JSON: {error}.", code="invalid_json") from None
    for name, item in value.items() if isinstance(value, dict) else (("the body", value),):
        _check_nesting(item, str(name), limits)
    if isinstance(value, dict) and len(value) > limits.keys:
        raise _too_many_keys(value, "the body", limits)
    try:
        return model.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None


def count_values(body: bytes) -> tuple[int, int]:
    """Returns an upper bound of the number of values in a JSON text, and the number of its arrays and objects.

    One pass in constant memory. For text that is not JSON, the numbers have no meaning.
    """
    num_commas = num_opened = 0
    in_string, carried = False, b""
    for start in range(0, len(body), CHUNK_BYTES):
        piece = carried + body[start : start + CHUNK_BYTES]
        escaping = len(piece) - len(piece.rstrip(b"\\"))
        carried = piece[-1:] if escaping % 2 else b""
        # Without escapes, every remaining quote opens or closes a string.
        plain = piece[: len(piece) - len(carried)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = plain.split(b'"')
        outside = b"".join(parts[in_string::2])
        num_commas += outside.count(b",")
        num_opened += outside.count(b"[") + outside.count(b"{")
        in_string ^= len(parts) % 2 == 0
    return num_commas + num_opened + 1, num_opened


def _check_counts(body: bytes, limits: Limits) -> None:
    opened = body.count(b"[") + body.count(b"{")
    if opened <= limits.containers and opened + body.count(b",") < limits.values:
        return  # An upper bound, because it includes characters inside strings; enough for most bodies.
    num_values, num_containers = count_values(body)
    for found, most, what in (
        (num_containers, limits.containers, "arrays and objects"),
        (num_values, limits.values, "values"),
    ):
        if found > most:
            raise TooLarge(f"The body has {found} {what}, above the limit of {most}: send fewer items.")


def _check_nesting(value: Any, name: str, limits: Limits) -> None:
    """Goes level by level, because deep nesting would exceed the recursion limit."""
    level, depth = [value], 1
    while level := [container for container in level if isinstance(container, dict | list)]:
        depth += 1
        if depth > limits.depth:
            raise InvalidRequest(
                f"{name} nests its JSON more than {limits.depth} levels deep: flatten it.",
                code="nested_too_deep",
                param=name,
            )
        below: list[Any] = []
        for container in level:
            if isinstance(container, list):
                below += container
            elif len(container) > limits.keys:
                raise _too_many_keys(container, name, limits)
            else:
                below += container.values()
        level = below


def _too_many_keys(value: dict[str, Any], name: str, limits: Limits) -> TooLarge:
    return TooLarge(f"{name} has an object with {len(value)} keys, above the limit of {limits.keys}.", param=name)
