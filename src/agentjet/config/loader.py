"""Settings from a TOML file, the environment and `--set a.b=c`, where the later wins; every mistake is a sentence.

A `ConfigError` names the key, its value, where it came from and the way out; for an unknown key the nearest known
one.

Folders outside the data dir.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentjet.config.reference import is_section, sections, setting_names
from agentjet.config.schema import JobConfig, Section, ServeConfig
from agentjet.errors import ConfigError

ENVIRONMENT = {
    "AGENTJET_DATA_DIR": "server.data_dir",
    "AGENTJET_HOST": "server.host",
    "AGENTJET_PORT": "server.port",
}
"""The settings that depend on the machine rather than on the experiment may come from the environment."""

TOKEN_VARIABLE = "AGENTJET_TOKEN"
MIN_TOKEN_LENGTH = 16

S = TypeVar("S", bound=Section)


def load_config(
    path: Path | None, overrides: Sequence[str] = (), *, environ: Mapping[str, str] = os.environ
) -> ServeConfig:
    """The settings of a server; later ones win: file, environment, `a.b=c` overrides. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if path is not None:
        values = _read_toml(path)
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
    """The settings of a server from a mapping of dotted names to values, for programs. Raises `ConfigError`."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        _assign(values, key, value)
    return _validate(ServeConfig, values, "", {})


def parse_job(values: Mapping[str, Any]) -> JobConfig:
    """Job settings that came over the wire, checked with the same sentences. Raises `ConfigError`."""
    return _validate(JobConfig, dict(values), "job.", {})


def server_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """The server's own token, where the environment sets one, without the white space around it.

    Raises `ConfigError` when it is too short, or no header can carry it.
    """
    token = environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has a character that a token cannot have, such as a blank, a line break or a letter "
            "with an accent: use ASCII letters, digits and signs, or unset it and let the server make one"
        )
    if token and len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, which is easy to guess: use {MIN_TOKEN_LENGTH} or more, "
            "or unset it and let the server make one"
        )
    return token or None


def parse_value(text: str) -> Any:
    """What stands right of `=`: a TOML value where it is one (`4`, `2e-5`, `true`, `[1, 2]`), else the text itself."""
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # also a number of more digits than Python converts
        return text
    return parsed["value"] if len(parsed) == 1 and "#" not in text else text


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"settings file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"settings file {str(path)!r} is not valid TOML: {error}") from None


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c`; a scalar where a section belongs is left for validation to name."""
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{key} = {value!r}: {section!r} is set to {inner!r} already and cannot hold settings")
        values = inner
    values[name] = value


def _validate(schema: type[S], values: dict[str, Any], prefix: str, origins: Mapping[str, str]) -> S:
    problems = list(_misfits(schema, values, prefix, origins))
    if not problems:
        try:
            return schema.model_validate(values)
        except ValidationError as error:
            problems = [_sentence(detail, prefix, origins) for detail in error.errors()]
    raise ConfigError("\n".join(problems))


def _misfits(
    schema: type[Section], values: Mapping[str, Any], prefix: str, origins: Mapping[str, str]
) -> Iterator[str]:
    for name, value in values.items():
        key = prefix + name
        stated = f"{key} = {value!r}{_origin(key, origins)}"
        field = schema.model_fields.get(name)
        if field is None:
            nearest = _nearest(key)
            way_out = f"did you mean {nearest}?" if nearest else "docs/settings.md lists them all"
            yield f"{stated}: there is no such setting; {way_out}"
        elif is_section(field.annotation):
            if isinstance(value, dict):
                yield from _misfits(field.annotation, value, key + ".", origins)
            else:
                example = f"{key}.{next(iter(field.annotation.model_fields))}"
                yield f"{stated}: this is a section; set what is in it, such as {example}"
        elif isinstance(value, bool) and field.annotation is not bool:  # pydantic would read True as 1
            yield f"{stated}: true and false are no values of this setting"


def _nearest(key: str) -> str | None:
    """The known name most like `key`: by its whole path, or by its last part where only the section is wrong."""
    leaf = key.rpartition(".")[2]

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, key, name).ratio()
        last = difflib.SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()
        return max(whole, 0.99 * last)

    sections_beside = [name for name, _ in sections() if not key.startswith(f"{name}.")]  # it is in those already
    known = setting_names() + sections_beside
    best = max(known, key=likeness)
    return best if likeness(best) >= 0.6 else None


def _sentence(detail: ErrorDetails, prefix: str, origins: Mapping[str, str]) -> str:
    """One of pydantic's findings, in our words: key = value: what is wrong, hence what would be right."""
    key = prefix + ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if isinstance(detail["input"], dict):  # a cross-check of a section: its message names the keys and values itself
        section = key.rstrip(".")
        return f"{section}: {message}" if section else message
    return f"{key} = {detail['input']!r}{_origin(key, origins)}: {message[0].lower()}{message[1:]}"


def _origin(key: str, origins: Mapping[str, str]) -> str:
    return f" ({origins[key]})" if key in origins else ""


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def cache_dir() -> Path:
    """Where unpacked models and tokenizers are kept: `$XDG_CACHE_HOME/agentjet`, else `~/.cache/agentjet`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentjet"
