"""Steps, a source that has them, and kills at a chosen line."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import agentjet.trackers
from agentjet.trackers import Follower, Sink, TrackedStep, Tracker, open_tracker, opened

Rows = list[tuple[int, dict[str, float]]]
"""What a tracker has: version and values."""
ODD = 'agent/odd "näme", \u202e=1\n'


def steps_of(count: int) -> list[TrackedStep]:
    """Steps whose metrics come and go; versions jump, as after a rollback."""
    found = []
    for number in range(1, count + 1):
        metrics = {"reward/mean": number / 7, "optim/lr": 1e-6}
        if number % 3 == 0:
            metrics["reward/set a/mean"] = float(number)
        if number > count // 2:
            metrics[ODD] = 0.5
        found.append(TrackedStep(number + (5 if number > count // 2 else 0), 1.7e9 + 30.25 * number, metrics))
    return found


def rows_of(steps: list[TrackedStep]) -> Rows:
    return [(step.version, dict(step.metrics)) for step in steps]


@dataclass
class ListSource:
    """A source with given steps, of which a limited number is ready."""

    held: list[TrackedStep]
    ready: int = 10**6
    end: int = 0
    title: str = "a list"
    page: int = 10**6

    def settings(self) -> Mapping[str, Any]:
        return {"model": "m", "job.optimizer.lr": 1e-6, "job.recipe.name": "grpo"}

    def steps(self, after: int, limit: int) -> list[TrackedStep]:
        return [step for step in self.held[: self.ready] if step.version > after][: min(limit, self.page)]

    def progress(self) -> tuple[int, int]:
        return self.held[: self.ready][-1].version, self.end


@dataclass
class Screen:
    """Collects the lines."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)


def never() -> None:
    raise AssertionError("waited although there was nothing to wait for")


def follower(source: ListSource, label: str, folder: Path, pause: Callable[[], None] = never, **more: Any) -> Follower:
    """A follower with a clock that stands."""
    options = {"say": Screen().say, "clock": lambda: 0.0, "name": "", **more}
    sink: Sink | None = options.pop("sink", None)
    tracker = open_tracker(label) if sink is None else Tracker(label, partial(opened, sink))
    return Follower(source=source, tracker=tracker, folder=folder / "cursors", pause=pause, **options)


def copy(steps: list[TrackedStep], label: str, folder: Path, **more: Any) -> None:
    follower(ListSource(steps, page=7), label, folder, **more).run(stay=False)


def copy_through_kills(steps: list[TrackedStep], label: str, folder: Path, kills: int = 20) -> None:
    """Copies in processes of which so many are killed, while the run gets more steps."""
    dice = random.Random(label.partition(":")[0])
    for kill in range(1, kills + 1):
        so_far, lines = steps[: len(steps) * kill // kills], dice.randint(1, 130)
        while not copy_and_die(so_far, label, folder, lines):  # It ended before the kill.
            lines //= 2
    copy(steps, label, folder)


def copy_and_die(steps: list[TrackedStep], label: str, folder: Path, lines: int) -> bool:
    """Copies in a child process, which SIGKILLs itself after so many lines of the package. True if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            sys.settrace(_Killer(lines))
            copy(steps, label, folder)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class _Killer:
    """A trace function."""

    def __init__(self, lines: int) -> None:
        self._left = lines
        self._package = str(Path(agentjet.trackers.__file__).parent)

    def __call__(self, frame: FrameType, event: str, value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._package):
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
        return self
