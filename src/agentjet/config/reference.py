"""The settings reference: names, types, defaults and descriptions, read from the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentjet.config.job import JobConfig, SideCallRule
from agentjet.config.schema import ServeConfig
from agentjet.section import Section
from agentjet.types import SamplerBounds

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    SamplerBounds: "integer or range",
}


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _inner_section(annotation: Any) -> tuple[type[Section], str] | None:
    """Returns the section in the type of a setting, and what follows the name of the setting: `.NAME` in a table."""
    if is_section(annotation):
        return annotation, ""
    origin, inner = get_origin(annotation), [part for part in get_args(annotation) if is_section(part)]
    return (inner[0], ".NAME" if origin is dict else "") if inner else None


def sections(schema: type[Section] = ServeConfig, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yields every section with its dotted name, outer sections first. `NAME` is a name that the user chooses."""
    for name, field in schema.model_fields.items():
        if (found := _inner_section(field.annotation)) is not None:
            section, suffix = found
            yield f"{prefix}{name}{suffix}", section
            yield from sections(section, f"{prefix}{name}{suffix}.")


def settings(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """Returns the settings of a section, without its inner sections."""
    return ((name, field) for name, field in section.model_fields.items() if not is_section(field.annotation))


def changed_settings(before: JobConfig, after: JobConfig) -> list[str]:
    """Returns one message for each job setting that differs."""
    values = [dict(_leaves(job.model_dump(mode="json"), "job.")) for job in (before, after)]
    names = dict.fromkeys([*values[0], *values[1]])
    both = [(name, *(toml(one[name]) if name in one else "not set" for one in values)) for name in names]
    return [f"{name} was {old} and is {new}" for name, old, new in both if old != new]


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def settings_table() -> str:
    """Returns `docs/settings.md` without its title: one Markdown table for each section."""
    parts, shown = [], dict[type[Section], str]()
    for prefix, section in sections():
        shown.setdefault(section, prefix)
    for section, prefix in shown.items():
        head = f"[[{prefix}]]" if section is SideCallRule else f"[{prefix}]"
        lines = [f"## `{head}`", "", cleandoc(section.__doc__ or ""), ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, field in settings(section):
            default = f"`{toml(field.default)}`"
            lines.append(f"| `{name}` | {type_of(field)} | {default} | {_cell(field.description or '')} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def type_of(field: FieldInfo) -> str:
    """Returns the type of a setting and its bounds, as the reference shows them."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    origin = get_origin(field.annotation)
    if origin in (tuple, dict) and _inner_section(field.annotation):
        return "list of tables" if origin is tuple else "table of tables"
    if origin is tuple and (inner := _plain(get_args(field.annotation)[0])) in TYPES:
        return f"list of {TYPES[inner]}"
    if origin is tuple:
        return f"list of {', '.join(f'`{choice}`' for choice in get_args(get_args(field.annotation)[0]))}"
    if origin is dict:
        return "table of numbers > 0"
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(rule, name)
    ]
    if not isinstance(field.annotation, type):
        return "table"
    return " ".join([TYPES[field.annotation], ", ".join(bounds)]).strip()


def _plain(annotation: Any) -> Any:
    """Returns a type without its bounds."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def toml(value: object) -> str:
    """Returns a default as TOML."""
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, dict) and value:
        return f"{{ {', '.join(f'{key} = {toml(one)}' for key, one in value.items())} }}"
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
