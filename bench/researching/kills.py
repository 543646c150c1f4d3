"""A study killed by SIGKILL at every entry of its journal, and gone on with: is it the same study in the end?"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentjet.research.journal import StudyKind, StudyLog, read_log
from agentjet.research.models import Study, Trial
from agentjet.research.records import canonical
from agentjet.research.scheduler import conduct
from bench.researching.runner import WorldRunner
from bench.researching.world import World


class KeptRunner(WorldRunner):
    """Launches outlive the process that made them, as files; a second launch of a key is an error."""

    def __init__(self, world: World, rungs: tuple[float, ...], folder: Path) -> None:
        super().__init__(world, rungs)
        self._folder = folder
        for path in folder.glob("*-?"):
            super().launch(path.name, Trial.from_json(json.loads(path.read_text(encoding="utf-8"))))

    def launch(self, key: str, trial: Trial) -> None:
        with (self._folder / key).open("x", encoding="utf-8") as file:
            file.write(canonical(trial.to_json()))
        super().launch(key, trial)


class Doomed(StudyLog):
    """Kills its process as soon as an entry is on disk, before anybody acts on it."""

    def __init__(self, path: Path, number: int) -> None:
        self._number = number
        super().__init__(path)

    def append(self, kind: StudyKind, body: Mapping[str, Any]) -> None:
        super().append(kind, body)
        if len(self.entries) > self._number:
            os.kill(os.getpid(), signal.SIGKILL)


Ending = tuple[list[dict[str, Any]], float, list[str]]
"""Findings, spending, and the keys that were launched."""


def resume_identical(study: Study, world: World) -> tuple[bool, int]:
    """True if a journal, killed at each entry in turn, ends as an undisturbed one; and the number of kills."""
    with tempfile.TemporaryDirectory() as name:
        quiet, stormy = Path(name, "quiet"), Path(name, "stormy")
        quiet.mkdir()
        stormy.mkdir()
        undisturbed = finish(study, world, quiet)
        num_entries = len(read_log(quiet / "journal").entries)
        for number in range(num_entries):
            begin_and_die(study, world, stormy, number)
        return finish(study, world, stormy) == undisturbed, num_entries


def finish(study: Study, world: World, folder: Path) -> Ending:
    with StudyLog(folder / "journal") as journal:
        findings, launcher = conduct(study, journal, KeptRunner(world, study.rungs, folder))
    return [found.to_json() for found in findings], launcher.spending.total, sorted(p.name for p in folder.glob("*-?"))


def begin_and_die(study: Study, world: World, folder: Path, number: int) -> None:
    """Runs in a separate process. Raises `RuntimeError` if the study ended, or failed, before it was killed."""
    child = os.fork()
    if child == 0:
        try:
            conduct(study, Doomed(folder / "journal", number), KeptRunner(world, study.rungs, folder))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
        raise RuntimeError(f"the study was to be killed at entry {number}, and ended with status {status}")
