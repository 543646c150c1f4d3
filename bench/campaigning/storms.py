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
from agentjet.research.campaign.models import Budget
from agentjet.research.campaign.notebook import Notebook
from agentjet.research.campaign.strategist import Strategist
from agentjet.research.journal import JournalEntry
from agentjet.research.models import Outcome, Trial
from agentjet.research.servers import ServerUnavailable
from bench.campaigning.planted import Planted
from bench.campaigning.repo import MemoryRepo
from bench.campaigning.world import SubjectRunner

HOUR = 3600.0
WEEK = 7 * 24 * HOUR


class FakeClock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Doomed(Notebook):
    """Kills its process as soon as an entry is on disk."""

    number = 0

    def entry(self, kind: str, content: object, because: Sequence[int] = (), *, key: str = "") -> JournalEntry:
        made = super().entry(kind, content, because, key=key)
        if made.number == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return made


def conduct(folder: Path, planted: Planted, question: Question, kill_at: int = 0) -> list[JournalEntry]:
    (folder / "launches").mkdir(parents=True, exist_ok=True)
    files = planted.files()
    repo = MemoryRepo(files)
    with Doomed(folder, now=lambda: 0.0) as notebook:
        notebook.number = kill_at
        runner = SubjectRunner(repo, files, folder / "launches")
        Campaign(question, notebook, repo, runner, [Strategist()], FakeClock()).run()
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


class StormyRunner:
    """A runner whose runs take hours, and whose calls fail by chance."""

    def __init__(self, inner: SubjectRunner, clock: FakeClock, rng: np.random.Generator, ended: set[str]) -> None:
        """`ended` are the keys of runs that took their time before a reboot."""
        self._inner, self._clock, self._rng, self._ended = inner, clock, rng, ended
        self.failures = {"reboot": 0, "dead server": 0, "full disk": 0, "lost run": 0}

    def has(self, key: str) -> bool:
        return self._inner.has(key)

    def launch(self, key: str, trial: Trial) -> None:
        self.maybe("full disk", 0.15, OSError(28, "No space left on device"))
        self._inner.launch(key, trial)
        self.maybe("reboot", 0.05, Reboot())

    def collect(self, key: str) -> Outcome:
        self.maybe("dead server", 0.15, ServerUnavailable("no server answers"))
        if key not in self._ended:
            self._clock.seconds += 6 * HOUR * self._rng.random()
            self._ended.add(key)
            self.maybe("reboot", 0.1, Reboot())
        found = self._inner.collect(key)
        if key.endswith(" 1") and self._rng.random() < 0.1:
            self.failures["lost run"] += 1
            return Outcome(found.trial, "infra_failed", note="the server died")
        return found

    def maybe(self, name: str, chance: float, error: BaseException) -> None:
        if self._rng.random() < chance:
            self.failures[name] += 1
            raise error


class FullDisk(Notebook):
    """Its disk is full now and then."""

    rng: np.random.Generator
    full = 0

    def entry(self, kind: str, content: object, because: Sequence[int] = (), *, key: str = "") -> JournalEntry:
        if self.rng.random() < 0.05:
            self.full += 1
            raise sqlite3.OperationalError("database or disk is full")
        return super().entry(kind, content, because, key=key)


def week(planted: Planted, seed: int = 0) -> tuple[bool, Mapping[str, Any]]:
    """True if a campaign with a budget of a week ends within it after each kind of trouble; and what happened."""
    rng, clock = np.random.default_rng([seed, 77]), FakeClock()
    question = Question("a week", Budget(hours=WEEK / HOUR))
    files = planted.files()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "launches").mkdir()
        happened: dict[str, int] = {}
        ended_runs: set[str] = set()
        for starts in range(1, 200):  # noqa: B007  # read after the loop
            repo = MemoryRepo(files)
            runner = StormyRunner(SubjectRunner(repo, files, folder / "launches"), clock, rng, ended_runs)
            with FullDisk(folder, now=lambda: 0.0) as notebook:
                notebook.rng = rng
                try:
                    ended = Campaign(question, notebook, repo, runner, [Strategist()], clock).run()
                except Reboot:
                    clock.seconds += 0.2 * HOUR
                    continue
                finally:
                    for kind, count in {**runner.failures, "full notebook": notebook.full}.items():
                        happened[kind] = happened.get(kind, 0) + count
                break
        spent = ended["spent"]["hours"]
        facts = {**happened, "starts": starts, "hours": spent, "accepted": ended["accepted"]}
        troubled = all(happened[kind] for kind in ("reboot", "dead server", "full disk", "full notebook"))
        return spent <= WEEK / HOUR and bool(ended["accepted"]) and troubled, facts
