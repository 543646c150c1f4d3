"""The treatment of every request key: honoured, noted or refused. One table a dialect, for the code and for the page.

* honoured: the key has its effect;
* noted: the key is accepted without an effect, counted, and shown on its episode. It changes neither the prompt nor the
  distribution that the policy is sampled from;
* refused: a value with an effect is a 400 that names the key. The `neutral` values, and null, have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from agentjet.errors import InvalidRequest

Treatment = Literal["honoured", "noted", "refused"]
UNTREATED: dict[Treatment, str] = {"honoured": "as if absent", "noted": "not counted", "refused": "accepted"}
"""What the page says of neutral values, in the order of its tables."""


@dataclass(frozen=True, slots=True)
class Key:
    """One row of a table. `meaning` is for the page; values in `neutral` are accepted and not counted."""

    treatment: Treatment
    meaning: str = ""
    neutral: tuple[Any, ...] = ()


RequestKeys = Mapping[str, Key]
"""Keys by dotted name, such as `output_config.effort`. A `[]` stands for every item of a list."""


def honoured(meaning: str = "") -> Key:
    return Key("honoured", meaning)


def noted(meaning: str = "", *neutral: Any) -> Key:
    return Key("noted", meaning, neutral)


def refused(meaning: str = "", *neutral: Any) -> Key:
    return Key("refused", meaning, neutral)


class KeyRules:
    """The rows of one part of a body that are not honoured: of the whole body, or below a `prefix` (`messages[].`)."""

    def __init__(self, keys: RequestKeys, prefix: str = "") -> None:
        self._rows: list[tuple[str, list[str], Key]] = []
        for name, key in keys.items():
            path = name.removeprefix(prefix)
            if name.startswith(prefix) and "[]" not in path and key.treatment != "honoured":
                self._rows.append((name, path.split("."), key))
        self._firsts = frozenset(path[0] for _, path, _ in self._rows)

    def judge(self, body: BaseModel, where: str = "") -> list[str]:
        """The noted keys that `body`, which stands at `where`, has.

        Raises `InvalidRequest` naming the first key that is refused, and the way out.
        """
        given = body.model_fields_set & self._firsts
        return [name for name, path, key in self._rows if path[0] in given and _counts(body, path, key, where)]


def _counts(body: BaseModel, path: list[str], key: Key, where: str) -> bool:
    """True if the value at `path` is noted. Raises `InvalidRequest` if it is refused."""
    value: Any = body
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else getattr(value, step, None)
    if value is None or value in key.neutral:
        return False
    if key.treatment == "refused":
        refuse_value(value, key.neutral, where + ".".join(path))
    return True


def refuse_value(value: Any, neutral: tuple[Any, ...], where: str) -> None:
    """Raises `InvalidRequest` for the value at `where`, unless it is null or neutral."""
    if value is None or value in neutral:
        return
    either = " or ".join(map(_shown, neutral))
    way_out = f"leave it out or use {either}" if neutral else "leave it out"
    raise InvalidRequest(
        f"{where} = {_shown(value)} is not supported: {way_out}.", code="unsupported_parameter", param=where
    )


def _shown(value: Any) -> str:
    shown = repr(value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def table(title: str, keys: RequestKeys) -> str:
    """Markdown: the keys of one dialect by treatment."""
    lines = [f"### {title}", "", "| key | treatment | meaning |", "|---|---|---|"]
    for treatment in UNTREATED:
        for name, key in sorted(_rows(keys, treatment)):
            neutral = ", ".join(f"`{_json(value)}`" for value in key.neutral)
            meaning = "; ".join(filter(None, [key.meaning, f"{UNTREATED[treatment]}: {neutral}" if neutral else ""]))
            lines.append(f"| `{name}` | {treatment} | {meaning} |")
    return "\n".join(lines)


def _rows(keys: RequestKeys, treatment: Treatment) -> Iterable[tuple[str, Key]]:
    return ((name, key) for name, key in keys.items() if key.treatment == treatment)


def _json(value: Any) -> str:
    return json.dumps(value)
