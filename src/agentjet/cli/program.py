"""The program of `agentjet run`: the files of its command line, its code versions, and its reward.

A reward that cannot be read aborts the episode: it is not 0.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentjet.client.agent_source import (
    OURS,
    SKIPPED,
    AgentSource,
    AgentVersion,
    CodeFolder,
    Stamp,
    has_environment,
    hash_of,
    is_installed,
    load_function,
)
from agentjet.client.command import Command, Result, Score
from agentjet.errors import ConfigError
from agentjet.types import Reward

SCRIPTS = frozenset(
    {
        ".py",
        ".js",
        ".mjs",
        ".cjs",
        ".ts",
        ".tsx",
        ".sh",
        ".bash",
        ".rb",
        ".pl",
        ".php",
        ".lua",
        ".r",
        ".R",
        ".jl",
        ".go",
    }
)
"""Endings of files that a program begins with: their folders have its other files."""
VARIABLE = re.compile(r"[A-Za-z_]\w*=")
PYTHON_PATH = "PYTHONPATH"
NAMED = "named by the command, --source or PYTHONPATH"
"""The reason for watching a folder or file."""
REWARD_FORMS = "FILE.py:FUNCTION, stdout, exit-code or file:NAME"
MAX_REWARD_BYTES = 2**20
"""Longest file of a reward."""
EXIT_CODE = "exit-code"
"""The reward that also scores exit codes from 1 to 124."""


@dataclass(frozen=True)
class CommandLine:
    """A command line as given in the folder `here`. `{here}` in it becomes that folder."""

    arguments: tuple[str, ...]
    here: Path
    more: tuple[Path, ...] = ()
    """Files and folders of `--source`, absolute."""

    def files(self) -> list[Path]:
        """The present files of the program: those in the command line and those of `--source`."""
        named = [path for path in self._paths() if path.is_file()]
        return list(dict.fromkeys(itertools.chain(named, *(_below(path) for path in self.more))))

    def watched(self) -> list[CodeFolder]:
        """The folders that the program runs from: `here`, if a word or `--source` leads there; those of scripts
        elsewhere, and of PYTHONPATH. Another file elsewhere is watched alone."""
        is_here = any("{here}" in word for word in self.arguments)
        folders: dict[Path, CodeFolder] = {}
        data: set[Path] = set()
        for path in [*self._paths(), *self.more, *_python_path(os.environ.get(PYTHON_PATH, ""))]:
            if path.is_relative_to(self.here):
                is_here = True
            elif path.is_dir():
                folders[path] = CodeFolder(path, why=NAMED)
            elif path.suffix in SCRIPTS or os.access(path, os.X_OK):
                folders[path.parent] = CodeFolder(path.parent, why=f"the folder of {path.name}")
            else:
                data.add(path)
        if is_here:
            folders[self.here] = CodeFolder(self.here, why="the present folder")
        outer = [root for root in folders if not any(above in folders for above in root.parents)]
        alone: dict[Path, set[Path]] = {}
        for path in data:
            if not any(above in folders for above in path.parents):
                alone.setdefault(path.parent, set()).add(path)
        own = [CodeFolder(root, frozenset(files), NAMED) for root, files in sorted(alone.items())]
        return [folders[root] for root in sorted(outer)] + own

    def moved(self, copies: Mapping[Path, Path]) -> list[str]:
        """The command line for any working directory: paths are absolute. `copies` has folders by their originals."""
        here = copies.get(self.here, self.here)
        moved = [self._moved_word(word, index, copies) for index, word in enumerate(self.arguments)]
        return [word.replace("{here}", str(here)) for word in moved]

    def version(self, reward_version: str, contents: Mapping[str, bytes] | None = None) -> str:
        """The code version, a hash of the program's name, the words that are not files, the reward's version, and the
        contents of the files: those of `files` by default."""
        if contents is None:
            contents = {os.path.relpath(file, self.here): file.read_bytes() for file in self.files()}
        program, *rest = self.arguments
        words = [word for index, word in enumerate(rest, 1) if not self._paths_in(word, index)]
        facts = {"--": "\0".join([Path(program).name, *words]).encode(), "--reward": reward_version.encode()}
        return hash_of({**contents, **facts})

    def _paths(self) -> list[Path]:
        """The files and folders in the words that the author may have written."""
        return [
            path
            for index, word in enumerate(self.arguments)
            for path, _ in self._paths_in(word, index)
            if self._is_own(path, is_first=index == 0)
        ]

    def _is_own(self, path: Path, *, is_first: bool) -> bool:
        """False for an interpreter, also one that is given by a link or by its place in a virtual environment."""
        target, is_here = path.resolve(), path.is_relative_to(self.here)
        if is_first and path.suffix not in SCRIPTS and not target.is_relative_to(self.here.resolve()):
            return False
        if is_here and has_environment(folder for folder in path.parents if folder.is_relative_to(self.here)):
            return False
        return is_here or not is_installed(path)

    def _paths_in(self, word: str, index: int) -> list[tuple[Path, str]]:
        """The files and folders in a word, with the text that names each. Also in `--option=path` and `NAME=path:path`,
        as `env` sets variables."""
        is_option, is_variable = word.startswith("-"), VARIABLE.match(word)
        value = word.partition("=")[2] if is_option or is_variable else word
        names = value.split(os.pathsep) if is_variable else [value]
        return [(path, name) for name in names if (path := self._path(name, is_first=index == 0)) is not None]

    def _path(self, name: str, *, is_first: bool) -> Path | None:
        if not name or (is_first and os.sep not in name):  # the program is found through PATH
            return None
        path = Path(os.path.normpath(self.here / name))
        try:
            # A single word can have any meaning: it is not a path only because a folder has the same name.
            return path if path.exists() and (os.sep in name or path.is_file()) else None
        except (OSError, ValueError):  # too long for a name, or with a null byte
            return None

    def _moved_word(self, word: str, index: int, copies: Mapping[Path, Path]) -> str:
        found = self._paths_in(word, index)
        if not found:
            return word
        option, separator, value = word.rpartition("=") if "=" in word and found[0][1] != word else ("", "", word)
        texts = {text: str(moved_path(path, copies)) for path, text in found}
        names = value.split(os.pathsep) if VARIABLE.match(word) else [value]
        return f"{option}{separator}{os.pathsep.join(texts.get(name, name) for name in names)}"


def moved_path(path: Path, copies: Mapping[Path, Path]) -> Path:
    """The path in the copy of a folder that it is in; else the path itself."""
    for original, copy in copies.items():
        if path.is_relative_to(original):
            moved = copy / path.relative_to(original)
            return moved if os.path.lexists(moved) else path
    return path


@dataclass
class CommandSource:
    """The `AgentSource` of a command. Each version runs from a copy of the program's folders below `copies`.

    So an edit does not change an episode that has begun, and an older version can be used again. A reward function is
    loaded again with each version.
    """

    line: CommandLine
    command: Command
    reward_source: AgentSource | None
    copies: Path
    num_copies: int = 0

    def __post_init__(self) -> None:
        self._folders = self.line.watched()
        if not self._folders:
            raise ConfigError(
                "--watch: the command line names no file or folder of yours, so there is nothing to watch: name the "
                "program's folder with --source"
            )

    def stamp(self) -> Stamp:
        stamps = [folder.listing().stamp for folder in self._folders]
        return (*itertools.chain(*stamps), *(self.reward_source.stamp() if self.reward_source is not None else ()))

    def described(self) -> str:
        return "\n".join(folder.described() for folder in self._folders)

    def load(self) -> AgentVersion:
        """Copies the present files. Raises the errors of the files, or of the reward's."""
        score = AgentVersion("", self.command.score)
        if self.reward_source is not None:
            score = self.reward_source.load()
        place = self.copies / str(self.num_copies)
        self.num_copies += 1
        copied: dict[Path, Path] = {}
        contents: dict[str, bytes] = {}
        files = dict(score.files)
        stamps: list[Stamp] = []
        for number, folder in enumerate(self._folders):
            copied[folder.root], listing = folder.copy(place / str(number))
            names = [path.relative_to(folder.root) for path in listing.files]
            stamps.append(listing.stamp)
            read = {name: (copied[folder.root] / name).read_bytes() for name in names}
            contents |= {f"{number}/{name}": content for name, content in read.items()}
            files |= {folder.root / name: hash_of({"": content}) for name, content in read.items()}
        version = self.line.version(score.code_version, contents)
        command = replace(
            self.command,
            arguments=self.line.moved(copied),
            score=score.agent,
            code_version=version,
            variables=_moved_python_path(copied),
            copies={str(copy): str(original) for original, copy in copied.items()},
        )
        return AgentVersion(version, command, (*itertools.chain(*stamps), *score.stamp), files, score.activate)


