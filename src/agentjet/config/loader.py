"""Loads settings from a TOML file, the environment and `--set a.b=c`; later sources win.

A `ConfigError` names the key, its value, its source and the way out; for an unknown key, the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentjet.config.job import JobConfig, Section
from agentjet.config.reference import sections, settings
from agentjet.config.schema import ServeConfig
from agentjet.errors import ConfigError

ENVIRONMENT = {
    "AGENTJET_DATA_DIR": "server.data_dir",
    "AGENTJET_HOST": "server.host",
    "AGENTJET_PORT": "server.port",
}
"""Environment variables and their settings: only settings of the machine, not of the experiment."""

TOKEN_VARIABLE = "AGENTJET_TOKEN"
MIN_TOKEN_LENGTH = 16

S = TypeVar("S", bound=Section)


def load_config(
    path: Path | None, overrides: Sequence[str] = (), *, environ: Mapping[str, str] = os.environ
) -> ServeConfig:
    """Returns the settings of a server from a file, the environment and `a.b=c` overrides. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        values = read_toml(path)
        origins = dict.fromkeys(_keys(values), str(path))
    for variable, key in ENVIRONMENT.items():
        if environ.get(variable):
            _assign(values, key, environ[variable])
            origins[key] = variable
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {override!r} is not of the form section.setting=value, such as job.batch_size=4")
        _assign(values, key, parse_value(text))
        origins[key] = "--set"
    return _validate(ServeConfig, values, "", origins)


def parse_config(settings: Mapping[str, Any]) -> ServeConfig:
    """Returns the settings of a server from a mapping of dotted names to values. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        _assign(values, key, value)
    return _validate(ServeConfig, values, "", {})


def parse_job(values: Mapping[str, Any]) -> JobConfig:
    """Returns the job settings of a request body. Raises `ConfigError` with the same messages as a file."""
    return _validate(JobConfig, dict(values), "job.", {})


def server_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the client token from the environment, stripped; None if it is not set.

    Raises `ConfigError` if the token is too short or has characters that an HTTP header cannot carry.
    """
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
    except ValueError:  # includes numbers with more digits than Python converts
        return text
    return parsed["value"] if len(parsed) == 1 and "#" not in text else text


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the content of a settings file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"settings file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"settings file {str(path)!r} is not valid TOML: {error}") from None


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `a.b.c`. A scalar in place of a section is reported by validation."""
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} = {value!r}: {section!r} is set to {inner!r} already and cannot hold settings")
        values = inner
    values[name] = value


def _validate(schema: type[S], values: dict[str, Any], prefix: str, origins: Mapping[str, str]) -> S:
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(detail, prefix, origins) for detail in error.errors())) from None


SAME_SETTINGS = (
    (r"policies\.[^.]+\.lora", "model.lora"),
    (r"policies\.[^.]+", "policies.NAME"),
    (r"job\.optimizers\.[^.]+", "job.optimizer"),
)
"""Sections with a name of the user, and the sections whose settings they have."""


def _nearest(key: str) -> str | None:
    """Returns the known name most similar to `key`, by the whole path or by the last part."""
    for pattern, section in SAME_SETTINGS:
        if found := re.match(rf"{pattern}(?=\.)", key):
            nearest = _nearest_setting(section + key[found.end() :])
            return nearest and re.sub(rf"^{section}(?=\.)", found[0], nearest)
    return _nearest_setting(key)


def _nearest_setting(key: str) -> str | None:
    leaf = key.rpartition(".")[2]

    def similarity(name: str) -> float:
        whole = difflib.SequenceMatcher(None, key, name).ratio()
        last = difflib.SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()
        return max(whole, 0.99 * last)

    known = [f"{prefix}.{name}" for prefix, section in sections() for name, _ in settings(section)]
    other_sections = [name for name, _ in sections() if not key.startswith(f"{name}.")]
    best = max(known + other_sections, key=similarity)
    return best if similarity(best) >= 0.6 else None


def _sentence(detail: ErrorDetails, prefix: str, origins: Mapping[str, str]) -> str:
    """Returns one error of pydantic as `key = value (source): what is wrong`."""
    key = prefix + ".".join(str(part) for part in detail["loc"] if part != "[key]")
    message = detail["msg"].removeprefix("Value error, ")
    origin = f" ({origins[key]})" if key in origins else ""
    stated = f"{key} = {detail['input']!r}{origin}" if detail["loc"][-1:] != ("[key]",) else key
    if detail["type"] == "extra_forbidden":
        nearest = _nearest(re.sub(r"\.\d+\b", "", key))
        way_out = f"did you mean {nearest}?" if nearest else "docs/settings.md lists them all"
        return f"{stated}: there is no such setting; {way_out}"
    as_listed = re.sub(r"^policies\.[^.]+$", "policies.NAME", key)
    if detail["type"] == "model_type" and (section := dict(sections()).get(as_listed)):
        return f"{stated}: this is a section; set what is in it, such as {key}.{next(iter(section.model_fields))}"
    if isinstance(detail["input"], dict):  # a cross-check of a section, whose message names the keys and values
        key = key.rstrip(".")
        return f"{key}: {message}" if key else message
    return f"{stated}: {message[0].lower()}{message[1:]}"


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def cache_dir() -> Path:
    """Folder of unpacked models and tokenizers: `$XDG_CACHE_HOME/agentjet`, else `~/.cache/agentjet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentjet"
