"""`Subject`: the model, agent and tasks of every trial of a study. Arms may override parts of it.

Code and tasks are stored by name: `FILE.py:FUNCTION`, relative to the working directory, or `package.module:function`.
Tasks may also be a file of JSON lines.
"""

from __future__ import annotations

import hashlib
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agentjet.client.agent_source import OURS, hash_of, load_function, one_line, source_of
from agentjet.client.inputs import check_signature, read_tasks
from agentjet.client.rollout import Agent
from agentjet.errors import ConfigError
from agentjet.research.records import Record, Setting, refuse
from agentjet.types import Task

Message = dict[str, Any]
"""A message in OpenAI's chat format."""
Judge = Callable[[Task, Sequence[Message]], float]
"""Scores a conversation about a task: `score(task, messages)`. The last message is the answer."""
Equal = Literal["episodes", "steps", "tokens", "seconds"]
MEASURED: tuple[Equal, ...] = ("tokens", "seconds")
"""Amounts that only a run shows. A short run gives the length of an arm's full runs."""
NOT_IMPORTED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
FOREIGN_MARKERS = ("study.json", "notebook.sqlite", "journal.jsonl", "journal.sqlite", "pyvenv.cfg")
"""Files that mark a folder as not part of the code beside it: a study, a campaign, a data dir or an environment."""