def _python_path(value: str) -> list[Path]:
    """The folders of the author in a PYTHONPATH."""
    paths = [Path(name) for name in value.split(os.pathsep) if os.path.isabs(name)]
    return [path for path in paths if path.is_dir() and not is_installed(path) and not OURS.is_relative_to(path)]


def _moved_python_path(copies: Mapping[Path, Path]) -> dict[str, str]:
    value = os.environ.get(PYTHON_PATH, "")
    own = {str(path): str(moved_path(path, copies)) for path in _python_path(value)}
    return {PYTHON_PATH: os.pathsep.join(own.get(name, name) for name in value.split(os.pathsep))} if own else {}


def check_source(paths: Sequence[Path], here: Path) -> tuple[Path, ...]:
    """The paths of `--source`, absolute. Raises `ConfigError` for a missing one."""
    for path in paths:
        if not (here / path).exists():
            raise ConfigError(f"--source {path}: no such file or folder")
    return tuple(Path(os.path.normpath(here / path)) for path in paths)


def _below(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


class NoReward(Exception):
    """The program ended well, but its output or file has no valid reward."""


def reward_source(text: str) -> tuple[Score, bool]:
    """The function that computes the reward of a `--reward` option, and whether its author wrote it. Raises
    `ConfigError`."""
    if text == "stdout":
        return lambda task, result: from_stdout(result), False
    if text == EXIT_CODE:
        return lambda task, result: float(result.exit_code == 0), False
    kind, separator, name = text.rpartition(":")
    if kind == "file" and name:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"--reward {text}: the file must lie in the command's working directory")
        return lambda task, result: from_file(result.folder, name), False
    if separator and kind.endswith(".py"):
        return load_function(text, option="--reward"), True
    raise ConfigError(f"--reward {text}: expected {REWARD_FORMS}")


