"""What a caller gave to a run or an episode, checked before it begins: a mistake is a sentence that names it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Set
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from agentjet.errors import InvalidRequest
from agentjet.protocol import BeginRequest
from agentjet.types import COLDEST, HOTTEST, Task

Body = TypeVar("Body", bound=BaseModel)

SHOWN = 60
"""Characters of a wrong value in a message."""


def begin_request(**fields: Any) -> BeginRequest:
    """A request for an episode. Raises `InvalidRequest` naming the first field that is wrong."""
    return request_of(BeginRequest, **fields)


def request_of(kind: type[Body], **fields: Any) -> Body:
    """A request's body. Raises `InvalidRequest` naming the first field that is wrong."""
    try:
        return kind(**fields)
    except ValidationError as error:
        detail = error.errors()[0]
    key, message = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
    raise InvalidRequest(f"{key} = {_shown(detail['input'])}: {message[0].lower()}{message[1:]}", param=key)


def check_run(agent: object, **counts: object) -> None:
    """Raises `ValueError` for what is no agent, or no count of at least 1."""
    if not callable(agent):
        raise ValueError(f"agent = {_shown(agent)}: give a function, which is called as agent(task, episode)")
    check_signature(agent, f"agent = {_shown(agent)}")
    for name, value in counts.items():
        if not _is_whole(value) or value < 1:
            raise ValueError(f"{name} = {_shown(value)}: it must be a whole number of at least 1")


def checked_tasks(tasks: Iterable[Task], *, named: str = "tasks") -> tuple[Task, ...]:
    """The tasks given as `named`; an iterator is used up. Raises `ValueError` for what is no list of tasks."""
    if isinstance(tasks, Task):
        raise ValueError(f"{named} = {_shown(tasks)}: give a list, such as [Task('an-id', payload=...)]")
    if isinstance(tasks, Set):
        raise ValueError(
            f"{named} is a set, whose order differs from run to run: give a list, such as "
            f"sorted({named}, key=lambda task: task.id)"
        )
    try:
        listed = tuple(tasks)
    except TypeError:
        if hasattr(tasks, "__iter__"):  # What it raises on its way is its own.
            raise
        raise ValueError(f"{named} = {_shown(tasks)}: give a list of Task") from None
    for index, task in enumerate(listed):
        if not isinstance(task, Task):
            raise ValueError(f"{named}[{index}] = {_shown(task)}: give a Task, such as Task('an-id', payload=...)")
    return listed


def some_tasks(verb: str, tasks: Iterable[Task]) -> tuple[Task, ...]:
    """The same. Raises `ValueError`, too, when there are no tasks to `verb` on."""
    if not (listed := checked_tasks(tasks)):
        raise ValueError(f"there are no tasks to {verb} on")
    return listed


def check_signature(agent: Callable[..., object], named: str) -> None:
    """Raises `ValueError` for a function that cannot be called as an agent is."""
    try:
        inspect.signature(agent, follow_wrapped=False).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{named} cannot be called as agent(task, episode): {error}") from None
    except ValueError:  # what is not written in Python may have no signature
        pass


def check_policy(at_version: Any, temperature: Any) -> None:
    """Raises `ValueError` for what is no policy version, or no temperature."""
    if at_version not in (None, "newest") and not (_is_whole(at_version) and at_version >= 0):
        raise ValueError(f"at_version = {_shown(at_version)}: give a policy version, from 0 on, or 'newest'")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (is_number and (temperature == 0 or COLDEST <= temperature <= HOTTEST)):
        raise ValueError(f"temperature = {_shown(temperature)}: give 0 (greedy), or {COLDEST:g} to {HOTTEST:g}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
