"""`Subject`: what every trial of a study trains, and how it is scored. What its arms change of that is theirs.

Code and tasks are named, not held: `FILE.py:FUNCTION`, relative to the folder the study is run in, or
`package.module:function`. Tasks may also be a file of JSON lines.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentjet.client.agent_source import hash_of, load_function, one_line, source_of
from agentjet.client.inputs import check_signature, read_tasks
from agentjet.client.rollout import Agent
from agentjet.errors import ConfigError
from agentjet.research.records import Record, Setting, refuse
from agentjet.types import Task

NOT_IMPORTED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
OF_OTHERS = ("study.json", "journal.jsonl", "journal.sqlite", "pyvenv.cfg")
"""What a folder holds that is no part of the code beside it: a study, a server's data dir, an environment."""


@dataclass(frozen=True)
class Subject(Record):
    """A model, the agent it is trained in, and the tasks it is scored on."""

    model: str
    """A Hugging Face id, a local folder, or `smollm2-135m`: where every run begins."""
    agent: str
    """Plays the training tasks, `agent(task, episode) -> reward`."""
    tasks: str
    """What is trained on: a function that returns tasks, or a file of them (`FILE.jsonl`)."""
    held_out: str
    """What is scored, named likewise, and never trained on."""
    evaluator: str = ""
    """Plays the held-out tasks: its mean reward is the score. Empty: the agent does."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """By arm, the agent of arms that differ in code or in reward."""
    settings: Setting = field(default_factory=dict)
    """Of the server, where they are not the defaults; arms and knobs change them further."""
    steps: int = 40
    """Batches of a full run."""
    evaluations: int = 4
    """Times a full run is scored, evenly spaced, the last one at its end; and once before it."""
    repeats: int = 1
    """Episodes of each held-out task in a scoring."""
    concurrency: int = 32
    """Episodes at the same time."""
    floor: float = 0.0
    """The score of a policy that can no longer answer, of a run that diverged; less where one of the run's held-out
    episodes earned less.
    """
    patience: float = 1800.0
    """Seconds that the training between two scorings, or a scoring, may take before the run is given up as lost."""
    code: str = ""
    """Hash of the code and the tasks that are named here: what changed since is refused."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By file, the hash of what `code` is made of: tells which of them changed. Older studies have none."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """By file, the hash of what is in the model's folder. None where it is not a local one, or the study is older."""

    def __post_init__(self) -> None:
        refuse(self.steps < 1, f"subject.steps = {self.steps}: a run learns at least 1 batch")
        most = f"give 1 to subject.steps = {self.steps}"
        refuse(not 1 <= self.evaluations <= self.steps, f"subject.evaluations = {self.evaluations}: {most} of them")
        refuse(self.repeats < 1, f"subject.repeats = {self.repeats}: each held-out task is played at least once")
        refuse(self.concurrency < 1, f"subject.concurrency = {self.concurrency}: give 1 or more")
        refuse(
            not math.isfinite(self.floor), f"subject.floor = {self.floor}: give the lowest score that a run may have"
        )
        refuse(not self.patience > 0, f"subject.patience = {self.patience}: give seconds above 0")

    def agent_of(self, arm: str) -> str:
        """Where the agent of an arm is."""
        return self.agents.get(arm, self.agent)

    def steps_at(self, fidelity: float) -> int:
        """The batches of a run of that fraction of the full length."""
        return max(1, round(self.steps * fidelity))

    def marks(self, fidelity: float) -> list[int]:
        """The steps at which such a run is scored: before the first, then those of a full run that it reaches, and its
        own end.
        """
        end = self.steps_at(fidelity)
        spaced = {round(self.steps * number / self.evaluations) for number in range(self.evaluations + 1)}
        return sorted({mark for mark in spaced if mark < end} | {end})

    def to_json(self) -> dict[str, Any]:
        """Without files that were not noted: the ids of older studies, and so their seeds, stay what they were."""
        content = super().to_json()
        for noted in ("files", "weights"):
            if not content[noted]:
                del content[noted]
        return content

    def hashed(self) -> Subject:
        """With the hashes of code, tasks and model as the files are. Raises `ConfigError` for what is not there."""
        named = {self.agent, self.tasks, self.held_out, self.evaluator or self.agent, *self.agents.values()}
        sources = sources_of(named)
        contents = {str(found.folder / file): found.files[file] for found in sources.values() for file in found.files}
        hashes = {file: hash_of({Path(file).name: content}) for file, content in sorted(contents.items())}
        return replace(self, code=digest_of(sources), files=hashes, weights=hashes_in(Path(self.model)))

    def evaluator_now(self) -> str:
        """The same of what computes the score alone."""
        return digest_of(sources_of({self.evaluator or self.agent, self.held_out}))

    def check_code(self) -> None:
        """Raises `ConfigError` when code, tasks or model are not what they were when the study was fixed."""
        if not self.code:
            return
        now = self.hashed()
        if now.code != self.code:
            wrong = f"code = {self.code!r}, and the files are {now.code!r} now: {changes(self.files, now.files)}"
        elif self.weights and now.weights != self.weights:
            wrong = f"model = {self.model!r} is another model now: {changes(self.weights, now.weights)}"
        else:
            return
        raise ConfigError(f"subject.{wrong}. A study is fixed before its data: restore its files, or begin a new study")

    def player(self, arm: str) -> Agent:
        """The agent that an arm trains. Raises `ConfigError`."""
        return load_agent(self.agent_of(arm), option="subject.agent")

    def judge(self) -> Agent:
        """What plays the held-out tasks. Raises `ConfigError`."""
        return load_agent(self.evaluator or self.agent, option="subject.evaluator")

    def training_tasks(self) -> list[Task]:
        """Raises `ConfigError`."""
        return load_tasks(self.tasks, option="subject.tasks")

    def held_out_tasks(self) -> list[Task]:
        """Raises `ConfigError`."""
        return load_tasks(self.held_out, option="subject.held_out")


