"""The source of a command: the files its command line names, those of `--source`, and the reward's.

`CommandCode` runs each version from a copy of its own, so that an edit changes no episode that has begun and a version
can be gone back to; what is not watched is linked into the copy, so that imports find it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentjet.client.agent_source import AgentSource, AgentVersion, Stamp, file_stamps, hash_of
from agentjet.client.command import Command
from agentjet.errors import ConfigError

SKIPPED = frozenset({"__pycache__", "node_modules"})
"""Folders that are no source, beside those whose names begin with a dot."""


@dataclass(frozen=True)
class CommandSource:
    """A command line as it was given in folder `here`, and what else belongs to the agent. `{here}` in it becomes that
    folder."""

    arguments: tuple[str, ...]
    here: Path
    more: tuple[Path, ...] = ()
    """Files and folders given by `--source`, absolute."""

    def files(self) -> list[Path]:
        """The files that a version is made of, as they are now."""
        found = dict.fromkeys(itertools.chain(self._named(), *(_below(path) for path in self.more)))
        return list(found)

    def resolved(self, roots: Sequence[tuple[Path, Path]] = ()) -> list[str]:
        """The command line for another working directory: paths are absolute, those below the first of a pair of
        `roots` lead below its second."""
        return [self._resolved(word, index, roots) for index, word in enumerate(self.arguments)]

    def version(self, reward_version: str, roots: Sequence[tuple[Path, Path]] = ()) -> str:
        """The code version: a hash over the files, or what stands for them in `roots`, the program's name and the words
        that name nothing here, and that of the reward."""
        contents = {os.path.relpath(file, self.here): _moved(file, roots).read_bytes() for file in self.files()}
        program, *rest = self.arguments
        words = [
            Path(program).name,
            *(word for index, word in enumerate(rest, 1) if self._path_in(word, index) is None),
        ]
        return hash_of({**contents, "--": "\0".join(words).encode(), "--reward": reward_version.encode()})

    def _named(self) -> Iterator[Path]:
        for index, word in enumerate(self.arguments):
            path = self._path_in(word, index)
            # An interpreter given by its path, perhaps through a virtual environment's link, is no source.
            if path is not None and path.is_file() and (index or path.resolve().is_relative_to(self.here)):
                yield path

    def _path_in(self, word: str, index: int) -> Path | None:
        """The file or folder that a word names, also as `--option=path`; None when it names none."""
        name = word.partition("=")[2] if word.startswith("-") else word
        if not name or (index == 0 and os.sep not in name):  # the program is looked up in PATH
            return None
        path = Path(os.path.normpath(self.here / name))
        # A word alone may be anything: that there is a folder of that name means nothing.
        return path if _exists(path) and (os.sep in name or path.is_file()) else None

    def _resolved(self, word: str, index: int, roots: Sequence[tuple[Path, Path]]) -> str:
        path = self._path_in(word, index)
        if path is None:
            return word.replace("{here}", str(_moved(self.here, roots)))
        option, separator, _ = word.rpartition("=") if word.startswith("-") else ("", "", "")
        return f"{option}{separator}{_moved(path, roots)}"


@dataclass
class CommandCode(AgentSource):
    """A command that is run from copies of its files below `copies`. Its reward is loaded anew with them where it is a
    function, whose files `reward_code` knows."""

    source: CommandSource
    command: Command
    reward_code: AgentSource | None
    copies: Path
    num_copies: int = 0

    def stamp(self) -> Stamp:
        own = file_stamps(self.source.files())
        return own + self.reward_code.stamp() if self.reward_code is not None else own

    def load(self) -> AgentVersion:
        """Copy the files as they are now. Raises what is wrong with them, or with the reward's."""
        score = AgentVersion("", self.command.__wrapped__)
        if self.reward_code is not None:
            score = self.reward_code.load()
        roots = self._copied(self.source.files())
        version = self.source.version(score.code_version, roots)
        return AgentVersion(version, self.command.changed(self.source.resolved(roots), score.agent, version))

    def abandon(self) -> None:
        if self.reward_code is not None:
            self.reward_code.abandon()

    def _copied(self, files: Sequence[Path]) -> list[tuple[Path, Path]]:
        """Copy `files`; pairs of a folder and what stands for it now."""
        place = self.copies / str(self.num_copies)
        self.num_copies += 1
        place.mkdir()
        here = self.source.here
        outside = {file.parent for file in files if not file.is_relative_to(here)}
        tops = [here, *(folder for folder in outside if not any(folder.is_relative_to(o) for o in outside - {folder}))]
        roots = [(top, place / str(index)) for index, top in enumerate(tops)]
        for top, copy in roots:
            _mirror(top, copy, {file for file in files if file.is_relative_to(top)})
        return roots


def check_source(paths: Sequence[Path], here: Path) -> tuple[Path, ...]:
    """What `--source` names, absolute. Raises `ConfigError` for what is not there."""
    for path in paths:
        if not (here / path).exists():
            raise ConfigError(f"--source {path}: there is no such file or folder")
    return tuple(Path(os.path.normpath(here / path)) for path in paths)


def _mirror(original: Path, copy: Path, files: set[Path]) -> None:
    """A folder like `original` in which `files` are copies and everything else is a link to what it was."""
    copy.mkdir()
    folders = {parent for file in files for parent in file.parents}
    for entry in original.iterdir():
        if entry in files:
            shutil.copy2(entry, copy / entry.name)
        elif entry in folders:
            _mirror(entry, copy / entry.name, files)
        else:
            (copy / entry.name).symlink_to(entry)


def _moved(path: Path, roots: Sequence[tuple[Path, Path]]) -> Path:
    for original, copy in roots:
        if path.is_relative_to(original):
            return copy / path.relative_to(original)
    return path


def _below(path: Path) -> Iterator[Path]:
    """A file, or the files below a folder."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or with a null byte
        return False
