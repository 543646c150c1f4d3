"""`WorldRunner`: the world behind the researcher's runner. Waiting runs are computed together."""

from __future__ import annotations

from agentjet.research.models import Outcome, Trial
from agentjet.research.records import canonical
from bench.researching.world import STEPS, World, curves, measured


class WorldRunner:
    """Runs in memory; a longer run of the same setting and seed is the continuation of the shorter one."""

    def __init__(self, world: World, rungs: tuple[float, ...]) -> None:
        self._world = world
        self._marks = [round(STEPS * rung) for rung in rungs]
        self._trials: dict[str, Trial] = {}
        self._curves: dict[str, list[float]] = {}

    def has(self, key: str) -> bool:
        return key in self._trials

    def launch(self, key: str, trial: Trial) -> None:
        self._trials[key] = trial

    def collect(self, key: str) -> Outcome:
        trial = self._trials[key]
        if name_of(trial) not in self._curves:
            self._compute()
        seen = self._curves[name_of(trial)][: self._marks.index(round(STEPS * trial.fidelity)) + 1]
        return Outcome(trial.id, "completed", score=seen[-1], curve=tuple(seen))

    def _compute(self) -> None:
        waiting = {name_of(trial): trial for trial in self._trials.values() if name_of(trial) not in self._curves}
        trials = list(waiting.values())
        true = curves(self._world, [t.setting for t in trials], [t.seed for t in trials], self._marks)
        for name, trial, scores in zip(waiting, trials, true, strict=True):
            self._curves[name] = [
                measured(self._world, trial.setting, trial.seed, mark, float(score))
                for mark, score in zip(self._marks, scores, strict=True)
            ]


def name_of(trial: Trial) -> str:
    return canonical([dict(trial.setting), trial.seed])
