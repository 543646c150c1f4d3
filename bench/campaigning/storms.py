"""A campaign killed at every entry of its notebook, and a week with reboots, dead servers and full disks."""

from __future__ import annotations

import os
import signal
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.research.campaign.campaign import Campaign, Question
from agentjet.research.campaign.laboratory import LaboratoryAway
from agentjet.research.campaign.models import Budget, Observation, Order
from agentjet.research.campaign.notebook import Entry, EntryKind, Notebook
from agentjet.research.campaign.strategist import Strategist
from agentjet.research.models import Study
from bench.campaigning.planted import Planted
from bench.campaigning.repo import MemoryRepo
from bench.campaigning.world import WorldLaboratory

HOUR = 3600.0
WEEK = 7 * 24 * HOUR


class FakeClock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class Doomed(Notebook):
    """Kills its process as soon as an entry is on disk."""

    number = 0

    def entry(self, kind: EntryKind, content: object, because: Sequence[int] = (), *, key: str = "") -> Entry:
        made = super().entry(kind, content, because, key=key)
        if made.number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return made


def conduct(folder: Path, planted: Planted, question: Question, kill_at: int = 0) -> list[Entry]:
    (folder / "launches").mkdir(parents=True, exist_ok=True)
    files = planted.files()
    repo = MemoryRepo(files)
    with Doomed(folder, now=lambda: 0.0) as notebook:
        notebook.number = kill_at
        laboratory = WorldLaboratory(repo, files, folder / "launches")
        Campaign(question, notebook, repo, laboratory, [Strategist()], FakeClock()).run()
        return notebook.entries


def resume_identical(planted: Planted, question: Question) -> tuple[bool, int]:
    """True if a campaign, killed at each entry in turn, ends as an undisturbed one; and the number of kills."""
    with tempfile.TemporaryDirectory() as name:
        quiet, stormy = Path(name, "quiet"), Path(name, "stormy")
        undisturbed = conduct(quiet, planted, question)
        for number in range(1, len(undisturbed)):
            die(stormy, planted, question, number)
        same = conduct(stormy, planted, question) == undisturbed
        launches = [sorted(path.name for path in (folder / "launches").iterdir()) for folder in (quiet, stormy)]
        return same and launches[0] == launches[1], len(undisturbed) - 1


def die(folder: Path, planted: Planted, question: Question, number: int) -> None:
    """Runs in a separate process. Raises `RuntimeError` if the campaign ended before it was killed."""
    child = os.fork()
    if child == 0:
        try:
            conduct(folder, planted, question, kill_at=number)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise RuntimeError(f"the campaign was to be killed at entry {number}, and ended with status {status}")


class Reboot(BaseException):
    """The machine restarts: nothing in memory is left."""


class StormyLaboratory:
    """A laboratory whose runs take hours, and whose calls fail by chance."""

    def __init__(self, inner: WorldLaboratory, clock: FakeClock, rng: np.random.Generator) -> None:
        self._inner, self._clock, self._rng = inner, clock, rng
        self.failures = {"reboot": 0, "dead server": 0, "full disk": 0, "lost run": 0}

    def has(self, key: str) -> bool:
        return self._inner.has(key)

    def launch(self, key: str, order: Order) -> None:
        self.maybe("full disk", 0.1, OSError(28, "No space left on device"))
        self._inner.launch(key, order)
        self.maybe("reboot", 0.08, Reboot())

    def collect(self, key: str) -> Observation:
        self.maybe("dead server", 0.15, LaboratoryAway("no server answers"))
        self._clock.time += 2 * HOUR * self._rng.random()
        self.maybe("reboot", 0.08, Reboot())
        found = self._inner.collect(key)
        if key.endswith(" 1") and self._rng.random() < 0.1:
            self.failures["lost run"] += 1
            return Observation(found.commit, found.seed, found.share, error="the server died")
        return found

    def runner(self, study: Study) -> Any:
        inner = self._inner.runner(study)
        storm = self

        class Stormy:
            def has(self, key: str) -> bool:
                return inner.has(key)

            def launch(self, key: str, trial: Any) -> None:
                inner.launch(key, trial)

            def collect(self, key: str) -> Any:
                storm.maybe("dead server", 0.02, LaboratoryAway("no server answers"))
                storm._clock.time += HOUR * storm._rng.random()
                storm.maybe("reboot", 0.02, Reboot())
                return inner.collect(key)

        return Stormy()

    def maybe(self, name: str, chance: float, error: BaseException) -> None:
        if self._rng.random() < chance:
            self.failures[name] += 1
            raise error


class FullDisk(Notebook):
    """Its disk is full now and then."""

    rng: np.random.Generator
    full = 0

    def entry(self, kind: EntryKind, content: object, because: Sequence[int] = (), *, key: str = "") -> Entry:
        if self.rng.random() < 0.05:
            self.full += 1
            raise sqlite3.OperationalError("database or disk is full")
        return super().entry(kind, content, because, key=key)


def week(planted: Planted, seed: int = 0) -> tuple[bool, Mapping[str, Any]]:
    """True if a campaign with a budget of a week ends within it, in spite of everything; and what happened."""
    rng, clock = np.random.default_rng([seed, 77]), FakeClock()
    question = Question("a week", Budget(hours=WEEK / HOUR))
    files = planted.files()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "launches").mkdir()
        happened: dict[str, int] = {}
        for starts in range(1, 200):  # noqa: B007  # read after the loop
            repo = MemoryRepo(files)
            laboratory = StormyLaboratory(WorldLaboratory(repo, files, folder / "launches"), clock, rng)
            with FullDisk(folder, now=lambda: 0.0) as notebook:
                notebook.rng = rng
                try:
                    ended = Campaign(question, notebook, repo, laboratory, [Strategist()], clock).run()
                except Reboot:
                    clock.time += 0.2 * HOUR
                    continue
                finally:
                    for kind, count in {**laboratory.failures, "full notebook": notebook.full}.items():
                        happened[kind] = happened.get(kind, 0) + count
                digests = len(notebook.of("digest"))
                break
        spent = ended["spent"]["hours"]
        facts = {**happened, "starts": starts, "hours": spent, "digests": digests, "accepted": ended["accepted"]}
        return spent <= WEEK / HOUR and bool(ended["accepted"]) and starts > 1, facts
