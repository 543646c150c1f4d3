"""Functions of the user, named on a command line or in a file: `FILE.py:FUNCTION` or `package.module:function`.

The source of an agent: which version of it an episode ran, and how to load it anew when it was edited.

A code version is a hash of the files the agent's author wrote: for a Python agent its module and those of the modules
beside it, in the same folder, that are imported; nothing installed, nothing in folders below. The script that is being
run can be hashed but not loaded anew: it would run again.

Where in an agent an exception came from: the file and line its author knows, not those of the libraries below.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

from agentjet.errors import ConfigError, InvalidRequest

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
        raise ConfigError(f"{option} {place}: {one_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option} {named}: there is no function {name!r} in {place}")
    return function  # type: ignore[no-any-return]


def one_line(error: BaseException) -> str:
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


Stamp = tuple[tuple[str, int, int], ...]
"""Path, time of change and size of each file: differs when one was written."""


@dataclass(frozen=True)
class AgentVersion:
    """An agent as its source was at one time."""

    code_version: str
    agent: Callable[..., Any]


class AgentSource(Protocol):
    """Where an agent comes from."""

    def stamp(self) -> Stamp:
        """Of the files as they are now; cheap."""

    def load(self) -> AgentVersion:
        """The agent as its files are now. Raises whatever is wrong with them."""

    def abandon(self) -> None:
        """Leave a `load` that goes on in another thread behind: it changes nothing any more."""


def file_stamps(files: Iterable[Path]) -> Stamp:
    """A file that is missing counts as one of size -1."""
    found = []
    for file in files:
        try:
            status = file.stat()
            found.append((str(file), status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((str(file), 0, -1))
    return tuple(sorted(found))


def hash_of(contents: Mapping[str, bytes]) -> str:
    """Twelve hexadecimal digits of the SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def code_version_of(agent: Callable[..., Any]) -> str:
    """The hash of the files of a Python agent; empty where it has none (typed in, compiled)."""
    own = getattr(agent, "code_version", None)  # a command's: it is no Python
    if isinstance(own, str):
        return own
    module = sys.modules.get(_function_of(agent).__module__)
    return _hash_of_files(_own_files(module)) if module is not None else ""


class ModuleSource:
    """The module of a Python agent, which is found again by its name at the top of that module.

    Raises `ConfigError` when `agent` has no such name. Source files are read, not their compiled caches, which cannot
    tell two edits within a second apart.
    """

    def __init__(self, agent: Callable[..., Any]) -> None:
        self._module = getattr(agent, "__module__", "")
        self._name = getattr(agent, "__qualname__", "")
        module = sys.modules.get(self._module)
        if self._module == "__main__":
            raise ConfigError(
                f"to reload an agent is to load its file anew, and {self._name!r} is in the script that is being run: "
                "move it to a file of its own beside the script and import it from there"
            )
        if module is None or not _file_of(module) or getattr(module, self._name, None) is not agent:
            raise ConfigError(
                f"an agent to be reloaded is found by its name at the top of a module, and {agent!r} is not there: "
                "give a function that is"
            )

        self._files = _own_files(module)
        """As they were imported when the present version was loaded."""
        self._importing: _Import | None = None
        self._turn = threading.Lock()
        """Held while an import begins, or ends, or is left behind."""

    def stamp(self) -> Stamp:
        return file_stamps(self._files.values())

    def load(self) -> AgentVersion:
        """Import the agent's module and those beside it anew; what is in use of the old ones stays as it is.

        On an error, or when it is abandoned, the old modules stay the imported ones.
        """
        files = _own_files(sys.modules[self._module])
        sources = {name: file.read_bytes() for name, file in files.items()}
        with self._turn:
            importing = self._importing = _Import(_InMemory(files, sources))
        try:
            module = importing.module(self._module)
            agent = getattr(module, self._name)
            if not callable(agent):
                raise TypeError(f"{self._name} of {files[self._module]} is no function any more")
        except BaseException:
            with self._turn:
                if self._importing is importing:
                    self._undo(importing)
            raise
        with self._turn:
            if self._importing is not importing:
                raise RuntimeError("nobody waited for this import any more")
            self._importing = None
            importing.end()
            self._files = _own_files(module)
        contents = {
            str(file): sources[name] if name in sources else file.read_bytes() for name, file in self._files.items()
        }
        return AgentVersion(hash_of(_relative(contents)), agent)

    def abandon(self) -> None:
        with self._turn:
            if self._importing is not None:
                self._undo(self._importing)

    def _undo(self, importing: _Import) -> None:
        self._importing = None
        importing.end()
        importing.undo()


