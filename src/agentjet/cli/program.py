"""The program of `agentjet run`: the files of its command line, its code versions, and its reward.

A reward that cannot be read aborts the episode: it is not 0.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentjet.client.agent_source import AgentSource, AgentVersion, Stamp, file_stamps, hash_of, load_function
from agentjet.client.command import Command, Result, Score
from agentjet.errors import ConfigError
from agentjet.types import Reward

SKIPPED = frozenset({"__pycache__", "node_modules"})
"""Folders without source files, beside those whose names begin with a dot."""
REWARD_FORMS = "FILE.py:FUNCTION, stdout, exit-code or file:NAME"
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
        named = [self._path_in(word, index) for index, word in enumerate(self.arguments)]
        # An interpreter given by its path, perhaps through a virtual environment's link, is not a source file.
        if named[0] is not None and not named[0].resolve().is_relative_to(self.here):
            named[0] = None
        found = [path for path in named if path is not None and path.is_file()]
        return list(dict.fromkeys(itertools.chain(found, *(_below(path) for path in self.more))))

    def resolved(self, root: Path) -> list[str]:
        """The command line for another working directory: paths are absolute. `root` is the folder `here` or a copy of
        it."""
        return [self._resolved(word, index, root) for index, word in enumerate(self.arguments)]

    def version(self, root: Path, reward_version: str) -> str:
        """The code version, a hash of the files below `root`, those outside `here`, the program's name, the words that
        are not files, and the reward's version."""
        contents = {os.path.relpath(file, self.here): self._moved(file, root).read_bytes() for file in self.files()}
        program, *rest = self.arguments
        words = [word for index, word in enumerate(rest, 1) if self._path_in(word, index) is None]
        facts = {"--": "\0".join([Path(program).name, *words]).encode(), "--reward": reward_version.encode()}
        return hash_of(contents | facts)

    def _path_in(self, word: str, index: int) -> Path | None:
        """The file or folder in a word, also as `--option=path`; None without one."""
        name = word.partition("=")[2] if word.startswith("-") else word
        if not name or (index == 0 and os.sep not in name):  # the program is found through PATH
            return None
        path = Path(os.path.normpath(self.here / name))
        try:
            # A single word can have any meaning: it is not a path only because a folder has the same name.
            return path if path.exists() and (os.sep in name or path.is_file()) else None
        except (OSError, ValueError):  # too long for a name, or with a null byte
            return None

    def _resolved(self, word: str, index: int, root: Path) -> str:
        path = self._path_in(word, index)
        if path is None:
            return word.replace("{here}", str(root))
        option, separator, _ = word.rpartition("=") if word.startswith("-") else ("", "", "")
        return f"{option}{separator}{self._moved(path, root)}"

    def _moved(self, path: Path, root: Path) -> Path:
        return root / path.relative_to(self.here) if path.is_relative_to(self.here) else path


@dataclass
class CommandSource:
    """The `AgentSource` of a command. Each version runs from a copy of its files below `copies`.

    So an edit does not change an episode that has begun, and an older version can be used again. Files that are not
    watched are linked into the copy, so that imports find them. Files outside the present folder are not copied. A
    reward function is loaded again with each version.
    """

    line: CommandLine
    command: Command
    reward_source: AgentSource | None
    copies: Path
    num_copies: int = 0

    def stamp(self) -> Stamp:
        own = file_stamps(self.line.files())
        return own + self.reward_source.stamp() if self.reward_source is not None else own

    def load(self) -> AgentVersion:
        """Copies the present files. Raises the errors of the files, or of the reward's."""
        score = AgentVersion("", self.command.score)
        if self.reward_source is not None:
            score = self.reward_source.load()
        root = self.copies / str(self.num_copies)
        self.num_copies += 1
        _mirror(self.line.here, root, set(self.line.files()))
        version = self.line.version(root, score.code_version)
        arguments = self.line.resolved(root)
        return AgentVersion(
            version, replace(self.command, arguments=arguments, score=score.agent, code_version=version)
        )


def check_source(paths: Sequence[Path], here: Path) -> tuple[Path, ...]:
    """The paths of `--source`, absolute. Raises `ConfigError` for a missing one."""
    for path in paths:
        if not (here / path).exists():
            raise ConfigError(f"--source {path}: no such file or folder")
    return tuple(Path(os.path.normpath(here / path)) for path in paths)


def _mirror(original: Path, copy: Path, files: set[Path]) -> None:
    """Makes a folder like `original`: `files` are copied, everything else is a link to the original."""
    copy.mkdir()
    folders = {parent for file in files for parent in file.parents}
    for entry in original.iterdir():
        if entry in files:
            shutil.copy2(entry, copy / entry.name)
        elif entry in folders:
            _mirror(entry, copy / entry.name, files)
        else:
            (copy / entry.name).symlink_to(entry)


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
        return lambda task, result: from_file(result.folder / name, name), False
    if separator and kind.endswith(".py"):
        return load_function(text, option="--reward"), True
    raise ConfigError(f"--reward {text}: expected {REWARD_FORMS}")


def from_stdout(result: Result) -> Reward | dict[str, Reward]:
    """The reward in the last line that is not empty."""
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    if not lines:
        raise NoReward("stdout is empty: its last line must be the reward")
    return _parse_reward(lines[-1], "the last line of stdout")


def from_file(path: Path, name: str) -> Reward | dict[str, Reward]:
    """The reward in a whole file that the command wrote into its working directory."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise NoReward(f"the file {name} of the reward: {error.strerror}") from None
    return _parse_reward(text, f"the file {name}")


class _PrintedReward(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reward: float
    by_role: dict[str, float] = {}
    by_turn: list[float] | dict[str, list[float]] = []
    by_call: dict[str, float] = {}
    metrics: dict[str, float] = {}


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
        f'{place} is {text.strip()[:100]!r}: expected a number or {{"reward": number}}, which may have by_role and '
        f"metrics, or one of them by policy{why}"
    )


def _checked_reward(found: Any) -> Reward:
    printed = _PrintedReward.model_validate({"reward": found} if isinstance(found, float) else found)
    return Reward(printed.reward, printed.by_role, printed.metrics, printed.by_turn or (), printed.by_call)
