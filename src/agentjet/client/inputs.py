"""Checks of user input: agents, tasks, arguments of a run or episode, and changes of job settings.

Every error names the key, the value and the way out, and is raised before anything is sent.
"""

from __future__ import annotations

import codecs
import copy
import hashlib
import inspect
import io
import itertools
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from agentjet.client.agent_source import load_function, one_line
from agentjet.client.command import Command, payload_json
from agentjet.errors import ConfigError, InvalidRequest, counted
from agentjet.types import MAX_TEMPERATURE, MIN_TEMPERATURE, Task, shown

Body = TypeVar("Body", bound=BaseModel)

MAX_TASKS = 1_000_000
"""Tasks are kept for the whole run."""
IDENTITIES_KEPT = 100_000
"""Different tasks of a stream that are compared with later ones: about 40 MB."""
ONE_TASK_SET = "reproducible = True needs tasks of one task set: how sets share a batch depends on time"
MAX_ROW_BYTES = 100_000
"""A row travels in a process's environment, where Linux allows 128 KiB."""
FIXED = ("model", "sampler", "server")
"""Sections of the settings that a running server keeps."""
NAMED = ("recipe", "loss")
"""Sections that may be given by their name alone."""


def build_request(kind: type[Body], **fields: Any) -> Body:
    """A request body of class `kind`. Raises `InvalidRequest` naming the first wrong field."""
    try:
        return kind(**fields)
    except ValidationError as error:
        detail = error.errors()[0]
    key, message = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        message = f"this name is unknown; known are {', '.join(kind.model_fields)}"
    raise InvalidRequest(f"{key} = {shown(detail['input'])}: {message[0].lower()}{message[1:]}", param=key)


def check_agent(agent: object, **counts: object) -> None:
    """Raises `ValueError` if `agent` is not an agent, or if a count is not a whole number of at least 1."""
    if not callable(agent):
        raise ValueError(f"agent = {shown(agent)}: give a function, which is called as agent(task, episode)")
    check_signature(agent, f"agent = {shown(agent)}")
    check_counts(1, **counts)


class TaskList(tuple[Task, ...]):
    """The checked tasks of a run or an evaluation."""

    @cached_property
    def identity(self) -> str:
        """The number of the tasks, and a hash of their identities and of those payloads that are JSON."""
        rows = sorted((task.task_set, task.id, payload_digest(task.payload, _kind).hex()) for task in self)
        digest = hashlib.blake2b(json.dumps(rows).encode(), digest_size=4).hexdigest()
        return f"{counted(len(self), 'task')}, {digest}"


def task_digest(task: Task) -> str:
    """A digest of a task: its identity, and its payload if that is JSON."""
    facts = [task.task_set, task.id, payload_digest(task.payload, _kind).hex()]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def listed_tasks(tasks: Iterable[Task]) -> TaskList:
    """The tasks of a run. Raises `ValueError` if there are none, or for a wrong one."""
    if not (listed := checked_tasks(tasks, "tasks")):
        raise ValueError("there are no tasks: give at least one")
    return listed


def check_commands(agent: object, tasks: Iterable[Task]) -> None:
    """Raises `ConfigError` for a task that a program cannot get. Other agents take any payload."""
    if isinstance(agent, Command):
        for task in tasks:
            payload_json(task)
            agent.filled(task)


def check_counts(least: int, **counts: object) -> None:
    """Raises `ValueError` for a count that is not a whole number of at least `least`."""
    for name, value in counts.items():
        if not _is_whole(value) or value < least:
            raise ValueError(f"{name} = {shown(value)}: it must be a whole number of at least {least}")


def is_stream(tasks: object) -> bool:
    """True for a generator or another source of unknown length, which may be endless."""
    return isinstance(tasks, Iterable) and not isinstance(tasks, Sized)


