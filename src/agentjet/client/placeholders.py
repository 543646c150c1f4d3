"""Placeholders in a command line: `{task}` is the task's payload as JSON, `{task.key}` one value of it, `{task.a.b}`
one further down. Text is filled in as it is, anything else as JSON. Every other brace stays what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentjet.errors import ConfigError

PLACEHOLDER = re.compile(r"\{task((?:\.[\w-]+)*)\}")
BARE = re.compile(r"\{([\w-]+)\}")


def filled(word: str, payload: Any) -> str:
    """`word` with its placeholders filled. Raises `ConfigError` naming the keys there are."""
    if isinstance(payload, Mapping):
        for name in BARE.findall(word):
            if name in payload and name != "task":
                raise ConfigError(f"{{{name}}} is no placeholder: write {{task.{name}}}")

    def value(match: re.Match[str]) -> str:
        found = payload
        for key in filter(None, match[1].split(".")):
            if not isinstance(found, Mapping):
                raise ConfigError(f"{match[0]}: there is nothing below {json.dumps(found)[:60]}, which is no object")
            if key not in found:
                keys = ", ".join(sorted(map(str, found))) or "none"
                raise ConfigError(f"{match[0]}: the task has no {key!r}; its keys are: {keys}")
            found = found[key]
        return found if isinstance(found, str) else json.dumps(found)

    return PLACEHOLDER.sub(value, word)
