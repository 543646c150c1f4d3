"""The source of an agent: imports by name, code versions, reloads, and locations of errors.

A code version is a hash of the author's files: the agent's module, and imported modules in the same folder. Installed
packages and subfolders do not count. The running script has a version, but cannot be reloaded: it would run again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from agentjet.errors import ConfigError, InvalidRequest

MODULE = "agentjet_loaded_{}"
"""Module name of an imported file. The prefix avoids clashes with other modules."""
LONGEST_LINE = 300
"""Longest text of an exception in a message, in characters."""
OURS = Path(__file__).parents[1]
"""Code below this folder is not the agent's: an error there has no location that its author can fix."""


def load_function(named: str, *, option: str) -> Callable[..., Any]:
    """The function that `option` names: `FILE.py:FUNCTION` or `package.module:function`. Its file can import modules
    beside it. Raises `ConfigError`."""
    place, colon, name = named.rpartition(":")
    if not colon or not name or not place:
        raise ConfigError(f"{option} {named}: expected FILE.py:FUNCTION, or package.module:function")
    _search_current_folder()
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except OSError as error:
        is_this = error.filename in (None, str(Path(place).absolute()))
        raise ConfigError(f"{option} {place}: {(is_this and error.strerror) or one_line(error)}") from error
    except SystemExit as error:
        raise ConfigError(f"{option} {place}: importing it ends the program (SystemExit: {error.code})") from None
    except Exception as error:  # the boundary: the user's file may raise anything
        raise ConfigError(f"{option} {place}: {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option} {named}: there is no function {name!r} in {place}")
    return function  # type: ignore[no-any-return]


def one_line(error: BaseException) -> str:
    """An exception of the user's code in one line: its type, and the first line of its text."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    cut = first if len(first) <= LONGEST_LINE else f"{first[: LONGEST_LINE - 3]}..."
    return f"{type(error).__name__}: {cut}"


def source_of(named: str, *, option: str) -> Path:
    """The file of a named function. Imports only its packages. Raises `ConfigError`."""
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
        raise ConfigError(f"{option} {named}: {place!r} is part of Python itself: name a module of yours")
    return Path(spec.origin)


def _search_current_folder() -> None:
    """Search the current folder for packages, after the installed ones, so that its files replace no library."""
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


Stamp = tuple[tuple[str, int, int], ...]
"""Path, modification time and size of each file: changes when a file is written."""


@dataclass(frozen=True)
class AgentVersion:
    """An agent as its source was at one time."""

    code_version: str
    agent: Callable[..., Any]

    @classmethod
    def of(cls, agent: Callable[..., Any], code_version: str | None = None) -> AgentVersion:
        """The present version of `agent`. Without `code_version`, its name is a hash of the source."""
        return cls(code_version_of(agent) if code_version is None else code_version, agent)


class AgentSource(Protocol):
    """The source that an agent is loaded from."""

    def stamp(self) -> Stamp:
        """The present stamp of the files; cheap."""

    def load(self) -> AgentVersion:
        """The agent as its files are now. Raises any exception of the user's code."""


def file_stamps(files: Iterable[Path]) -> Stamp:
    """The stamp of `files`, without missing ones."""
    found = []
    for file in files:
        with suppress(OSError):
            status = file.stat()
            found.append((str(file), status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))


def hash_of(contents: Mapping[str, bytes]) -> str:
    """Twelve hexadecimal digits of the SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def code_version_of(agent: Callable[..., Any]) -> str:
    """The hash of a Python agent's files; empty if it has none (typed in, compiled)."""
    own = getattr(agent, "code_version", None)  # a command is not Python
    if isinstance(own, str):
        return own
    agent = _unwrapped(agent)
    module = sys.modules.get((agent if inspect.isroutine(agent) else type(agent)).__module__)
    return _hash_of_files(_own_files(module)) if module is not None else ""


class ModuleSource:
    """The module of a Python agent. A reload finds the agent by its name at the top of that module.

    Raises `ConfigError` if `agent` has no such name.
    """

    def __init__(self, agent: Callable[..., Any]) -> None:
        self._module = getattr(agent, "__module__", "")
        self._name = getattr(agent, "__qualname__", "")
        module = sys.modules.get(self._module)
        if self._module == "__main__":
            raise ConfigError(
                f"{self._name!r} is in the script that is being run, which cannot be reloaded: move it to another file "
                "beside the script and import it from there"
            )
        if module is None or not _file_of(module) or getattr(module, self._name, None) is not agent:
            raise ConfigError(f"{agent!r} cannot be reloaded: give a function that is defined at the top of a module")
        self._files = _own_files(module)

    def stamp(self) -> Stamp:
        return file_stamps(self._files.values())

    def load(self) -> AgentVersion:
        """Import the agent's module and those beside it again; after an error the old modules are restored.

        Objects of the old modules stay as they are.
        """
        files = _own_files(sys.modules[self._module])
        old = {name: sys.modules.pop(name) for name in files}
        for name, module in old.items():  # `from package import module` finds it there
            package, _, child = name.rpartition(".")
            if getattr(sys.modules.get(package), child, None) is module:
                delattr(sys.modules[package], child)
        for file in files.values():  # The compiled file does not notice two edits within one second.
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        importlib.invalidate_caches()
        try:
            new = importlib.import_module(self._module)
            agent = getattr(new, self._name)
            if not callable(agent):
                raise TypeError(f"{self._name} of {files[self._module]} is not a function any more")
        except BaseException:
            sys.modules.update(old)
            _bind(old)
            raise
        _bind({name: module for name, module in old.items() if name not in sys.modules})
        self._files = _own_files(new)
        return AgentVersion(_hash_of_files(self._files), agent)


def _bind(modules: Mapping[str, ModuleType]) -> None:
    for name, module in modules.items():
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], child, module)


def _unwrapped(agent: Callable[..., Any]) -> Callable[..., Any]:
    """The author's callable behind partials and decorators."""
    while isinstance(agent, functools.partial):
        agent = agent.func
    function: Callable[..., Any] = inspect.unwrap(agent)
    return function


def _own_files(module: ModuleType) -> dict[str, Path]:
    """The source files of a module and of the imported modules beside it, by module name."""
    own = _file_of(module)
    if own is None:
        return {}
    files = {module.__name__: own}
    if _is_installed(own.parent):
        return files
    for name, other in list(sys.modules.items()):
        file = _file_of(other)
        if name != "__main__" and file is not None and file.parent == own.parent and file != own:
            files.setdefault(name, file)
    return files


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) and file.endswith(".py") else None


def _is_installed(folder: Path) -> bool:
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return folder in library or not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)


def _hash_of_files(files: Mapping[str, Path]) -> str:
    """The hash of files by module name, independent of their folder; without those removed after their import."""
    contents = {file.name: file.read_bytes() for file in files.values() if file.is_file()}
    return hash_of(contents) if contents else ""


def error_location(agent: Callable[..., Any], error: BaseException) -> str:
    """`file:line in function`: the innermost line of the agent's file that `error` passed through.

    The line of the agent's definition if its return value is invalid; else empty.
    """
    function = _unwrapped(agent)
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None or Path(code.co_filename).is_relative_to(OURS):
        return ""
    cause: BaseException | None = error
    while cause is not None:
        frames = [f for f in traceback.extract_tb(cause.__traceback__) if f.filename == code.co_filename]
        if frames:
            return f"{code.co_filename}:{frames[-1].lineno} in {frames[-1].name}"
        cause = cause.__cause__
    is_invalid = isinstance(error, InvalidRequest) and error.code == "invalid_reward"
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if is_invalid else ""