def checked_tasks(tasks: Iterable[Task], named: str) -> TaskList:
    """The tasks of the argument called `named`; uses up an iterator. Raises `ValueError` for anything but a list of
    tasks."""
    if isinstance(tasks, TaskList):
        return tasks
    if isinstance(tasks, Set):
        raise ValueError(
            f"{named} is a set, whose order differs from run to run: give a list, such as "
            f"sorted({named}, key=lambda task: task.id)"
        )
    if not isinstance(tasks, Iterable):
        raise ValueError(f"{named} = {shown(tasks)}: give a list, such as [Task('an-id', payload=...)]")
    identities = TaskIdentities(named, are_visits=not isinstance(tasks, Sequence))
    listed = TaskList(identities.checked(task) for task in itertools.islice(tasks, MAX_TASKS + 1))
    if len(listed) > MAX_TASKS:
        raise ValueError(
            f"{named} has more than {MAX_TASKS} tasks: all of them are read before the run, so a generator must end "
            f"(only the tasks of `train` may be endless); give a part, such as itertools.islice({named}, 10_000)"
        )
    return listed


class TaskIdentities:
    """The tasks seen so far, by their identity: task set and id.

    Two tasks with one identity would be compared with each other, and their scores would be merged.
    """

    def __init__(self, named: str, *, are_visits: bool) -> None:
        """`named` is the argument with the tasks. `are_visits`: the same task again, with the same payload, is one more
        visit, as in a stream of tasks. In a list it is a mistake.
        """
        self._named = named
        self._are_visits = are_visits
        self._num_seen = 0
        self._seen: OrderedDict[tuple[str, str], tuple[int, bytes]] = OrderedDict()

    def checked(self, task: object) -> Task:
        """The next task. Raises `ValueError` for anything but a task, and for a wrongly repeated identity."""
        index, self._num_seen = self._num_seen, self._num_seen + 1
        if not isinstance(task, Task):
            raise ValueError(f"{self._named}[{index}] = {shown(task)}: give a Task, such as Task('an-id', payload=...)")
        identity = (task.task_set, task.id)
        digest = payload_digest(task.payload) if self._are_visits else b""
        first, before = self._seen.setdefault(identity, (index, digest))
        self._seen.move_to_end(identity)
        if len(self._seen) > IDENTITIES_KEPT and self._are_visits:
            self._seen.popitem(last=False)
        if first != index and not (self._are_visits and digest == before):
            in_set = f" of task set {task.task_set!r}" if task.task_set else ""
            with_other = " with another payload" if self._are_visits else ""
            raise ValueError(
                f"{self._named}[{first}] and {self._named}[{index}] both have the id {task.id!r}{in_set}{with_other}: "
                "the episodes of a task are compared with each other. Give each task its own id, or each subset its "
                "own task_set, such as Task(id, task_set='algebra', payload=...)"
            )
        return task


def _kind(payload: object) -> bytes:
    return type(payload).__qualname__.encode()


def pickled_or_itself(payload: object) -> bytes:
    """The pickle of a payload. One that cannot be pickled equals only itself, as long as it is kept."""
    return _pickled(payload, lambda payload: f"object {id(payload)}".encode())


def _pickled(payload: object, otherwise: Callable[[object], bytes] = _kind) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True  # Without references, equal content has equal bytes. Cyclic objects are refused.
    try:
        pickler.dump(payload)
    except Exception:  # the boundary: any class of the user, which may not be made for pickling
        return otherwise(payload)
    return file.getvalue()


def payload_digest(payload: object, otherwise: Callable[[object], bytes] = _pickled) -> bytes:
    """A digest of a task's content: its JSON with sorted keys, else its pickle, else the name of its class.

    `otherwise` replaces the pickle, which may differ from one process to the next.
    """
    try:
        content = json.dumps(payload, sort_keys=True).encode()
    except Exception:  # the boundary: a class of the user, such as one that is derived from a dict
        content = otherwise(payload)
    return hashlib.blake2b(content, digest_size=16).digest()


def check_signature(agent: Callable[..., object], named: str) -> None:
    """Raises `ValueError` for a function that cannot be called as an agent is."""
    try:
        inspect.signature(agent, follow_wrapped=False).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{named} cannot be called as agent(task, episode): {error}") from None
    except ValueError:  # a function that is not written in Python may lack a signature
        pass


