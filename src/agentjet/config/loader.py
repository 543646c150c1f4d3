"""Loads settings from a TOML file and `--set a.b=c`, which wins; and the reference of all settings, from the schema.

`server_token` reads the environment. A `ConfigError` names the key, its value, its source and the way out; for an
unknown key, the nearest known one.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from agentjet.config.schema import JobConfig, ModelConfig, ServeConfig, SideCallRule
from agentjet.errors import ConfigError, nearest_name
from agentjet.recipes import registry
from agentjet.section import Section
from agentjet.types import CheckpointName, SamplerBounds

# ---- the reference ---------------------------------------------------------------------------------------------------

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
    values = [dict(leaves(job.model_dump(mode="json"), "job.")) for job in (before, after)]
    names = dict.fromkeys([*values[0], *values[1]])
    both = [(name, *(toml(one[name]) if name in one else "not set" for one in values)) for name in names]
    return [f"{name} was {old} and is {new}" for name, old, new in both if old != new]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the settings of nested tables by their dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
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
    if origin in (Union, UnionType) and any(
        kind is str or get_origin(kind) is Literal for kind in get_args(field.annotation)
    ):
        return " or ".join(type_of(FieldInfo.from_annotation(kind)) for kind in get_args(field.annotation))
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
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- loading ---------------------------------------------------------------------------------------------------------

_SHAPES = {
    "tuple_type": "input should be a list, such as [1, 2]",
    "dict_type": "input should be a table, such as {name = 1}",
    "model_type": "input should be a table, such as {name = 1}",
}
"""Messages in the words of TOML, by pydantic's type of error."""
TOKEN_VARIABLE = "AGENTJET_TOKEN"
TEACHER_VARIABLE = "AGENTJET_TEACHER_KEY"
MIN_TOKEN_LENGTH = 16
NAMED = ("recipe", "loss")
"""Sections that may be given by their name alone: `recipe = "gspo"` is `recipe = {name = "gspo"}`."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ServeConfig:
    """Returns the settings of a server from a file and `a.b=c` overrides. Raises `ConfigError`."""
    values = {} if path is None else read_toml(path)
    origins = dict.fromkeys(_keys(values), str(path))
    for key, value in parse_overrides(overrides):
        _assign(values, key, value)
        origins[key] = "--set"
    return _validate(values, origins)


def parse_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of `--set` options, unchecked. Raises `ConfigError`."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        yield key.strip(), parse_value(text)


def parse_config(settings: Mapping[str, Any], origin: str = "") -> ServeConfig:
    """Returns the settings of a server from a mapping of dotted names to values. Raises `ConfigError`.

    `origin` names their source in messages, such as `request`.
    """
    values: dict[str, Any] = {}
    for key, value in settings.items():
        _assign(values, key, value)
    return _validate(values, dict.fromkeys(_keys(values), origin) if origin else {})


def server_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the client token from the environment, stripped; None if it is not set. Raises `ConfigError`."""
    token = _secret(environ, TOKEN_VARIABLE, "let the server make a token")
    if token and len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, which is easy to guess: use {MIN_TOKEN_LENGTH} or more, "
            "or unset it and let the server make a token"
        )
    return token or None


def teacher_key(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the API key for teachers that are endpoints from the environment, or ''. Raises `ConfigError`."""
    return _secret(environ, TEACHER_VARIABLE, "use endpoints that need no key")


def _secret(environ: Mapping[str, str], variable: str, otherwise: str) -> str:
    secret = environ.get(variable, "").strip()
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ConfigError(
            f"{variable} has a character that a token cannot have, such as a space, a line break or a letter "
            f"with an accent: use printable ASCII characters, or unset it and {otherwise}"
        )
    return secret


def parse_value(text: str) -> Any:
    """Returns the value right of `=`: a TOML value if it is one (`4`, `2e-5`, `true`, `[1, 2]`), else the text."""
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # includes numbers with more digits than Python converts
        return text
    return parsed["value"] if len(parsed) == 1 and "#" not in text else text


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a settings file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Editors of Windows write a byte order mark.
    except FileNotFoundError:
        raise ConfigError(f"settings file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"settings file {str(path)!r} is not valid TOML: {error}") from None


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `a.b.c`. A scalar in place of a section is reported by validation."""
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if section in NAMED and isinstance(inner, str):
            inner = values[section] = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} = {value!r}: {section!r} is set to {inner!r} already and cannot hold settings")
        values = inner
    values[name] = value


MOST_ERRORS = 20
"""Wrong settings that are named. For each, all known names are compared."""


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> ServeConfig:
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()
        more = [f"and {len(wrong) - MOST_ERRORS} more errors"] if len(wrong) > MOST_ERRORS else []
        raise ConfigError("\n".join([_sentence(one, origins) for one in wrong[:MOST_ERRORS]] + more)) from None


def _sections_near(key: str) -> dict[str, type[Section]]:
    """Returns all sections by dotted name. The user's name in `key` replaces `NAME`."""
    found = {}
    for dotted, section in sections():
        before, name, after = dotted.partition("NAME")
        if name and key.startswith(before):
            name = key.removeprefix(before).partition(".")[0]
        found[before + name + after] = section
    return found


