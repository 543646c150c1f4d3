"""Copies of an author's code: the watched files of a folder, and one consistent copy of them for each version.

A group runs one copy, so an edit cannot act in its middle. Files are copied, not linked: an editor that writes in place
would change a hard link, too. Entries that are not code are links to the originals, and are named in `described`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentjet.errors import ConfigError
from agentjet.types import DEFAULT_RUN

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

    def stamp(self) -> Stamp:
        return self.listing().stamp

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
        lines = f"watched: {len(watched)} file{'s' * (len(watched) != 1)} of {self.root}{why}: {named(watched)}"
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
    """True if one of the folders is a virtual environment of Python."""
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
    """Writes the copy; returns its root."""
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