def load_agent(named: str, *, option: str) -> Callable[..., Any]:
    """Raises `ConfigError` if the agent is missing or has the wrong signature."""
    agent = load_function(named, option=option)
    try:
        check_signature(agent, f"{option} {named}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return agent


def check_policy(at_version: Any, temperature: Any, seed: int | None, *, of_server: bool, record: bool) -> None:
    """Raises `ValueError` for an invalid policy version or temperature, and for options that exclude each other."""
    if at_version not in (None, "newest") and not (_is_whole(at_version) and at_version >= 0):
        raise ValueError(f"at_version = {shown(at_version)}: give a policy version, from 0 on, or 'newest'")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (
        is_number and (temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE)
    ):
        raise ValueError(
            f"temperature = {shown(temperature)}: give 0 (greedy), or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )
    if record and at_version is None:
        raise ValueError("record = True needs at_version, such as 'newest': a score belongs to one policy version")
    if not of_server and (at_version, temperature, seed) != (None, None, None):
        raise ValueError(
            "at_version, temperature and seed need the policy of a server: an endpoint has no versions, and gets the "
            "agent's own settings"
        )


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields number and value of each line that is not empty. Raises `ConfigError` naming the line, and the place in it
    if known."""
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path} line {number}"
        try:
            yield number, json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"{place}, byte {error.start + 1}: the line is not UTF-8; convert the file") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}, column {error.colno}: {error.msg}") from None
        except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
            raise ConfigError(f"{place}: {error}") from None


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a JSON-lines file: one object a task, which becomes its payload. `id` and `task_set` of the object
    are the task's; without `id` its id is `line-N`.

    Raises `ConfigError` naming the line.
    """
    tasks: dict[tuple[str, str], tuple[int, Task]] = {}
    for number, row in read_json_lines(path):
        task = _task(row, number, f"{path} line {number}")
        identity = (task.task_set, task.id)
        if identity in tasks:
            in_set = f" in task set {task.task_set!r}" if task.task_set else ""
            raise ConfigError(
                f"{path} line {number}: the id {task.id!r} is also that of line {tasks[identity][0]}{in_set}; "
                'give each row its own "id", or each subset its own "task_set"'
            )
        tasks[identity] = (number, task)
    if not tasks:
        raise ConfigError(f"{path}: the file has no tasks")
    return [task for _, task in tasks.values()]


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


def _task(row: Any, number: int, place: str) -> Task:
    text = json.dumps(row)
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: a task is a JSON object such as {{"question": "..."}}, not {text[:40]}')
    if len(text) > MAX_ROW_BYTES:
        raise ConfigError(
            f"{place}: the row has {len(text)} bytes; it travels in the environment, where {MAX_ROW_BYTES} "
            "fit: put long content into a file, and its name into the row"
        )
    named = row.get("id", f"line-{number}")
    try:
        return Task(str(named) if _is_whole(named) else named, task_set=row.get("task_set", ""), payload=row)
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None


def edited(job: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the job settings with `changes`. Their keys are dotted names, with or without `job.` in front.

    Another recipe, or another loss of it, begins with its own defaults: `recipe.name` replaces the whole section.

    Raises `ConfigError` for a setting outside the job, or for a key below a plain value. The server checks everything
    else.
    """
    edited = copy.deepcopy(dict(job))
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        if section in FIXED and rest:
            raise ConfigError(
                f"{key} = {value!r}: a running server keeps its {section}.* settings; stop it and start it again with "
                f"--set {key}=VALUE (`agentjet serve`)"
            )
        *sections, name = key.removeprefix("job.").split(".")
        values = edited
        for depth, inner in enumerate(sections, 1):
            parent, values = values, values.setdefault(inner, {})
            if inner in NAMED and (isinstance(values, str) or (depth == len(sections) and name == "name")):
                values = parent[inner] = {"name": values}
            if not isinstance(values, dict):
                held = ".".join(["job", *sections[:depth]])
                raise ConfigError(f"{key} = {value!r}: {held} is a value, {values!r}, not a section of settings")
        values[name] = copy.deepcopy(value)
    return edited


def check_finite(values: Mapping[str, Any], prefix: str = "job.") -> None:
    """Raises `ConfigError` for a number that is not finite: JSON cannot carry it, so the server would get `null`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix[:-1]} = {values!r}: it is a section of settings; give names with values")
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_finite(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}{name} = {value}: it must be a finite number")
