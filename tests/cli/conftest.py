"""The real application over a scripted worker, in a thread, so that commands can be run against it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.arithmetic.agent import held_out_tasks
from tests.fakes import saying
from tests.server.serving import Served, in_thread, serving

TOO_HARD = held_out_tasks(10)[3]


def adds(prompt: str) -> str:
    """The last sum asked for, except that one of the first held-out sums is too hard."""
    a, b = map(int, re.findall(r"What is (\d+) \+ (\d+)", prompt)[-1])
    return "many" if (a, b) == TOO_HARD.payload else f"{a} + {b} = {a + b}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with in_thread(serving(tmp_path / "data", saying(adds))) as (served, _):
        yield served