class _Import:
    """Modules being imported in place of those of the same names, which are out of the way from the beginning on."""

    def __init__(self, finder: _InMemory) -> None:
        self._finder = finder
        self._old = {name: sys.modules.pop(name) for name in finder.files}
        _unbind(self._old)
        sys.meta_path.insert(0, finder)
        importlib.invalidate_caches()

    def module(self, name: str) -> ModuleType:
        """The module `name`. It is executed without Python's lock on that name, which an import that hangs holds for
        ever; what it imports is not.
        """
        package = name.rpartition(".")[0]
        if package:
            importlib.import_module(package)
        if name not in sys.modules:  # its package may have imported it
            spec = self._finder.find_spec(name, None)
            assert spec is not None and spec.loader is not None, "its source is at hand"
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _bind({name: module})
        return sys.modules[name]

    def end(self) -> None:
        """Let go. What was not imported anew stays what its package calls it, for whoever else uses it."""
        sys.meta_path.remove(self._finder)
        _bind({name: module for name, module in self._old.items() if name not in sys.modules})

    def undo(self) -> None:
        """Have the modules from before imported again."""
        sys.modules.update(self._old)
        _bind(self._old)


class _InMemory(importlib.abc.MetaPathFinder):
    """Finds the modules whose source it holds."""

    def __init__(self, files: Mapping[str, Path], sources: Mapping[str, bytes]) -> None:
        self.files = files
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._sources:
            return None
        file = self.files[fullname]
        loader = _SourceInMemory(fullname, str(file), self._sources[fullname])
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folders)


class _SourceInMemory(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._source, self.path)


def _unbind(modules: Mapping[str, ModuleType]) -> None:
    """Have their packages know them no longer: `from package import module` asks there before it imports."""
    for name, module in modules.items():
        package, _, child = name.rpartition(".")
        if getattr(sys.modules.get(package), child, None) is module:
            delattr(sys.modules[package], child)


def _bind(modules: Mapping[str, ModuleType]) -> None:
    """Make modules what their packages call them."""
    for name, module in modules.items():
        package, _, child = name.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], child, module)


def _function_of(agent: Callable[..., Any]) -> Any:
    while isinstance(agent, functools.partial):
        agent = agent.func
    agent = inspect.unwrap(agent)
    return agent if inspect.isroutine(agent) else type(agent)


def _own_files(module: ModuleType) -> dict[str, Path]:
    """The source files of a module and of those imported that lie beside it, by module name."""
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
    contents = {}
    for file in files.values():
        try:
            contents[str(file)] = file.read_bytes()
        except OSError:  # it was there when it was imported
            continue
    return hash_of(_relative(contents)) if contents else ""


def _relative(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same files have the same hash in whatever folder they lie."""
    return {Path(path).name: content for path, content in contents.items()}


OURS = Path(__file__).parents[1]
"""What lies there, a reward read from a program's output, say, is nobody's agent to mend."""


def error_location(agent: Callable[..., Any], error: BaseException) -> str:
    """`file:line in function`: the innermost line of the agent's own file that `error` passed through, or that of the
    agent's definition when what it returned is at fault; else empty.
    """
    own = _code_of(agent)
    if own is None or Path(own.co_filename).is_relative_to(OURS):
        return ""
    cause: BaseException | None = error
    while cause is not None:
        lines = [
            (frame.f_code.co_name, line)
            for frame, line in traceback.walk_tb(cause.__traceback__)
            if frame.f_code.co_filename == own.co_filename
        ]
        if lines:
            name, line = lines[-1]
            return f"{own.co_filename}:{line} in {name}"
        cause = cause.__cause__
    if isinstance(error, InvalidRequest) and error.code == "invalid_reward":
        return f"{own.co_filename}:{own.co_firstlineno} in {own.co_name}"
    return ""


def _code_of(agent: Callable[..., Any]) -> CodeType | None:
    while isinstance(agent, functools.partial):
        agent = agent.func
    agent = inspect.unwrap(agent)
    if not inspect.isroutine(agent):
        agent = getattr(type(agent), "__call__", agent)  # noqa: B004 - an object's own method, to be read
    code = getattr(agent, "__code__", None)
    return code if isinstance(code, CodeType) else None
