"""Records: JSON and back, an id that is the hash of the content, and messages about content that does not fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentjet.errors import ConfigError, nearest_name

Value = bool | int | float | str
Setting = Mapping[str, Value]
"""Settings by name, such as `job.optimizer.lr`, as `agentjet serve --set` takes them."""


@cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Cached, because building an adapter takes a millisecond."""
    return TypeAdapter(kind)


class Record:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    @cached_property
    def id(self) -> str:
        """Hash of the content."""
        return hash_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every subclass is a dataclass

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Raises `ConfigError` naming the first invalid field."""
        try:
            # mypy does not see that a class is hashable.
            checked: Self = adapter(cls).validate_json(canonical(content), strict=True)  # type: ignore[arg-type]
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {mistake(error)}") from None
        return checked


def canonical(content: object) -> str:
    """JSON with one spelling per content. Raises `ValueError` for NaN and infinity."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_of(content: object) -> str:
    """The first 64 bits of the SHA-256 of the content, in hexadecimal."""
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:16]


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ConfigError(message)


ARM_NAME = r"^[\w.+-][\w .+-]{0,39}$"
"""Up to 40 letters, digits, blanks, dots and any of + - _, without a leading blank."""
LONGEST = 60
"""Maximum characters shown of an invalid value."""
LONGEST_NOTE = 2000


def mistake(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Describes the first error of a validation: the key, the value and what is expected. `known` are names of keys."""
    detail: Any = error.errors(include_url=False)[0]
    *outer, last = detail["loc"] or ("",)
    key, value = ".".join(map(str, (*outer, last))), shortened(repr(detail["input"]), LONGEST)
    message = detail["msg"].removeprefix("Value error, ")
    if last == "bool" and detail["type"].startswith("bool"):  # the first type of a setting's value; no type fits
        key, message = ".".join(map(str, outer)), "it must be text, a number, true or false"
    elif detail["type"] == "missing":
        return f"{key}: is required"
    elif detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(key, str(last), [*known])
    return f"{key} = {value}: {message[0].lower()}{message[1:]}"


def unknown_key(key: str, name: str, known: Sequence[str]) -> str:
    near = nearest_name(name, known)
    way = f"; did you mean {near}?" if near else f"; the keys are {', '.join(known)}" if known else ""
    return f"{key}: unknown key{way}"


def shortened(text: str, limit: int = LONGEST_NOTE) -> str:
    """Shortens a long text to its beginning and its end. The cause of a failure is usually its last line."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[: half - 5].rstrip()} ... {text[-half:].lstrip()}"
