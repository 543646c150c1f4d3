"""What a study's parts have in common: JSON and back, and an id that is the hash of the content.

What does not fit a schema, in our words: where it is, what stands there, and what would be right.

What is kept and told of a failure: it begins with what happened, and its cause is the last line of a log.
"""

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


LONGEST = 60
"""Characters of a wrong value."""
ARM_NAME = r"^[\w.+-][\w .+-]{0,39}$"
SETTING_NAME = r"^[a-z_0-9]+(\.[a-z_0-9]+)*$"
HEXADECIMAL = r"^[0-9a-f]*$"
PATTERNS = {
    ARM_NAME: "a name of up to 40 letters, digits, blanks, dots and any of + - _, the first no blank",
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
"""By the first word of pydantic's type of an error."""


def sentence(error: ValidationError) -> str:
    """The first thing that does not fit. Of an unknown key the caller knows which there are."""
    detail: Any = error.errors(include_url=False)[0]
    *outer, last = detail["loc"] or ("",)
    kind, value = detail["type"], shown(detail["input"])
    if last == "[key]":
        return f"{dotted(outer[:-1])}: {value} must be {wanted(detail)}"
    if last == "bool" and kind.startswith("bool"):  # the first of what a setting's value may be: it is none of these
        return f"{dotted(outer)} = {value}: it must be text, a number, true or false"
    key = dotted([*outer, last])
    match kind:
        case "missing":
            return f"{key}: it is not there, and has no default"
        case "value_error":
            return f"{key}: {detail['ctx']['error']}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{key}: there is no such key"
        case _:
            return f"{key and f'{key} = '}{value}: it must be {wanted(detail)}"


def wanted(detail: Mapping[str, Any]) -> str:
    """What would fit, as the end of a sentence."""
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
            return f"{bounds['min_length']} of them or more, and there are {bounds['actual_length']}"
        case "too_long":
            return f"{bounds['max_length']} of them or fewer"
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
"""Characters that are told on a terminal."""


def shortened(text: str, limit: int = LONGEST_NOTE) -> str:
    """A text that fits; of a longer one, its first sentences and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{whole_sentences(text, half)} [...] {text[len(text) - half + 7 :].lstrip()}"


def in_a_line(note: str) -> str:
    """A note for a terminal: its first line, and the last of the log that it goes on with."""
    first, *log = [line.strip() for line in note.splitlines() if line.strip()] or [""]
    return " ".join([whole_sentences(first, LONGEST_LINE), *(whole_sentences(line, LONGEST_LINE) for line in log[-1:])])


def whole_sentences(text: str, limit: int) -> str:
    """As many of the first ones as fit; of a first one that is too long, as many words."""
    if len(text) <= limit:
        return text
    ends = [match.end() for match in re.finditer(r"[.;!?](?=\s)", text[: limit + 1])]
    return text[: ends[-1]] if ends else f"{text[:limit].rpartition(' ')[0] or text[:limit]} ..."
