"""The tasks: functions of one line with a mistake in it, and the tests that find it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentjet import Task


@dataclass(frozen=True)
class Repair:
    """The content of a file and of its tests. The file has the name of its function."""

    code: str
    tests: str


def repair(name: str, parameters: str, wrong: str, *tests: str) -> Task:
    """`tests` are expressions that are true of the right function."""
    code = f"def {name}({parameters}):\n    return {wrong}\n"
    checks = [f"from {name} import {name}", *(f"assert {test}, {test!r}" for test in tests)]
    return Task(name, task_set="repair", payload=Repair(code, "\n".join(checks)))


TASKS = [
    repair("add", "a, b", "a - b", "add(2, 3) == 5", "add(0, 7) == 7"),
    repair("subtract", "a, b", "a + b", "subtract(7, 3) == 4", "subtract(3, 7) == -4"),
    repair("multiply", "a, b", "a / b", "multiply(2, 3) == 6", "multiply(0, 7) == 0"),
    repair("twice", "x", "x / 2", "twice(4) == 8", "twice(0) == 0"),
    repair("square", "x", "x + x", "square(3) == 9", "square(-4) == 16"),
    repair("is_even", "n", "n % 2 == 1", "is_even(4)", "not is_even(7)"),
    repair("first", "items", "items[1]", "first([1, 2, 3]) == 1"),
    repair("last", "items", "items[0]", "last([1, 2, 3]) == 3"),
    repair("length", "items", "items[0]", "length([]) == 0", "length([3, 3]) == 2"),
    repair("upper", "text", "text.lower()", "upper('hello') == 'HELLO'"),
    repair("area", "width, height", "width + height", "area(3, 4) == 12"),
    repair("largest", "items", "min(items)", "largest([1, 5, 2]) == 5"),
]


def row(task: Task) -> dict[str, Any]:
    """A task as a line of `tasks.jsonl`, for `agentjet run`."""
    files = {f"{task.id}.py": task.payload.code, "tests.py": task.payload.tests}
    return {"id": task.id, "task_set": task.task_set, "files": files}


if __name__ == "__main__":
    for task in TASKS:
        print(json.dumps(row(task)))
