"""`Limits`: the most that one request, or one connection, may take. The same on every route.

Settings name two of them; the others are constants, because no honest client comes near them. `docs/operations.md` has
the table.

A request's body: counted, then parsed, then validated against its model. No I/O.

Counting comes first because it is cheap: once parsed, a body of empty objects takes twenty-five times its size. Every
limit is in `server.limits`.
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

OWN_FILES = 128
"""Files and pipes that the server needs for itself, whatever the number of connections."""
SLOWEST_BODY = 64 * 2**10
"""Bytes per second at which a body must arrive, apart from the first `header_seconds`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    body_bytes: int
    connections: int
    header_bytes: int = 64 * 2**10
    """Request line and headers together."""
    values: int = 300_000
    """Values in a body, those inside arrays and objects included."""
    containers: int = 50_000
    """Arrays and objects in a body."""
    keys: int = 10_000
    """Keys of one object."""
    depth: int = 200
    """Arrays and objects inside each other."""
    header_seconds: float = 30.0
    """From the connection, or the first byte of a later request, to the end of its headers."""
    linger_seconds: float = 10.0
    """For the rest of a body whose request is answered already; then the connection is closed."""

    @classmethod
    def of(cls, server: ServerConfig) -> Limits:
        """The limits of a server. Fewer connections than the setting, where the process may not open so many files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = server.max_connections if files == resource.RLIM_INFINITY else files - OWN_FILES
        return cls(body_bytes=server.max_body_mb * 2**20, connections=max(16, min(server.max_connections, most)))

    @property
    def body_seconds(self) -> float:
        """For a whole body, from the end of its headers."""
        return self.header_seconds + self.body_bytes / SLOWEST_BODY


PIECE = 64 * 2**10
"""Bytes that are counted in one step: other threads go on after each."""


def parse_body(body: bytes, model: TypeAdapter[Any], limits: Limits) -> Any:
    """The value of `model` that a body is. Raises `InvalidRequest`, `TooLarge`, or `RequestValidationError`."""
    if len(body) >= LARGE:
        _check_counts(body, limits)
    try:
        value = json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error.msg}.", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is no JSON to be read: {error}.", code="invalid_json") from None
    for name, item in value.items() if isinstance(value, dict) else (("the body", value),):
        _check_nesting(item, str(name), limits)
    if isinstance(value, dict) and len(value) > limits.keys:
        raise _too_many_keys(value, "the body", limits)
    try:
        return model.validate_python(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None


def count(body: bytes) -> tuple[int, int]:
    """How many values a JSON text has at most, and how many arrays and objects exactly. One pass in constant memory.

    What is no JSON gives some numbers, too.
    """
    num_commas = num_opened = 0
    in_string, carried = False, b""
    for start in range(0, len(body), PIECE):
        piece = carried + body[start : start + PIECE]
        escaping = len(piece) - len(piece.rstrip(b"\\"))
        carried = piece[-1:] if escaping % 2 else b""
        # Without escapes, every quote that is left begins or ends a string.
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
        return  # Characters inside strings counted, too; text is mostly within the limits all the same.
    num_values, num_containers = count(body)
    for found, most, what in (
        (num_containers, limits.containers, "arrays and objects"),
        (num_values, limits.values, "values"),
    ):
        if found > most:
            raise TooLarge(f"The body's JSON has {found} {what}; a request may have {most}: send fewer items.")


def _check_nesting(value: Any, name: str, limits: Limits) -> None:
    """Level by level, since recursion is what deep nesting breaks."""
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
    return TooLarge(f"{name} holds an object of {len(value)} keys; it may have {limits.keys}.", param=name)
