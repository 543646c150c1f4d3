"""Tasks from a file of JSON lines: one object a task, whose `id` and `task_set` are the task's, if there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentjet.errors import ConfigError
from agentjet.types import MAX_NAME, Task

MAX_ROW_BYTES = 100_000
"""A row travels in the environment of a process, where Linux takes 128 KiB."""


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file; the payload of each is its row. A row without an `id` is called after its line.

    Raises `ConfigError` naming the line, and the column where there is one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is no UTF-8") from None
    tasks: dict[str, tuple[int, Task]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _task(_row(line, f"{path} line {number}"), number, f"{path} line {number}")
        if task.id in tasks:
            raise ConfigError(f"{path} line {number}: the id {task.id!r} is that of line {tasks[task.id][0]}, too")
        tasks[task.id] = (number, task)
    if not tasks:
        raise ConfigError(f"{path}: there is no task in it")
    return [task for _, task in tasks.values()]


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}, column {error.colno}: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        raise ConfigError(f"{place}: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{place}: a task is a JSON object such as {{"question": "..."}}, not {line.strip()[:40]}')
    if len(line.encode()) > MAX_ROW_BYTES:
        raise ConfigError(
            f"{place}: the row has {len(line.encode())} bytes; it travels in the environment, where {MAX_ROW_BYTES} "
            "fit: put what is long into a file, and its name into the row"
        )
    return row


def _task(row: dict[str, Any], number: int, place: str) -> Task:
    named, task_set = row.get("id", f"line-{number}"), row.get("task_set", "")
    if isinstance(named, bool) or not isinstance(named, str | int) or not 1 <= len(str(named)) <= MAX_NAME:
        raise ConfigError(f"{place}: id = {named!r}: it must be text of 1 to {MAX_NAME} characters, or a whole number")
    if not isinstance(task_set, str) or len(task_set) > MAX_NAME:
        raise ConfigError(f"{place}: task_set = {task_set!r}: it must be text of at most {MAX_NAME} characters")
    return Task(str(named), task_set=task_set, payload=row)
