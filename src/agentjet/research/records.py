"""Records: JSON and back, an id that is the hash of the content, and messages about content that does not fit."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentjet.errors import ConfigError

Value = bool | int | float | str
Setting = Mapping[str, Value]
"""Settings by name, such as `job.optimizer.lr`, as `agentjet serve --set` takes them."""

ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def adapter(kind: type) -> TypeAdapter[Any]:
    """Cached per class, because building an adapter takes a millisecond."""
    if kind not in ADAPTERS:
        ADAPTERS[kind] = TypeAdapter(kind)
    return ADAPTERS[kind]


class Record:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    @cached_property
    def id(self) -> str:
        """The first 64 bits of the SHA-256 of the content, in hexadecimal."""
        return hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every subclass is a dataclass

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Raises `ConfigError` naming the first invalid field."""
        try:
            checked: Self = adapter(cls).validate_json(canonical(content), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{cls.__name__}: {validation_message(error)}") from None
        return checked


def canonical(content: object) -> str:
    """JSON with one spelling per content. Raises `ValueError` for NaN and infinity."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ConfigError(message)


LONGEST = 60
"""Maximum characters shown of an invalid value."""
ARM_NAME = r"^[\w.+-][\w .+-]{0,39}$"
SETTING_NAME = r"^[a-z_0-9]+(\.[a-z_0-9]+)*$"
HEXADECIMAL = r"^[0-9a-f]*$"
PATTERNS = {
    ARM_NAME: "a name of up to 40 letters, digits, blanks, dots and any of + - _, without a leading blank",
    SETTING_NAME: "the name of a setting, such as job.optimizer.lr",
    HEXADECIMAL: "a hash in hexadecimal",
}
KINDS = {
    "bool": "true or false",
    "dict": "names with their values",
    "dataclass": "names with their values",
    "finite": "a number that is finite",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "model": "names with their values",
    "string": "text",
    "tuple": "a list",
}
"""Keyed by the first word of pydantic's error type."""


def validation_message(error: ValidationError) -> str:
    """Describes the first error of a validation: the key, the value and what is expected."""
    detail: Any = error.errors(include_url=False)[0]
    *outer, last = detail["loc"] or ("",)
    kind, value = detail["type"], shown(detail["input"])
    if last == "[key]":
        return f"{dotted(outer[:-1])}: {value} must be {expectation(detail)}"
    if last == "bool" and kind.startswith("bool"):  # the first type of a setting's value; no type fits
        return f"{dotted(outer)} = {value}: it must be text, a number, true or false"
    key = dotted([*outer, last])
    match kind:
        case "missing":
            return f"{key}: is required"
        case "value_error":
            return f"{key}: {detail['ctx']['error']}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{key}: unknown key"
        case _:
            return f"{key and f'{key} = '}{value}: it must be {expectation(detail)}"


def expectation(detail: Mapping[str, Any]) -> str:
    """Completes the sentence "it must be ..."."""
    bounds: Mapping[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "greater_than":
            return f"above {bounds['gt']:g}"
        case "greater_than_equal":
            return f"{bounds['ge']:g} or more"
        case "less_than_equal":
            return f"{bounds['le']:g} or less"
        case "literal_error":
            return str(bounds["expected"])
        case "string_too_long":
            return f"text of at most {bounds['max_length']} characters"
        case "too_short":
            return f"{bounds['min_length']} items or more, not {bounds['actual_length']}"
        case "too_long":
            return f"{bounds['max_length']} items or fewer"
        case "string_pattern_mismatch":
            return PATTERNS.get(bounds["pattern"], f"of the form {bounds['pattern']}")
        case "union_tag_invalid" | "union_tag_not_found":
            kinds = bounds.get("expected_tags", "")
            return f"an action with a kind{kinds and f', one of {kinds}'}"
        case kind:
            return KINDS.get(kind.partition("_")[0]) or detail["msg"].removeprefix("Input should be ")


def dotted(key: list[int | str]) -> str:
    return ".".join(map(str, key))


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


LONGEST_NOTE = 2000
LONGEST_LINE = 400
"""Maximum characters of a line on the terminal."""


def shortened(text: str, limit: int = LONGEST_NOTE) -> str:
    """Shortens a long text to its first sentences and its end. The cause of a failure is usually its last line."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{whole_sentences(text, half)} [...] {text[len(text) - half + 7 :].lstrip()}"


def in_a_line(note: str) -> str:
    """Formats a note for the terminal: its first line and the last line of the attached log."""
    first, *log = [line.strip() for line in note.splitlines() if line.strip()] or [""]
    return " ".join([whole_sentences(first, LONGEST_LINE), *(whole_sentences(line, LONGEST_LINE) for line in log[-1:])])


def whole_sentences(text: str, limit: int) -> str:
    """Keeps as many leading sentences as fit, or as many words if the first sentence is too long."""
    if len(text) <= limit:
        return text
    ends = [match.end() for match in re.finditer(r"[.;!?](?=\s)", text[: limit + 1])]
    return text[: ends[-1]] if ends else f"{text[:limit].rpartition(' ')[0] or text[:limit]} ..."