def from_stdout(result: Result) -> Reward | dict[str, Reward]:
    """The reward in the last line that is not empty."""
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    if not lines:
        raise NoReward("stdout is empty: its last line must be the reward")
    return _parse_reward(lines[-1], "the last line of stdout")


def from_file(folder: Path, name: str) -> Reward | dict[str, Reward]:
    """The reward in a whole file that the command wrote into its working directory."""
    try:
        content = _read_own_file(folder, name)
    except OSError as error:
        raise NoReward(f"the file {name} of the reward: {error.strerror}") from None
    return _parse_reward(content.decode(errors="replace"), f"the file {name}")


def _read_own_file(folder: Path, name: str) -> bytes:
    """Returns the content of a regular file below `folder`. Follows no link. Raises `NoReward` and `OSError`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # Opening a FIFO would block.
    *folders, last = Path(name).parts
    with ExitStack() as opened:
        place: int | None = None
        for part in (str(folder), *folders):
            place = os.open(part, flags | os.O_DIRECTORY, dir_fd=place)
            opened.callback(os.close, place)
        found = os.open(last, flags, dir_fd=place)
        opened.callback(os.close, found)
        status = os.fstat(found)
        # A second hard link may be a file of someone else, whose content must not reach the journal.
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise NoReward(f"the file {name} of the reward is not a regular file with one name: write a plain file")
        content = opened.enter_context(os.fdopen(os.dup(found), "rb")).read(MAX_REWARD_BYTES + 1)
    if len(content) > MAX_REWARD_BYTES:
        raise NoReward(f"the file {name} of the reward has more than {MAX_REWARD_BYTES} bytes: write only the reward")
    return content


class _PrintedReward(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reward: float
    by_role: dict[str, float] = {}
    by_turn: list[float] | dict[str, list[float]] = []
    by_call: dict[str, float] = {}
    metrics: dict[str, float] = {}
    text: str = ""


def _parse_reward(text: str, place: str) -> Reward | dict[str, Reward]:
    """The reward of an episode, or one for each policy of the run by name."""
    try:
        found = json.loads(text, parse_int=float)  # an integer of 400 digits becomes infinite, and is refused later
    except (ValueError, RecursionError):
        found = None
    try:
        if isinstance(found, dict) and found and "reward" not in found:
            return {policy: _checked_reward(one) for policy, one in found.items()}
        return _checked_reward(found)
    except ValidationError as error:
        detail = error.errors()[0]
    why = f" ({'.'.join(map(str, detail['loc']))}: {detail['msg']})" if detail["loc"] else ""
    raise NoReward(
        f'{place} is {text.strip()[:100]!r}: expected a number or {{"reward": number}}, which may have by_role, '
        f"metrics and text, or one of them by policy{why}"
    )


def _checked_reward(found: Any) -> Reward:
    printed = _PrintedReward.model_validate({"reward": found} if isinstance(found, float) else found)
    return Reward(
        printed.reward, printed.by_role, printed.metrics, printed.by_turn or (), printed.by_call, printed.text
    )
