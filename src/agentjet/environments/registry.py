"""Finds kinds by name.

A name is one of `KINDS`, an entry point `agentjet.environments` of an installed package, or an import path
`package.module/Class`: a colon begins the target.
"""

from __future__ import annotations

import importlib
import re
import shutil
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from agentjet.environments.kind import Kind
from agentjet.errors import ConfigError, did_you_mean

KINDS = {
    "gymnasium": "gymnasium:Gymnasium",
    "harbor": "harbor:Harbor",
    "inspect": "inspect_ai:Inspect",
    "mcp": "mcp:Mcp",
    "openenv": "openenv:OpenEnv",
    "reasoning_gym": "reasoning_gym:ReasoningGym",
    "scienceworld": "scienceworld:ScienceWorld",
    "textarena": "textarena:TextArena",
    "verifiers": "verifiers:Verifiers",
}
"""The built-in kinds: a module of `agentjet.environments.kinds`, and its class."""
GROUP = "agentjet.environments"


def installed() -> dict[str, EntryPoint]:
    """Returns the entry points of installed packages by name, without those of built-in names."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in KINDS}


def find(name: str) -> type[Kind]:
    """Returns the class of a kind. Raises `ConfigError`."""
    others = installed()
    if name in KINDS:
        path = f"{__package__}.kinds.{KINDS[name]}"
    elif name in others:
        path = others[name].value
    elif "." in name or "/" in name:
        path = name.replace("/", ":")
    else:
        known = [*KINDS, *others]
        way_out = did_you_mean(name, known, f"there are {', '.join(known)}, and package.module/Class")
        raise ConfigError(f"there is no kind of environment {name!r}; {way_out}")
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # The boundary: a package may raise anything when it is imported.
        raise ConfigError(f"the kind {name!r} cannot be loaded from {path}: {type(error).__name__}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Kind)):
        raise ConfigError(f"the kind {name!r} is {found!r}: it must be a subclass of agentjet.environments.Kind")
    return found


def requirement(kind: type[Kind]) -> tuple[str, str, str]:
    """The package that a kind needs, its least version and the version that is too new; empty: none.

    Raises `ConfigError` for a requirement of another form.
    """
    match = re.fullmatch(r"(?:([\w.-]+?)(?:>=([\d.]+))?(?:,?<([\d.]+))?)?", kind.requires)
    if match is None:
        raise ConfigError(f"requires = {kind.requires!r} of {kind.__name__}: write it as 'package>=1,<2'")
    package, least, below = match.groups("")
    return package, least, below


def present(package: str) -> str:
    """The installed version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def versions(kind: Kind | type[Kind]) -> str:
    """The package of a kind with its version, such as "gymnasium 1.4.0"; empty without one."""
    package = requirement(kind if isinstance(kind, type) else type(kind))[0]
    return f"{package} {present(package)}" if package else ""


def check_installed(name: str, kind: type[Kind]) -> None:
    """Raises `ConfigError` with the install command if a library or program is missing, or its version does not fit."""
    package, least, below = requirement(kind)
    if package:
        pip = f"pip install '{kind.requires}'"
        if not (found := present(package)):
            raise ConfigError(f"environments of kind {name} need the package {package}: {pip}")
        numbers = _numbers(found)
        if (least and numbers < _numbers(least)) or (below and numbers >= _numbers(below)):
            raise ConfigError(f"{package} {found} does not fit the kind {name}, which needs {kind.requires}: {pip}")
    if kind.needs and shutil.which(kind.needs) is None:
        raise ConfigError(f"environments of kind {name} need the program {kind.needs}: {kind.install}")


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, such as (1, 4, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
