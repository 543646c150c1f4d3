"""What is known but not honoured: refused by name, unless it asks for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from agentjet.errors import InvalidRequest

Neutral = Mapping[str, tuple[Any, ...]]
"""The values of a key that ask for nothing; null always does. Any other value is refused."""


def refuse_unless_neutral(body: BaseModel, neutral: Neutral) -> None:
    """Raises `InvalidRequest` naming the first key of `neutral` that asks for something, and the way out."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            either = " or ".join(repr(_shown(v)) for v in values)
            way_out = f"leave it out or use {either}" if values else "leave it out"
            raise InvalidRequest(
                f"{name} = {_shown(value)!r} is not supported: {way_out}.", code="unsupported_parameter", param=name
            )


def _shown(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