def load_agent(named: str, *, option: str) -> Agent:
    """Raises `ConfigError` for what is not there, or cannot be called as an agent is."""
    agent = load_function(named, option=option)
    try:
        check_signature(agent, f"{option} {named}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return agent


def load_tasks(named: str, *, option: str) -> list[Task]:
    """The tasks of a file of JSON lines, or what a function returns. Raises `ConfigError`."""
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


@dataclass(frozen=True)
class Source:
    """What a name stands for."""

    folder: Path
    """What it is called: as it is named; of a package, the package, wherever that is installed."""
    files: Mapping[str, bytes]
    """By path in the folder."""


def sources_of(named: set[str]) -> dict[str, Source]:
    """By name, its file and, of Python, all that lie beside and below it: any of them may be imported."""
    sources: dict[str, Source] = {}
    for name in named:
        file = Path(name) if name.endswith(".jsonl") else source_of(name, option="subject")
        beside = [path for path in files_below(file.parent) if path.suffix == ".py"] if file.suffix == ".py" else []
        try:
            contents = {path.relative_to(file.parent).as_posix(): path.read_bytes() for path in {file, *beside}}
        except OSError as error:
            raise ConfigError(f"subject: {file}: {error.strerror or error}") from None
        sources[name] = Source(folder_of(name, file), contents)
    return sources


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and of those in it, but for what is hidden or of others."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [] if here.name in NOT_IMPORTED else [name for name in folders if is_own(here / name)]
        yield from (here / name for name in names if not name.startswith("."))


def is_own(folder: Path) -> bool:
    if folder.name.startswith(".") or folder.name in NOT_IMPORTED:
        return False
    return not any((folder / file).exists() for file in OF_OTHERS)


def hashes_in(model: Path) -> dict[str, str]:
    """By file, of a model in a local folder. Read piece by piece: weights are large. Raises `ConfigError`."""
    hashes = {}
    for file in sorted(files_below(model)):
        try:
            with file.open("rb") as content:
                hashes[str(file)] = hashlib.file_digest(content, "sha256").hexdigest()[:12]
        except OSError as error:
            raise ConfigError(f"subject.model = {str(model)!r}: {file}: {error.strerror or error}") from None
    return hashes


def folder_of(name: str, file: Path) -> Path:
    place = name.rpartition(":")[0]
    if name.endswith(".jsonl") or place.endswith(".py"):
        return file.parent
    module = Path(*place.split("."))
    return module if file.name == "__init__.py" else module.parent


def digest_of(sources: Mapping[str, Source]) -> str:
    """Of what `sources_of` found, wherever it lies."""
    return hash_of({name: hash_of(found.files).encode() for name, found in sources.items()})


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files differ, by their hashes."""
    if not before:
        return f"which of them changed was not noted when the study was planned; they are {', '.join(now)}"
    return ", ".join(
        f"{file} {'is new' if file not in before else 'is gone' if file not in now else 'changed'}"
        for file in sorted({*before, *now})
        if before.get(file) != now.get(file)
    )
