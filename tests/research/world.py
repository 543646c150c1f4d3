"""A world of formulas: a score is a formula of the setting and noise of the seed, and launches leave files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import numpy as np

from agentjet.errors import AgentJetError
from agentjet.research.journal import JournalEntry, StudyLog
from agentjet.research.models import Address, Arm, Hypothesis, Knob, Outcome, Setting, Study, Trial, canonical
from agentjet.research.swarm_runner import RunningServer, ServerUnavailable

KNOB = Knob("lr", (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0))
STUDY = Study(
    topic="does b help?",
    metric="reward/mean",
    sesoi=1.0,
    arms=(Arm("a", {"gain": 0.0}, (KNOB,)), Arm("b", {"gain": 3.0}, (KNOB,))),
    hypotheses=(Hypothesis("b scores higher than a", "b", "a"),),
    budget=80.0,
)


def hill(setting: Setting, fidelity: float) -> float:
    """Best at lr = 16, where the runs are ranked alike at every length."""
    return (10.0 - np.log2(float(setting["lr"]) / 16.0) ** 2 + float(setting["gain"])) * fidelity


def late(setting: Setting, fidelity: float) -> float:
    """Large rates are best early, small ones at the end: the best is lr = 1."""
    height = np.log2(float(setting["lr"]))
    return float(setting["gain"]) + (height if fidelity < 1 else -height)


@dataclass(kw_only=True)
class Launches:
    """The launches of a runner. With a folder they survive their process; a second launch of a key is an error."""

    folder: Path | None = None
    launched: dict[str, Trial] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        return file_of(self.folder, key).exists() if self.folder else key in self.launched

    def launch(self, key: str, trial: Trial) -> None:
        assert not self.has(key), f"{key} is launched twice"
        if self.folder:
            file_of(self.folder, key).write_text(canonical(trial.to_json()), encoding="utf-8")
        self.launched[key] = trial

    def trial(self, key: str) -> Trial:
        if self.folder:
            return Trial.from_json(json.loads(file_of(self.folder, key).read_text(encoding="utf-8")))
        return self.launched[key]


def file_of(folder: Path, key: str) -> Path:
    return folder / key.replace(" ", "_")


@dataclass
class Formula(Launches):
    """A runner whose scores are a formula and noise."""

    score: Callable[[Setting, float], float] = hill
    noise: float = 0.3
    lost: set[int] = field(default_factory=set)
    """Numbers of launches, from 1, whose runs the infrastructure loses."""
    always_lost: bool = False

    def collect(self, key: str) -> Outcome:
        trial = self.trial(key)
        if self.always_lost or (not self.folder and list(self.launched).index(key) + 1 in self.lost):
            return Outcome(trial.id, "infra_failed", note="lost")
        rng = np.random.default_rng([trial.seed, *canonical(dict(trial.setting)).encode()])
        noise = rng.normal() * self.noise * trial.fidelity
        return Outcome(trial.id, "completed", score=self.score(trial.setting, trial.fidelity) + noise)


class Doomed(StudyLog):
    """Dies at one of its entries: before it, before it is committed, or after it."""

    def __init__(self, path: Path, number: int, moment: str) -> None:
        self._doom = (number, moment)
        super().__init__(path)

    def entry(self, kind: str, content: object, because: Sequence[int] = (), *, key: str = "") -> JournalEntry:
        number, moment = self._doom
        if len(self.entries) < number:
            return super().entry(kind, content, because, key=key)
        if moment == "within":
            assert self._database
            self._database.execute("BEGIN")
        if moment != "before":
            super().entry(kind, content, because, key=key)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")


def killed(work: Callable[[], object]) -> None:
    """Runs `work` in another process, which kills itself on the way."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)  # It was not killed, which the parent sees.
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status


@dataclass
class FakeSlot:
    """A slot that works, then raises its error, or serves without one. It records requests and finished runs."""

    error: Exception | None = field(default_factory=lambda: AgentJetError("over"))
    name: str = "nowhere"
    is_gone: bool = False
    """`check` gets no answer."""
    before: Callable[[Path, Setting], None] = lambda run, settings: None
    """Called with the run's folder, in place of the work."""
    machine: str = ""
    asked: list[Setting] = field(default_factory=list)
    finished: list[Path] = field(default_factory=list)

    @contextmanager
    def serve(self, run: Path, settings: Setting, stopping: Event) -> Iterator[RunningServer]:
        (run / "trace").touch()
        self.asked.append(settings)
        self.before(run, settings)
        if self.error is not None:
            raise self.error
        yield RunningServer(Address("http://127.0.0.1:9", ""), check=lambda: None, machine=self.machine)

    def check(self) -> None:
        if self.is_gone:
            raise ServerUnavailable(f"--server {self.name}: no answer")

    def run_finished(self, run: Path) -> None:
        self.finished.append(run)
