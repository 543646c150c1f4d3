"""What a journal or a steer file holds, as a person would write it down."""

from __future__ import annotations

import json
from collections.abc import Mapping


def plain(content: object) -> str:
    """Of a mapping in a mapping, as the settings of several arms are, each is told by its name."""
    if isinstance(content, Mapping):
        known = {name: value for name, value in content.items() if value not in ("", {})}
        return "; ".join(
            f"{name}: {', '.join(f'{key} = {plain(inner)}' for key, inner in value.items())}"
            if isinstance(value, Mapping)
            else f"{name} = {plain(value)}"
            for name, value in known.items()
        )
    if isinstance(content, list | tuple):
        return ", ".join(map(plain, content))
    return f"{content:.4g}" if isinstance(content, float) else str(content)


def requested(line: str) -> str:
    """A line of a steer file: the action, or what was said where it is none."""
    from agentjet.research.report.happenings import asked_text

    try:
        said = json.loads(line)
    except ValueError:
        return line
    return asked_text(said) if isinstance(said, dict) and "kind" in said else line
