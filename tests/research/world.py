"""A world of formulas: a score is a formula of the setting and noise of the seed, and launches leave files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.research.journal import StudyKind, StudyLog
from agentjet.research.models import Arm, Hypothesis, Knob, Outcome, Study, Trial
from agentjet.research.records import Setting, canonical

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


@dataclass
class Formula:
    """A runner. With a folder, launches survive their process; a second launch of a key is an error."""

    score: Callable[[Setting, float], float] = hill
    noise: float = 0.3
    folder: Path | None = None
    lost: set[int] = field(default_factory=set)
    """Numbers of launches, from 1, whose runs the infrastructure loses."""
    always_lost: bool = False
    launched: dict[str, Trial] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        return (self.folder / key).exists() if self.folder else key in self.launched

    def launch(self, key: str, trial: Trial) -> None:
        assert not self.has(key), f"{key} is launched twice"
        if self.folder:
            (self.folder / key).write_text(canonical(trial.to_json()), encoding="utf-8")
        self.launched[key] = trial

    def collect(self, key: str) -> Outcome:
        assert self.has(key), f"{key} was never launched"
        trial = Trial.from_json(read(self.folder / key)) if self.folder else self.launched[key]
        if self.always_lost or (not self.folder and list(self.launched).index(key) + 1 in self.lost):
            return Outcome(trial.id, "infra_failed", note="lost")
        rng = np.random.default_rng([trial.seed, *canonical(dict(trial.setting)).encode()])
        noise = rng.normal() * self.noise * trial.fidelity
        return Outcome(trial.id, "completed", score=self.score(trial.setting, trial.fidelity) + noise)


def read(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


class Doomed(StudyLog):
    """Dies at one of its entries: before it, before it is committed, or after it."""

    def __init__(self, path: Path, number: int, moment: str) -> None:
        self._doom = (number, moment)
        super().__init__(path)

    def append(self, kind: StudyKind, body: Mapping[str, Any]) -> None:
        number, moment = self._doom
        if len(self.entries) < number:
            super().append(kind, body)
            return
        if moment == "within":
            assert self._database
            self._database.execute("BEGIN")
        if moment != "before":
            super().append(kind, body)
        os.kill(os.getpid(), signal.SIGKILL)