def _nearest(key: str) -> str | None:
    """Returns the known name most similar to `key`, by the whole path or by the last part."""
    near = _sections_near(key)
    known = [f"{prefix}.{name}" for prefix, section in near.items() for name, _ in settings(section)]
    known += [f"job.recipe.{path}" for path in type(registry.default_recipe()).paths()]
    names = [*known, *(name for name in near if not key.startswith(f"{name}."))]
    return nearest_name(key, names, separator=".")


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """Returns the source of a key as ` (source)`: its own, that of what it is in, or of what is in it; else ''."""
    parts = key.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    within = (other for other in origins if other.startswith(f"{key}."))
    return next((f" ({origins[name]})" for name in (*around, *within) if name in origins), "")


_TYPE_NAME = re.compile(r"function-(after|before|wrap)\[|literal\[|constrained-")


def _sentence(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Returns one error of pydantic as `key = value (source): what is wrong`."""
    # A setting with several types has one error for each: the last part of the place is pydantic's name of the type.
    names = [str(part) for part in detail["loc"] if part != "[key]" and not _TYPE_NAME.match(str(part))]
    key, value = ".".join(names), detail["input"]
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        keys = [key]
        while isinstance(value, dict) and len(value) == 1:  # A section that does not exist: name what was set.
            [(name, value)] = value.items()
            keys.insert(0, f"{keys[0]}.{name}")
        key, nearest = keys[0], next(filter(None, (_nearest(re.sub(r"\.\d+\b", "", one)) for one in keys)), None)
        way_out = f"did you mean {nearest}?" if nearest else "docs/settings.md lists them all"
        return f"{key} = {value!r}{_origin(key, origins)}: there is no such setting; {way_out}"
    stated = f"{key} = {value!r}{_origin(key, origins)}" if detail["loc"][-1:] != ("[key]",) else key
    if detail["type"] == "model_type" and (section := _sections_near(key).get(key)):
        return f"{stated}: this is a section; set what is in it, such as {key}.{next(iter(section.model_fields))}"
    if detail["type"] == "missing":
        return f"{key}: this setting is missing; set it"
    if (
        isinstance(value, dict) and detail["type"] == "value_error"
    ):  # a cross-check of a section, whose message names the keys and values
        return f"{key.rstrip('.')}: {message}".removeprefix(": ")
    message = _SHAPES.get(detail["type"], message)
    return f"{stated}: {message[0].lower()}{message[1:]}"


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def cache_dir() -> Path:
    """Folder of unpacked models and tokenizers: `$XDG_CACHE_HOME/agentjet`, else `~/.cache/agentjet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentjet"


def check_models(config: ServeConfig, *, only_of_policies: bool = False) -> None:
    """Raises `ConfigError` for a base model that cannot be loaded. Folders of other machines are not checked.
    `only_of_policies` leaves out `model.name`.
    """
    for policy in config.policy_names:
        name = config.model_of(policy).name
        of_policy = policy in config.policies and config.policies[policy].model
        if only_of_policies and not of_policy:
            continue
        if not config.compute_of(policy).address and CheckpointName.parse(name) is None:
            check_model_name(name, f"policies.{policy}.model =" if of_policy else "model.name =")


def check_model_name(name: str, label: str) -> None:
    """Raises `ConfigError` for a model that no server could load. Does not ask the hub. `label` begins the error."""
    bundled, path = ModelConfig().name, Path(name)
    if name == bundled or (name and (path / "config.json").is_file()):
        return
    way_out = f"give the folder of a model, organisation/name of the Hugging Face hub, or {bundled!r}"
    if not name:
        raise ConfigError(f"{label} '' is empty: {way_out}")
    if path.is_dir():
        inner = next((f", such as {str(file.parent)!r}" for file in sorted(path.glob("*/config.json"))), "")
        kind = "the folder of an adapter" if (path / "adapter_config.json").is_file() else "a folder"
        raise ConfigError(f"{label} {name!r} is {kind} without config.json, so not of a whole model: {way_out}{inner}")
    if path.exists():
        raise ConfigError(f"{label} {name!r} is a file: {way_out}")
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return
    near = nearest_name(name, _models_here(), separator="/")
    hint = f"did you mean {near!r}? Else {way_out}" if near else way_out
    raise ConfigError(
        f"{label} {name!r} is neither a folder here, nor a Hugging Face id (organisation/name), nor the bundled "
        f"{bundled!r}; {hint}"
    )


def _models_here() -> list[str]:
    """Returns the models that need no download: the bundled one, those in the hub's cache, and folders here."""
    home = Path(os.environ.get("HF_HOME") or cache_dir().with_name("huggingface"))
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").glob("models--*--*")
    folders = (str(file.parent) for file in Path().glob("*/config.json"))
    return [ModelConfig().name, *folders, *(one.name.removeprefix("models--").replace("--", "/") for one in cached)]


def first_mistake(error: ValueError) -> str:
    """Returns the first error of a body or a file in one line, with its key."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")]))
