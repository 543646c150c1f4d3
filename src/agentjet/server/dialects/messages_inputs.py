"""The input of a tool use, which is an object, and the arguments of a tool call, which are text: one from the other.

Invariant: what `to_arguments` makes of a `to_input` is, by meaning, the text that went in. Arguments that JSON cannot
carry to every reader (NaN, half a surrogate pair, hundreds of nested lists) travel as text, in the form that Anthropic
proposes for it: `{"INVALID_JSON": "<as sampled>"}`.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json, to_json

KEY = "INVALID_JSON"


def to_input(arguments: str) -> dict[str, Any]:
    """The object that arguments are; they are those of a tool call, so JSON of an object in Python's eyes."""
    try:
        value: dict[str, Any] | None = from_json(arguments, allow_inf_nan=False)
        from_json(to_json(value), allow_inf_nan=False)  # 1e400 is read as infinity, which no JSON can carry.
    except ValueError:
        value = None
    return {KEY: arguments} if value is None or is_wrapped(value) else value


def is_wrapped(value: dict[str, Any]) -> bool:
    """Whether an input is text that travels as such."""
    return value.keys() == {KEY} and isinstance(value[KEY], str)


def to_arguments(value: dict[str, Any]) -> str:
    """JSON text of an input."""
    return str(value[KEY]) if is_wrapped(value) else json.dumps(value, ensure_ascii=False)
