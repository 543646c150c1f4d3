"""What does not fit a schema, in our words: where it is, what stands there, and what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

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
