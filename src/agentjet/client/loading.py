"""Functions of the user, named on a command line or in a file: `FILE.py:FUNCTION` or `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agentjet.errors import ConfigError

MODULE = "agentjet_loaded_{}"
"""What a file is imported as: it may be called like anything else that is imported."""
LONGEST_LINE = 300
"""Characters of what an exception says."""


def load_function(named: str, *, option: str) -> Callable[..., Any]:
    """The function that `option` names. What lies beside its file can be imported from it. Raises `ConfigError`."""
    place, colon, name = named.rpartition(":")
    if not colon or not name or not place:
        raise ConfigError(f"{option} {named}: expected FILE.py:FUNCTION, or package.module:function")
    _search_current_folder()
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except OSError as error:
        raise ConfigError(f"{option} {place}: {error.strerror or error}") from None
    except SystemExit as error:
        raise ConfigError(f"{option} {place}: importing it ends the program (SystemExit: {error.code})") from None
    except Exception as error:  # the boundary: the user's file may raise anything
        raise ConfigError(f"{option} {place}: {in_a_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option} {named}: there is no function {name!r} in {place}")
    return function  # type: ignore[no-any-return]


def in_a_line(error: BaseException) -> str:
    """An exception of the user's code as the end of a sentence: its type, and its first line as far as that goes."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    cut = first if len(first) <= LONGEST_LINE else f"{first[: LONGEST_LINE - 3]}..."
    return f"{type(error).__name__}: {cut}"


def source_of(named: str, *, option: str) -> Path:
    """The file that a function is named in; nothing is imported but the packages it lies in. Raises `ConfigError`."""
    place = named.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    _search_current_folder()
    try:
        spec = importlib.util.find_spec(place) if place else None
    except ImportError as error:
        raise ConfigError(f"{option} {named}: {error}") from None
    if spec is None or spec.origin is None:
        raise ConfigError(f"{option} {named}: there is no module {place!r}")
    if not spec.has_location:
        raise ConfigError(f"{option} {named}: {place!r} is part of Python itself, and no file of yours")
    return Path(spec.origin)


def _search_current_folder() -> None:
    """Search the current folder for packages too, after all that is installed: its files replace no library."""
    folder = str(Path.cwd())
    if not {"", folder} & set(sys.path):
        sys.path.append(folder)


def _from_file(file: Path) -> ModuleType:
    name = MODULE.format(file.stem)
    spec = importlib.util.spec_from_file_location(name, file.absolute())
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    folder = str(file.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
