"""Kinds that the tests load by import path: a game, and environments that misbehave."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentjet.environments import EnvironmentTask, Game, Kind, Model, Observation
from agentjet.types import Reward


class Corridor(Game):
    """Reach the end of a corridor: `right` is one step nearer, and gives 0.5."""

    length: int = 2
    """Number of steps."""
    crash_share: float = 0.0
    """Share of the episodes that crash, by the tasks' numbers."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        for number in range(10):
            yield EnvironmentTask(f"corridor-{number}", {"number": number}, "held_out" if number > 7 else "train")

    def world(self, task: EnvironmentTask) -> CorridorWorld:
        return CorridorWorld(self, task.payload["number"])


class CorridorWorld:
    def __init__(self, kind: Corridor, number: int) -> None:
        self._kind, self._number, self._place = kind, number, 0

    def reset(self) -> Observation:
        return self._seen("A corridor.")

    def step(self, action: Any) -> Observation:
        self._place += action == "right"
        if self._number / 8 < self._kind.crash_share:
            os._exit(3)
        return self._seen(f"You went {action}.", 0.5 * (action == "right"))

    def close(self) -> None:
        pass

    def _seen(self, text: str, reward: float = 0.0) -> Observation:
        is_done = self._place >= self._kind.length
        metrics = {"place": self._place}
        why = "the end is reached" if is_done else ""
        return Observation(text, reward, is_done, ["left", "right"], metrics=metrics, why=why)


class Listing(Kind):
    """Lists tasks with these ids."""

    ids: tuple[Any, ...] = ()
    """Ids of the tasks."""
    payload: Any = None
    """Payload of each task."""
    megabytes: int = 0
    """Size of the payload."""
    hangs: bool = False
    """True: listing does not end."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        while self.hangs:
            time.sleep(1)
        for task_id in self.ids:
            yield EnvironmentTask(task_id, {"text": "x" * (self.megabytes << 20), "value": self.payload})

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        return Reward(1.0)


class ListingOthers(Listing):
    """Lists what is not a task: its target is a split, or empty."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        yield EnvironmentTask("a", {}, self.target) if self.target else "a"  # type: ignore[arg-type, misc]


class OfAWrongRequirement(Listing):
    requires = "pydantic~=2.0"


class Unloadable(Listing):
    requires = "no-such-package>=2"


class OfAnotherVersion(Listing):
    requires = "pydantic>=1,<2"


class WithoutProgram(Listing):
    requires = "pydantic>=2"
    needs = "no-such-program"
    install = "apt-get install no-such-program"


# ---- misbehaviour ----------------------------------------------------------------------------------------------------


