"""The code and tasks that a subject names: loaded by name, hashed by file, and located in errors.

Names are `FILE.py:FUNCTION`, relative to the working directory, `package.module:function`, or a file of tasks.
"""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentjet.client.agent_source import OURS, hash_of, load_function, one_line, source_of
from agentjet.client.inputs import check_signature, read_tasks
from agentjet.client.rollout import Agent
from agentjet.errors import ConfigError
from agentjet.types import Task

NOT_IMPORTED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
FOREIGN_MARKERS = ("study.json", "notebook.sqlite", "journal.jsonl", "journal.sqlite", "pyvenv.cfg")
"""Files that mark a folder as not part of the code beside it: a study, a campaign, a data dir or an environment."""


def file_and_function(named: str) -> tuple[str, str]:
    """The file or module, and the function; a file of tasks has no function."""
    place, colon, function = named.rpartition(":")
    return (place, function) if colon else (named, "")


def located(error: BaseException) -> str:
    """The text of an error about the user's code, with the file and the line of its cause."""
    return f"{error}{place_of(error.__cause__)}"


def one_line_at(error: BaseException) -> str:
    """An exception of the user's code in one line, with its file and line."""
    return one_line(error) + place_of(error)


def place_of(error: BaseException | None) -> str:
    """` (FILE:LINE)` of the innermost line of the user's code; empty if it is unknown."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})"
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith("<") and not Path(f.filename).is_relative_to(OURS)]
    return f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""


def load_agent(named: str, *, option: str) -> Agent:
    """Raises `ConfigError` if the agent is missing or has the wrong signature."""
    agent = load_function(named, option=option)
    try:
        check_signature(agent, f"{option} {named}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return agent


def load_tasks(named: str, *, option: str) -> list[Task]:
    """Loads tasks from a JSON lines file or a function. Raises `ConfigError`."""
    if named.endswith(".jsonl"):
        return read_tasks(Path(named))
    function = load_function(named, option=option)
    try:
        made = function()
    except (Exception, SystemExit) as error:  # the boundary: the user's function may raise anything
        raise ConfigError(
            f"{option} = {named!r}: it is called without arguments, and raised {one_line(error)}"
        ) from error
    tasks = list(made) if isinstance(made, list | tuple) else []
    if not tasks or not all(isinstance(task, Task) for task in tasks):
        raise ConfigError(f"{option} = {named!r}: the function must return a list of `Task`s, with one in it at least")
    return tasks


def code_files(named: set[str]) -> dict[str, Path]:
    """The file behind each name. For Python, also all Python files beside and below it: it may import them. The files
    of an installed package are called by the package.
    """
    found: dict[str, Path] = {}
    for name in named:
        place, function = file_and_function(name)
        file = Path(name) if name.endswith(".jsonl") else source_of(name, option="subject")
        shown = file.parent
        if function and not place.endswith(".py"):
            module = Path(*place.split("."))
            shown = module if file.name == "__init__.py" else module.parent
        beside = [path for path in files_below(file.parent) if path.suffix == ".py"] if file.suffix == ".py" else []
        found |= {str(shown / path.relative_to(file.parent)): path for path in {file, *beside}}
    return found


def files_below(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder, without hidden files and folders of other projects."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [] if here.name in NOT_IMPORTED else [name for name in folders if is_part_of_project(here / name)]
        yield from (here / name for name in names if not name.startswith("."))


def is_part_of_project(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in NOT_IMPORTED:
        return False
    return not any((folder / file).exists() for file in FOREIGN_MARKERS)


def hashes_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Hashes files in pieces, because weights are large. Raises `ConfigError`."""
    hashes = {}
    for name, file in sorted(files.items()):
        try:
            with file.open("rb") as content:
                hashes[name] = hashlib.file_digest(content, "sha256").hexdigest()[:12]
        except OSError as error:
            raise ConfigError(f"subject: {file}: {error.strerror or error}") from None
    return hashes


def digest_of(hashes: Mapping[str, str]) -> str:
    return hash_of({name: digest.encode() for name, digest in hashes.items()})
