"""The source of an agent: imports by name, code versions, copies, reloads, and locations of errors.

A code version is a hash of the author's files: the agent's module, and the imported modules of its folder and the
folders below. Installed packages do not count. The running script has a version, but cannot be reloaded: it would run
again.

With reload, a version is one consistent copy of the folder, data files included, so an edit cannot act in the middle of
a group. Files are copied, not linked: an editor that writes in place would change a hard link, too. Entries that are
not code are links to the originals, and are named in `described`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Protocol

from agentjet.errors import ConfigError, InvalidRequest, counted, did_you_mean
from agentjet.types import DEFAULT_RUN, Task, beginning

MAX_FILES = 4000
MAX_BYTES = 32 * 2**20
MAX_FILE_BYTES = 4 * 2**20
MAX_ENTRIES = 1000
"""Entries of one folder. A folder with more holds data, not code."""
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "wandb", "mlruns"})
"""Folders without source files of the author, beside those whose names begin with a dot."""
RECORDS = (
    *(".log", ".out", ".pid", ".lock", ".tmp", ".pyc", ".sqlite", ".sqlite3", ".db", "-wal", "-shm", "-journal"),
    *(".npy", ".npz", ".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".onnx", ".parquet", ".arrow", ".zip", ".gz"),
    *(".png", ".jpg", ".jpeg", ".gif", ".pdf", ".mp4", ".tar", ".whl", ".so", ".a", ".dylib", ".exe", ".o"),
)
"""Endings of files that programs write, or that are too large for code."""
RESTLESS = 20
"""Changes during one load, after which a file counts as a record that a program writes."""
PAUSE_SECONDS = 0.05
"""Pause between two looks at changing files. A file system's clock ticks more often."""
NUM_CHECKED = 100
"""Tasks, and values of each, that are checked for objects of reloaded classes."""
NUM_NAMED = 8
"""Names in one line of a message."""
OURS = Path(__file__).parents[1]
"""AgentJet's own code is not the author's."""

Stamp = tuple[tuple[str, int, int], ...]
"""Path, time of the last change and size of each file: differs after a write, also of a file whose times are set."""


@dataclass(frozen=True)
class Listing:
    """The entries of a folder at one time. Paths are absolute."""

    files: Mapping[Path, tuple[int, int]]
    """The watched files, each with the time of its last change in ns and its size."""
    folders: frozenset[Path]
    """The folders of these files, with the root."""
    linked: Mapping[Path, str]
    """Entries that are not watched, with the reason."""

    @property
    def stamp(self) -> Stamp:
        return tuple(sorted((str(path), *values) for path, values in self.files.items()))


@dataclass(eq=False)
class CodeFolder:
    """A folder whose files are watched, or some of its files: those in `only`."""

    root: Path
    only: frozenset[Path] | None = None
    why: str = ""
    """The reason for watching it, for the display: "the folder of agent.py"."""
    unwatched: dict[Path, str] = field(default_factory=dict)
    """Files that are not watched, with the reason: the running script, and files that change all the time."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], int] = time.time_ns
    """The clock of the file system."""

    def listing(self) -> Listing:
        """The present entries. Raises `ConfigError` for a folder that is too large to be copied."""
        if self.only is not None:
            return Listing(dict(_stamps(self.only - self.unwatched.keys())), frozenset({self.root}), {})
        walk = _Walk(self.root, self.unwatched, _output_files())
        walk.enter(self.root)
        return Listing(walk.files, frozenset(walk.folders), walk.linked)

    def copy(self, place: Path) -> tuple[Path, Listing]:
        """Copies the watched files below the new folder `place`; returns the copy of the root, and its entries.

        The copy is one state: files that change while they are copied are copied again. The entries beside the root are
        links, so that a path such as `../tasks` leads to the same files.
        """
        changes: Counter[Path] = Counter()
        before = self.listing()
        while True:
            listing = self.listing()
            with suppress(FileNotFoundError):
                root = _write(listing, self.root, place)
                # A second write within one tick of the clock leaves the stamp as it is: young files are copied again.
                if self.listing().stamp == listing.stamp and not _is_young(listing, self.now()):
                    return root, listing
            changes.update({path for path, _ in before.files.items() ^ listing.files.items()})
            restless = [path for path, count in changes.items() if count >= RESTLESS]
            self.unwatched |= dict.fromkeys(restless, f"changed {RESTLESS} times during one load")
            before = listing
            shutil.rmtree(place, ignore_errors=True)
            self.sleep(PAUSE_SECONDS)

    def described(self) -> str:
        """The sentence about watched files, and about those that are not."""
        listing = self.listing()
        watched = [os.path.relpath(path, self.root) for path in sorted(listing.files)]
        why = f", {self.why}" if self.why else ""
        lines = f"watched: {counted(len(watched), 'file')} of {self.root}{why}: {named(watched)}"
        linked = [
            f"{os.path.relpath(path, self.root)}{f' ({why})' if why else ''}"
            for path, why in sorted(listing.linked.items())
        ]
        return f"{lines}\nnot watched and not copied: {named(linked)}" if linked else lines


def named(names: list[str], num: int = NUM_NAMED) -> str:
    """The first `num` of the names, and the number of the others."""
    rest = len(names) - num
    return ", ".join(names[:num]) + (f" and {rest} more" if rest > 0 else "")


def content_hash(path: Path) -> str:
    """The hash of a file's content; empty if it cannot be read."""
    try:
        return hash_of({"": path.read_bytes()})
    except OSError:
        return ""


