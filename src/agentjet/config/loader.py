"""Loads settings from a TOML file and `--set a.b=c`, which wins. `server_token` reads the environment.

A `ConfigError` names the key, its value, its source and the way out; for an unknown key, the nearest known one.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentjet.config.reference import sections, settings
from agentjet.config.schema import ModelConfig, ServeConfig
from agentjet.errors import ConfigError, edit_distance
from agentjet.section import Section

_SHAPES = {
    "tuple_type": "input should be a list, such as [1, 2]",
    "dict_type": "input should be a table, such as {name = 1}",
    "model_type": "input should be a table, such as {name = 1}",
}
"""Messages in the words of TOML, by pydantic's type of error."""
TOKEN_VARIABLE = "AGENTJET_TOKEN"
MIN_TOKEN_LENGTH = 16
NAMED = ("recipe", "loss")
"""Sections that may be given by their name alone: `recipe = "gspo"` is `recipe = {name = "gspo"}`."""


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ServeConfig:
    """Returns the settings of a server from a file and `a.b=c` overrides. Raises `ConfigError`."""
    values = {} if path is None else read_toml(path)
    origins = dict.fromkeys(_keys(values), str(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        _assign(values, key, parse_value(text))
        origins[key] = "--set"
    return _validate(values, origins)


def parse_config(settings: Mapping[str, Any]) -> ServeConfig:
    """Returns the settings of a server from a mapping of dotted names to values. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        _assign(values, key, value)
    return _validate(values, {})


def server_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the client token from the environment, stripped; None if it is not set. Raises `ConfigError`."""
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has a character that a token cannot have, such as a space, a line break or a letter "
            "with an accent: use printable ASCII characters, or unset it and let the server make a token"
        )
    if token and len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, which is easy to guess: use {MIN_TOKEN_LENGTH} or more, "
            "or unset it and let the server make a token"
        )
    return token or None


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


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> ServeConfig:
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(detail, origins) for detail in error.errors())) from None


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
    leaf = key.rpartition(".")[2]

    def similarity(name: str) -> float:
        last = SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()
        return max(SequenceMatcher(None, key, name).ratio(), 0.95 * last)

    near = _sections_near(key)
    known = [f"{prefix}.{name}" for prefix, section in near.items() for name, _ in settings(section)]
    names = [*known, *(name for name in near if not key.startswith(f"{name}."))]
    best = max(names, key=lambda name: (similarity(name), -edit_distance(leaf, name.rpartition(".")[2])))
    return best if similarity(best) >= 0.6 else None


def _sentence(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """Returns one error of pydantic as `key = value (source): what is wrong`."""
    key = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    message = detail["msg"].removeprefix("Value error, ")
    origin = f" ({origins[key]})" if key in origins else ""
    stated = f"{key} = {detail['input']!r}{origin}" if detail["loc"][-1:] != ("[key]",) else key
    if detail["type"] == "extra_forbidden":
        nearest = _nearest(re.sub(r"\.\d+\b", "", key))
        way_out = f"did you mean {nearest}?" if nearest else "docs/settings.md lists them all"
        return f"{stated}: there is no such setting; {way_out}"
    if detail["type"] == "model_type" and (section := _sections_near(key).get(key)):
        return f"{stated}: this is a section; set what is in it, such as {key}.{next(iter(section.model_fields))}"
    if detail["type"] == "missing":
        return f"{key}: this setting is missing; set it"
    if (
        isinstance(detail["input"], dict) and detail["type"] == "value_error"
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


def check_model_name(name: str, label: str) -> None:
    """Raises `ConfigError` for a model that no server could load. Does not ask the hub. `label` begins the error."""
    bundled = ModelConfig().name
    if (name and Path(name).is_dir()) or name == bundled or re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        return
    raise ConfigError(
        f"{label} {name!r} is neither a folder here, nor a Hugging Face id (owner/name), nor the bundled {bundled!r}"
    )


def first_mistake(error: ValueError) -> str:
    """Returns the first error of a body or a file in one line, with its key."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
