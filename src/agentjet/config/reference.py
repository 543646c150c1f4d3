"""Every setting with its type, default and meaning, read from the schema's own docstrings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentjet.config.schema import JobConfig, Section, ServeConfig, SideCallRule

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}


def is_section(annotation: Any) -> TypeGuard[type[Section]]:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def rows_of(annotation: Any) -> type[Section] | None:
    """The section that each item of a list of tables is; None for any other setting."""
    item = get_args(annotation)[0] if get_origin(annotation) is tuple else None
    return item if is_section(item) else None


def sections(schema: type[Section] = ServeConfig, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The sections by dotted name, outer ones first."""
    for name, field in schema.model_fields.items():
        if is_section(field.annotation):
            yield prefix + name, field.annotation
            yield from sections(field.annotation, f"{prefix}{name}.")
        elif rows := rows_of(field.annotation):
            yield prefix + name, rows


def settings(section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The settings that stand in a section itself."""
    return ((name, field) for name, field in section.model_fields.items() if not is_section(field.annotation))


def setting_names() -> list[str]:
    """Every setting by its dotted name, in the order of the schema. Those of the items of a list have none."""
    return [
        f"{prefix}.{name}"
        for prefix, section in sections()
        if section is not SideCallRule
        for name, _ in settings(section)
    ]


def changed_settings(before: JobConfig, after: JobConfig) -> list[str]:
    """The job settings that differ, each with both values. Defaults that depend on other settings are written out."""
    values = [dict(_leaves(job.with_defaults().model_dump(mode="json"), "job.")) for job in (before, after)]
    names = dict.fromkeys([*values[0], *values[1]])
    told = [(name, *(_stated(one, name) for one in values)) for name in names]
    return [f"{name} was {old} and is {new}" for name, old, new in told if old != new]


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _stated(values: Mapping[str, Any], name: str) -> str:
    return _toml(values[name]) if name in values else "not set"


def settings_table() -> str:
    """Markdown: one table a section."""
    parts = []
    for prefix, section in sections():
        head = f"[[{prefix}]]" if section is SideCallRule else f"[{prefix}]"
        lines = [f"## `{head}`", "", cleandoc(section.__doc__ or ""), ""]
        lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
        for name, field in settings(section):
            default = f"`{_toml(field.default)}`"
            lines.append(f"| `{name}` | {_type(field)} | {default} | {_cell(field.description or '')} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _type(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    if rows_of(field.annotation):
        return "list of tables"
    if get_origin(field.annotation) is tuple:
        return f"list of {', '.join(f'`{choice}`' for choice in get_args(get_args(field.annotation)[0]))}"
    if get_origin(field.annotation) is dict:
        return "table of numbers > 0"
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(rule, name)
    ]
    assert isinstance(field.annotation, type)
    return " ".join([TYPES[field.annotation], ", ".join(bounds)]).strip()


def _toml(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str | Path) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