def edits(before: Mapping[Path, str], after: Mapping[Path, str]) -> str:
    """The files whose content differs, for a message; empty without any. The hashes of contents are by path."""
    kinds = {
        path: "is new" if path not in before else "changed" if path in after else "was removed"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
    try:
        here = Path.cwd()
    except OSError:  # The folder was removed: all paths are shown as they are.
        here = Path()
    return named(
        [f"{path.relative_to(here) if path.is_relative_to(here) else path} {kind}" for path, kind in kinds.items()]
    )


def hash_of(contents: Mapping[str, bytes]) -> str:
    """Twelve hexadecimal digits of the SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def is_installed(path: Path) -> bool:
    """True for a file of an environment, of the system or of AgentJet: its author is somebody else."""
    system = {
        Path(name) for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt", "/dev", "/proc", "/sys")
    }
    roots = system | {Path(sys.prefix), Path(sys.base_prefix), OURS}
    above = {path, *path.parents}
    return bool(roots & above) or any(part in SKIPPED for part in path.parts) or has_environment(above)


def has_environment(folders: Iterable[Path]) -> bool:
    return any((folder / "pyvenv.cfg").is_file() for folder in folders)


@dataclass
class _Walk:
    root: Path
    unwatched: Mapping[Path, str]
    output: frozenset[tuple[int, int]]
    """Device and inode of this process's own output."""
    files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    linked: dict[Path, str] = field(default_factory=dict)
    sizes: Counter[str] = field(default_factory=Counter)
    """Number of bytes by entry of the root."""

    def enter(self, folder: Path) -> None:
        self.folders.add(folder)
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = Path(entry.path)
            if entry.name == "__pycache__" or _is_of_an_editor(entry.name):
                continue
            try:
                why = self._reason(entry, path)
                if why is not None:
                    self.linked[path] = why
                elif entry.is_dir():
                    self.enter(path)
                else:
                    self._add(path, entry.stat())
            except FileNotFoundError:  # removed at this moment, or a link that leads nowhere
                continue

    def _reason(self, entry: os.DirEntry[str], path: Path) -> str | None:
        """The reason for a link instead of a copy; None for code."""
        if path in self.unwatched:
            return self.unwatched[path]
        if entry.is_dir():
            return self._reason_of_folder(entry, path)
        status = entry.stat()
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if entry.name.endswith(RECORDS) or (status.st_dev, status.st_ino) in self.output:
            return ""
        return "large" if status.st_size > MAX_FILE_BYTES else None

    def _reason_of_folder(self, entry: os.DirEntry[str], path: Path) -> str | None:
        if entry.is_symlink():
            return "a link to a folder"
        if entry.name in SKIPPED or entry.name.startswith(".") or path == OURS or has_environment([path]):
            return ""
        if (path / "runs" / DEFAULT_RUN).is_dir():
            return "a server's data dir"
        with os.scandir(path) as found:
            return f"more than {MAX_ENTRIES} entries" if sum(1 for _ in found) > MAX_ENTRIES else None

    def _add(self, path: Path, status: os.stat_result) -> None:
        self.files[path] = (status.st_ctime_ns, status.st_size)
        self.sizes[path.relative_to(self.root).parts[0]] += status.st_size
        if len(self.files) > MAX_FILES or self.sizes.total() > MAX_BYTES:
            largest = named([f"{name} ({size / 2**20:.1f} MB)" for name, size in self.sizes.most_common(3)])
            raise ConfigError(
                f"{self.root} has more than {MAX_FILES} files or {MAX_BYTES // 2**20} MB, too much for a copy with "
                f"each edit; the largest so far: {largest}. Give the agent a folder without its data, or begin the "
                "names of folders with data with a dot: these are not copied"
            )


def _is_of_an_editor(name: str) -> bool:
    """True for a file that an editor keeps beside the one that it edits."""
    return (
        name.endswith(("~", ".swp", ".swo", ".swx", ".orig", ".rej")) or name.startswith((".#", "#")) or name == "4913"
    )


def _output_files() -> frozenset[tuple[int, int]]:
    found = set()
    for descriptor in (1, 2):
        with suppress(OSError):
            status = os.fstat(descriptor)
            found.add((status.st_dev, status.st_ino))
    return frozenset(found)


def _stamps(files: Iterable[Path]) -> Iterator[tuple[Path, tuple[int, int]]]:
    for path in sorted(files):
        with suppress(OSError):
            status = path.stat()
            yield path, (status.st_ctime_ns, status.st_size)


def _is_young(listing: Listing, now: int) -> bool:
    newest = max((changed for changed, _ in listing.files.values()), default=0)
    return 0 <= now - newest < PAUSE_SECONDS * 1e9


def _write(listing: Listing, root: Path, place: Path) -> Path:
    place.mkdir(parents=True)
    copy = place / root.name
    for folder in sorted(listing.folders):
        (copy / folder.relative_to(root)).mkdir()
    for path in listing.files:
        shutil.copy2(path, copy / path.relative_to(root))
    for path in listing.linked:
        (copy / path.relative_to(root)).symlink_to(path)
    with os.scandir(root.parent) as found:
        beside = [entry.name for entry in found if entry.name != root.name]
    for name in beside if len(beside) <= MAX_ENTRIES else []:
        (place / name).symlink_to(root.parent / name)
    return copy


MODULE = "agentjet_loaded_{}"
"""Module name of an imported file. The prefix avoids clashes with other modules."""
LONGEST_LINE = 300
"""Longest text of an exception in a message, in characters."""


def file_and_function(named: str) -> tuple[str, str]:
    """The file or module, and the function; the whole name and "" without a colon."""
    place, colon, function = named.rpartition(":")
    return (place, function) if colon else (named, "")


def load_function(named: str, *, option: str) -> Callable[..., Any]:
    """The function that `option` names: `FILE.py:FUNCTION` or `package.module:function`. Its file can import modules
    beside it. Raises `ConfigError`."""
    place, name = file_and_function(named)
    if not name or not place:
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
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        way_out = did_you_mean(name, functions, f"it has {', '.join(functions) or 'none'}")
        raise ConfigError(f"{option} {named}: there is no function {name!r} in {place}; {way_out}")
    return function  # type: ignore[no-any-return]


def one_line(error: BaseException) -> str:
    """An exception of the user's code in one line: its type, and the first line of its text."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {beginning(first, LONGEST_LINE)}"


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
    except (Exception, SystemExit) as error:  # the boundary: its packages are imported, and may raise anything
        raise ConfigError(f"{option} {place}: {one_line(error)}") from error
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


@dataclass(frozen=True)
class AgentVersion:
    """An agent as its source was at one time."""

    code_version: str
    agent: Callable[..., Any]
    stamp: Stamp = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    """The hashes of the contents of the watched files."""
    activate: Callable[[], None] = lambda: None
    """Makes later imports of the agent find the modules of this version."""

    @classmethod
    def of(cls, agent: Callable[..., Any], code_version: str | None = None) -> AgentVersion:
        """The present version of `agent`. Without `code_version`, its name is a hash of the source."""
        return cls(code_version_of(agent) if code_version is None else code_version, agent)


class AgentSource(Protocol):
    """The source that an agent is loaded from."""

    def stamp(self) -> Stamp:
        """The present stamp of the files; cheap."""

    def load(self) -> AgentVersion:
        """The agent as its files are now, with their stamp. Raises any exception of the user's code."""

    def described(self) -> str:
        """The watched files, for the display."""


def code_version_of(agent: Callable[..., Any]) -> str:
    """The hash of a Python agent's files; empty if it has none (typed in, compiled)."""
    own = getattr(agent, "code_version", None)  # a command is not Python
    if isinstance(own, str):
        return own
    agent = _unwrapped(agent)
    module = sys.modules.get((agent if inspect.isroutine(agent) else type(agent)).__module__)
    files = _own_files(module) if module is not None else {}
    contents = {name: file.read_bytes() for name, file in files.items() if file.is_file()}  # else removed since
    return hash_of(contents) if contents else ""


class ModuleSource:
    """The module of a Python agent. A reload finds the agent by its name at the top of that module.

    Each version runs from a copy of the agent's folder; of the whole package, if the module is in one. So a module that
    is imported inside a function, or a data file beside `__file__`, is that of the version. Close it after the run: the
    modules from before are then found again. Raises `ConfigError` if `agent` has no such name.
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
        file = _file_of(module) if module is not None else None
        if file is None or getattr(module, self._name, None) is not agent:
            raise ConfigError(f"{agent!r} cannot be reloaded: give a function that is defined at the top of a module")
        self._file = file.absolute()
        root = _package_folder(self._module, self._file)
        kind = "folder" if root == self._file.parent and self._file.name != "__init__.py" else "package"
        why = f"the {kind} of {self._file.relative_to(root)}"
        self._folder = CodeFolder(root, frozenset({self._file}) if _is_library(root) else None, why)
        self.described = self._folder.described
        if script := _file_of(sys.modules["__main__"]):
            self._folder.unwatched[script.absolute()] = "the running script: start it again after an edit"
        self._copies = Path(tempfile.mkdtemp(prefix="agentjet-code-"))
        self._remove_copies = weakref.finalize(self, shutil.rmtree, self._copies, ignore_errors=True)
        self._num_copies = 0
        self._lock = threading.Lock()
        self._loading: Path | None = None
        """The copy that is being loaded. None after the end of the run, and once another version is used."""
        self._first = self._active = _Modules(None, self._own_modules(self._folder.listing(), root))

    def stamp(self) -> Stamp:
        return self._folder.listing().stamp

    def load(self) -> AgentVersion:
        """Copies the files and imports the agent's module from the copy, with those that it imports.

        After an error the modules from before are restored. Objects of the old modules stay as they are. A load that
        lasts longer than its caller waits, who uses another version then, exchanges no module any more.
        """
        before, place = self._active, self._copies / str(self._num_copies)
        self._num_copies += 1
        self._loading = place
        copy, listing = self._folder.copy(place)
        loaded = _Modules(_CopyFinder(self._module, self._file, self._folder.root, copy), {}, listing)
        if not self._exchange(loaded, place):
            raise RuntimeError("the run of this source has ended, or uses another version")
        try:
            agent = getattr(importlib.import_module(self._module), self._name)
            if not callable(agent):
                raise TypeError(f"{self._name} of {self._file} is not a function any more")
        except BaseException:
            self._exchange(before, place)
            raise
        contents = {path: (copy / path.relative_to(self._folder.root)).read_bytes() for path in listing.files}
        version = hash_of({str(path.relative_to(self._folder.root)): content for path, content in contents.items()})
        files = {path: hash_of({"": content}) for path, content in contents.items()}
        return AgentVersion(version, agent, listing.stamp, files, functools.partial(self._use, loaded))

    def mismatch(self, tasks: Iterable[Task]) -> str:
        """Returns a sentence if tasks have objects of classes that a load defines again, else ''. Looks at the first
        tasks, and at their first values."""
        some = itertools.islice(tasks, NUM_CHECKED)
        kinds = {type(value) for task in some for value in itertools.islice(_values(task.payload), NUM_CHECKED)}
        own = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__ in self._first.imported]
        if not own:
            return ""
        return (
            f"the tasks have objects of {named(sorted(own))}, and reload = True imports these modules again, from a "
            "copy: these objects are not instances of the agent's classes, and mostly not equal to its values. Give "
            f"the tasks plain values, such as text, or define these classes outside of {self._folder.root}"
        )

    def close(self) -> None:
        """Restore the modules from before the first load, and remove the copies."""
        self._use(self._first)
        self._remove_copies()

    def _use(self, modules: _Modules) -> None:
        """Make later imports find these modules. A load that is under way has no effect then."""
        with self._lock:
            self._loading = None
            self._activate(modules)

    def _exchange(self, modules: _Modules, loading: Path) -> bool:
        """The same within a load; returns False if that has no effect any more."""
        with self._lock:
            if is_wanted := self._loading == loading:
                self._activate(modules)
            return is_wanted

    def _activate(self, modules: _Modules) -> None:
        """Exchange the imported modules of the folder, and the place where later imports look for them."""
        self._active.imported = {}
        for root, listing in self._known():
            self._active.imported |= self._own_modules(listing, root)
        for name in self._active.imported:
            sys.modules.pop(name, None)
        if self._active.finder is not None:
            sys.meta_path.remove(self._active.finder)
        sys.modules.update(modules.imported)
        if modules.finder is not None:
            sys.meta_path.insert(0, modules.finder)
        importlib.invalidate_caches()
        self._active = modules

    def _known(self) -> list[tuple[Path, Listing]]:
        """The folders whose modules belong to the present version: its copy and the original."""
        listing = self._active.listing or self._folder.listing()
        roots = [self._folder.root] + ([self._active.finder.copy] if self._active.finder is not None else [])
        return [(root, listing) for root in roots]

    def _own_modules(self, listing: Listing, root: Path) -> dict[str, ModuleType]:
        """The imported modules of a folder, or of its copy at `root`, by name."""
        moved = {root / path.relative_to(self._folder.root) for path in {*listing.files, *listing.folders}}
        found = {}
        for name, module in list(sys.modules.items()):
            if name == "__main__" or name.partition(".")[0] == "agentjet":
                continue
            file, portions = _file_of(module), getattr(module, "__path__", None)
            places = [file] if file is not None else [Path(place) for place in portions or ()]
            if any(_absolute(place) in moved for place in places):
                found[name] = module
        return found


def _values(payload: Any) -> Iterator[Any]:
    """A payload and the values inside it, those of outer levels first."""
    values = [payload]
    for value in values:  # The list grows.
        yield value
        inner = value if type(value) in (dict, list, tuple, set, frozenset) else getattr(value, "__dict__", {})
        values += itertools.islice(inner.values() if hasattr(inner, "values") else inner, NUM_CHECKED)


def _absolute(place: Path) -> Path:
    """The absolute path of a place; `place` if the working directory, to which it is relative, is gone."""
    try:
        return place.absolute()
    except FileNotFoundError:
        return place


@dataclass(eq=False)
class _Modules:
    """The imported modules of one version, and the finder of others."""

    finder: _CopyFinder | None
    imported: dict[str, ModuleType]
    listing: Listing | None = None


class _CopyFinder(MetaPathFinder):
    """Finds the modules of a folder in its copy. Code names the originals in tracebacks."""

    def __init__(self, module: str, file: Path, root: Path, copy: Path) -> None:
        """`module` is the agent's, of `file`: it is found also if no path leads to it."""
        self._module, self._file, self._root, self.copy = module, file, root, copy
        self._package = module.partition(".")[0] if "." in module or file.name == "__init__.py" else ""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in ("agentjet", *sys.builtin_module_names):
            return None
        if path is None and name == self._package:
            spec = PathFinder.find_spec(name, [str(self.copy.parent)])
        else:
            spec = PathFinder.find_spec(name, [self._moved(place) for place in (sys.path if path is None else path)])
        if name == self._module and (spec is None or not self._is_copy(spec)):
            spec = importlib.util.spec_from_file_location(name, self._moved(str(self._file)))
        if spec is None or not self._is_copy(spec):
            return None
        if spec.origin is not None and isinstance(spec.loader, SourceFileLoader):
            original = self._root / Path(spec.origin).relative_to(self.copy)
            spec.loader = _CopyLoader(name, spec.origin, original)
        elif spec.submodule_search_locations is not None:  # A namespace package would search `sys.path` again.
            spec.submodule_search_locations = list(spec.submodule_search_locations)
        return spec

    def _moved(self, place: str) -> str:
        path = _absolute(Path(place or "."))
        moved = self.copy / path.relative_to(self._root) if path.is_relative_to(self._root) else path
        return str(moved) if moved.exists() else place

    def _is_copy(self, spec: ModuleSpec) -> bool:
        places = [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations or []
        return any(Path(place).is_relative_to(self.copy) for place in places)


class _CopyLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, original: Path) -> None:
        super().__init__(name, path)
        self._original = original

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the source, without a cache: that does not notice two edits within one second."""
        return compile(self.get_data(self.path), str(self._original), "exec", dont_inherit=True)


def _package_folder(module: str, file: Path) -> Path:
    """The folder of the top package that `file` is in; the file's own folder without a package."""
    parts = module.split(".")
    depth = len(parts) - (file.name != "__init__.py")
    return file.parents[max(depth - 1, 0)] if len(parts) > 1 or file.name == "__init__.py" else file.parent


def _unwrapped(agent: Callable[..., Any]) -> Callable[..., Any]:
    """The author's callable behind partials and decorators."""
    while isinstance(agent, functools.partial):
        agent = agent.func
    function: Callable[..., Any] = inspect.unwrap(agent)
    return function


def _own_files(module: ModuleType) -> dict[str, Path]:
    """The source files of a module and of the imported modules of its folder and those below, by their place there."""
    own = _file_of(module)
    if own is None:
        return {}
    folder = own.parent
    files = {own.name: own}
    if _is_library(folder):
        return files
    for name, other in list(sys.modules.items()):
        file = _file_of(other)
        if name == "__main__" or file is None or not file.is_relative_to(folder):
            continue
        if file.parent == folder or not is_installed(file):
            files.setdefault(str(file.relative_to(folder)), file)
    return files


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) and file.endswith(".py") else None