def _spawn_far_away() -> None:
    """Starts a process in another session, whose parent ends at once."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(os.environ["AGENTJET_CALLER"], "left.pid").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(os.environ["AGENTJET_CALLER"], "left.pid").exists():
        time.sleep(0.01)


def _leave_process_and_end() -> None:
    _spawn_far_away()
    os._exit(5)


def _leave_process() -> Reward:
    _spawn_far_away()
    subprocess.Popen(["sleep", "600"])
    return Reward(1.0)


def _print_much() -> None:
    while True:
        print("x" * 1_000_000)


def _write_to_every_descriptor(line: bytes = b"{}\n") -> None:
    for descriptor in range(3, 20):
        with suppress(OSError):
            os.write(descriptor, line)
    time.sleep(600)


def _close_everything() -> Reward:
    os.closerange(1, 20)
    return Reward(1.0)


def _close_output() -> Reward:
    os.write(1, b"garbage\n")
    os.close(1)
    return Reward(1.0)


def _change_all() -> Reward:
    changed = {"left": float("LEFT" in os.environ), "moved": float(Path.cwd() == Path("/"))}
    os.environ["LEFT"] = "1"
    os.chdir("/")
    return Reward(0.0, metrics=changed)


def _hang_and_refuse_to_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)


def _use_memory() -> None:
    """In a child, so that no process alone exceeds the limit of 280 MiB."""
    code = "import time; kept = b'x' * (150 << 20); time.sleep(600)"
    kept = b"x" * (150 << 20)
    subprocess.run([sys.executable, "-c", code])
    del kept


MISBEHAVIOUR: dict[str, Callable[[], Any]] = {
    "no_score": lambda: None,
    "number": lambda: 1.0,
    "nan": lambda: Reward(math.nan),
    "raises": lambda: [][0],
    "exits": lambda: sys.exit(3),
    "exits_at_once": lambda: print("so long", flush=True) or os._exit(7),
    "segfaults": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(600),
    "refuses_to_end": _hang_and_refuse_to_end,
    "kills_group": lambda: os.killpg(0, signal.SIGKILL),
    "kills_parent": lambda: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(600),
    "prints_much": _print_much,
    "writes_everywhere": _write_to_every_descriptor,
    "nests_deeply": lambda: _write_to_every_descriptor(b"[" * 50_000 + b"\n"),
    "closes_everything": _close_everything,
    "closes_output": _close_output,
    "huge_answer": lambda: Reward(1.0, metrics={"x" * (70 << 20): 1.0}),
    "leaves_process": _leave_process,
    "leaves_process_and_ends": _leave_process_and_end,
    "changes_all": _change_all,
    "uses_memory": _use_memory,
}


def _remove_folder() -> Reward:
    os.rmdir(Path.cwd())
    return Reward(1.0)


MISBEHAVIOUR["removes_folder"] = _remove_folder
MISBEHAVIOUR["many_metrics"] = lambda: Reward(1.0, metrics={f"m{number}": 1.0 for number in range(65)})
OBSERVATIONS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "number_as_text": lambda: Observation(12),  # type: ignore[arg-type]
    "no_reward": lambda: Observation("a", None),  # type: ignore[arg-type]
    "text_as_actions": lambda: Observation("a", actions="abc"),
    "numbers_as_actions": lambda: Observation("a", actions=[1, 2]),  # type: ignore[list-item]
    "generated_actions": lambda: Observation("a", actions=(word for word in "ab")),  # type: ignore[arg-type]
    "list_as_schema": lambda: Observation("a", schema=[1]),  # type: ignore[arg-type]
    "no_metrics": lambda: Observation("a", metrics=None),  # type: ignore[arg-type]
}


class Misobserving(Game):
    """A game whose target is what its first observation is."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        yield EnvironmentTask("only", {})

    def world(self, task: EnvironmentTask) -> MisobservedWorld:
        return MisobservedWorld(self.target)


class MisobservedWorld:
    def __init__(self, what: str) -> None:
        self._what = what

    def reset(self) -> Observation:
        return OBSERVATIONS[self._what]()  # type: ignore[no-any-return]

    def step(self, action: Any) -> Observation:
        return Observation("", done=True)

    def close(self) -> None:
        pass


class Misbehaving(Kind):
    """An environment whose target is what it does wrong."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        yield EnvironmentTask("only", {})

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        return MISBEHAVIOUR[self.target]()  # type: ignore[no-any-return]


class Prying(Kind):
    """Reads, writes and connects where a sandbox does not allow it; asks the model."""

    secret: str = ""
    """A file outside."""
    port: int = 0
    """A port of this machine."""

    def tasks(self) -> Iterator[EnvironmentTask]:
        yield EnvironmentTask("only", {})

    def play(self, task: EnvironmentTask, model: Model) -> Reward:
        with suppress(OSError):
            return Reward(1.0, text=Path(self.secret).read_text())
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1.0)
            return Reward(1.0, text="connected")
        text = model.chat([{"role": "user", "content": "corridor"}])["content"]
        return Reward(0.5, text=f"{text} {os.environ['OPENAI_BASE_URL'] == model.base_url}")
