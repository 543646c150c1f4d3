"""What a study's parts have in common: JSON and back, and an id that is the hash of the content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentjet.errors import ConfigError
from agentjet.research.wording import sentence

Value = bool | int | float | str
Setting = Mapping[str, Value]
"""Settings by name, such as `job.optimizer.lr`, as `agentjet serve --set` takes them."""

ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def adapter(kind: type) -> TypeAdapter[Any]:
    """Built once for a class: that takes a millisecond."""
    if kind not in ADAPTERS:
        ADAPTERS[kind] = TypeAdapter(kind)
    return ADAPTERS[kind]


class Record:
    """To and from JSON, and the id."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    @cached_property
    def id(self) -> str:
        """The first 64 bits of the SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every subclass is a dataclass

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Raises `ConfigError` naming the first field that does not fit."""
        try:
            checked: Self = adapter(cls).validate_json(canonical(content), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {sentence(error)}") from None
        return checked


def canonical(content: object) -> str:
    """JSON with one spelling per content. Not-a-number and infinities are refused."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ConfigError(message)