def _is_library(folder: Path) -> bool:
    """True for a folder of Python's or of installed packages. Its files do not belong to the agent beside them."""
    library = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    return folder in library or not {"site-packages", "dist-packages"}.isdisjoint(folder.parts)


def error_location(agent: Callable[..., Any], error: BaseException) -> str:
    """`file:line in function`: the innermost line of the author's source that `error` passed through.

    That source is the agent's file, the files beside it, and other files that are not installed. The line of the
    agent's definition if its return value is invalid; else empty.
    """
    function = _unwrapped(agent)
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    own = Path(code.co_filename) if code is not None and not Path(code.co_filename).is_relative_to(OURS) else None
    cause: BaseException | None = error
    while cause is not None:
        lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
        found = [(inner, line) for inner, line in lines if _is_authors(Path(inner.co_filename), own)]
        if found:
            inner, line = found[-1]
            return f"{inner.co_filename}:{line} in {inner.co_name}"
        cause = cause.__cause__
    is_invalid = isinstance(error, InvalidRequest) and error.code == "invalid_reward"
    if code is None or own is None or not is_invalid:
        return ""
    return f"{own}:{code.co_firstlineno} in {code.co_name}"


def _is_authors(file: Path, agent: Path | None) -> bool:
    """True for a file of the author; `agent` is that of the agent. Generated code has no file."""
    if agent is not None and (file == agent or (file.parent == agent.parent and not _is_library(file.parent))):
        return True
    return file.is_absolute() and not is_installed(file)