@dataclass(frozen=True)
class Subject(Record):
    """A model, the agent it is trained in, and the tasks it is scored on."""

    model: str
    """Base model of every run: a Hugging Face id, a local folder, or `smollm2-135m`."""
    agent: str
    """Plays the training tasks: `agent(task, episode) -> reward`."""
    tasks: str
    """Training tasks: a function that returns tasks, or a file of them (`FILE.jsonl`)."""
    held_out: str
    """Held-out tasks for scoring, named in the same way. They are never trained on."""
    evaluator: str = ""
    """Plays the held-out tasks; its mean reward is the score. Empty: the agent plays them."""
    agents: Mapping[str, str] = field(default_factory=dict)
    """By arm, the agents of arms that differ in code or in reward."""
    settings: Setting = field(default_factory=dict)
    """Server settings that are not defaults. Arms and knobs override them."""
    steps: int = 40
    """Batches of a full run."""
    evaluations: int = 4
    """Evenly spaced evaluations of a full run, the last one at its end; one more comes before the first step."""
    repeats: int = 1
    """Episodes per held-out task in an evaluation."""
    concurrency: int = 32
    """Episodes at the same time."""
    floor: float = 0.0
    """Score of a diverged run whose policy cannot answer; lower if one of the run's held-out episodes earned less."""
    patience: float = 1800.0
    """Maximum seconds of an evaluation, or of the training between two, before the run counts as lost."""
    judged: bool = False
    """The evaluator does not play. It is a `Judge` of the conversations in which the arm's own agent plays."""
    reward: str = ""
    """A `Judge` that pays the training episodes, in place of the reward that the agent returns."""
    hidden: tuple[str, ...] = ()
    """Keys of a held-out payload that only the judge reads. The agent gets those of training tasks."""
    readable: tuple[str, ...] = ()
    """Folders that the arm's code may read, the first with the code. Empty: the code is not sandboxed."""
    equal: Equal = "episodes"
    """Amount that is the same in full runs of all arms. `steps_as` and a campaign's `Runs` keep it."""
    code: str = ""
    """Hash of the named code and tasks. A study whose files changed is refused."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By file, the hashes behind `code`."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """By file, the hashes of a local model folder. Empty for other models."""

    def __post_init__(self) -> None:
        refuse(self.steps < 1, f"subject.steps = {self.steps}: a run learns at least 1 batch")
        most = f"give 1 to subject.steps = {self.steps}"
        refuse(not 1 <= self.evaluations <= self.steps, f"subject.evaluations = {self.evaluations}: {most} of them")
        refuse(self.repeats < 1, f"subject.repeats = {self.repeats}: give 1 or more")
        refuse(self.concurrency < 1, f"subject.concurrency = {self.concurrency}: give 1 or more")
        refuse(
            not math.isfinite(self.floor), f"subject.floor = {self.floor}: give the lowest score that a run may have"
        )
        refuse(not self.patience > 0, f"subject.patience = {self.patience}: give seconds above 0")

    def agent_of(self, arm: str) -> str:
        return self.agents.get(arm, self.agent)

    def steps_at(self, fidelity: float) -> int:
        """Number of batches of a run of that fraction of the full length."""
        return max(1, round(self.steps * fidelity))

    def evaluation_steps(self, fidelity: float) -> list[int]:
        """Steps at which such a run is evaluated: 0, those of a full run that it reaches, and its last step."""
        end = self.steps_at(fidelity)
        spaced = {round(self.steps * number / self.evaluations) for number in range(self.evaluations + 1)}
        return sorted({mark for mark in spaced if mark < end} | {end})

    def to_json(self) -> dict[str, Any]:
        """Omits empty fields that older studies lack, so that ids and seeds of older studies do not change."""
        content = super().to_json()
        for noted in ("files", "weights", "judged", "reward", "hidden", "readable"):
            if not content[noted]:
                del content[noted]
        return content if content.pop("equal") == "episodes" else content | {"equal": self.equal}

    def with_hashes(self) -> Subject:
        """Returns the subject with hashes of its code, tasks and model. Raises `ConfigError` for a missing file."""
        named = {self.agent, self.tasks, self.held_out, self.evaluator or self.agent, *self.agents.values()}
        files, model = hashes_of(code_files(named)), {str(file): file for file in files_below(Path(self.model))}
        return replace(self, code=digest_of(files), files=files, weights=hashes_of(model))

    def evaluator_hash(self) -> str:
        """Returns the hash of the evaluator and the held-out tasks."""
        return digest_of(hashes_of(code_files({self.evaluator or self.agent, self.held_out})))

    def check_code(self) -> None:
        """Raises `ConfigError` if code, tasks or model changed since the study was fixed."""
        if not self.code:
            return
        now = self.with_hashes()
        for name, before, after in (("code", self.files, now.files), ("model", self.weights, now.weights)):
            wrong = [
                f"{file} {'is new' if file not in before else 'is gone' if file not in after else 'changed'}"
                for file in sorted({*before, *after})
                if before.get(file) != after.get(file)
            ]
            refuse(
                bool(wrong),
                f"subject.{name}: {', '.join(wrong)}. A study is fixed before its data: restore its files, or plan a "
                "new study",
            )

    def load_judge(self) -> Judge:
        """Loads an evaluator that scores conversations. Raises `ConfigError`."""
        return load_function(self.evaluator, option="subject.evaluator")

    def as_deployed(self, held_out: Sequence[Task], training: Sequence[Task]) -> list[Task]:
        """Held-out tasks as the agent gets them: hidden values are those of training tasks, or empty without any."""
        return [
            replace(task, payload=self._public(task.payload, training[number % len(training)].payload))
            for number, task in enumerate(held_out)
        ]

    def _public(self, payload: Any, other: Any) -> Any:
        if not isinstance(payload, Mapping):
            return payload
        others = other if isinstance(other, Mapping) else {}
        return {key: others.get(key, type(value)()) if key in self.hidden else value for key, value in payload.items()}

    def load_arm_agent(self, arm: str) -> Agent:
        """Loads the agent that an arm trains. Raises `ConfigError`."""
        return load_agent(self.agent_of(arm), option="subject.agent")

    def load_evaluator(self) -> Agent:
        """Loads the agent that plays the held-out tasks. Raises `ConfigError`."""
        return load_agent(self.evaluator or self.agent, option="subject.evaluator")

    def training_tasks(self) -> list[Task]:
        """Raises `ConfigError`."""
        return load_tasks(self.tasks, option="subject.tasks")

    def held_out_tasks(self) -> list[Task]:
        """Raises `ConfigError`."""
        return load_tasks(self.held_out, option="subject.held_out")


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
        place = name.rpartition(":")[0]
        file = Path(name) if name.endswith(".jsonl") else source_of(name, option="subject")
        shown = file.parent
        if not name.endswith(".jsonl") and not place.endswith(".py"):
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
