"""Planted failures: each must be found and named by its cause, and its healthy twin must stay without a finding.

A kind is a `Plant` or a setting that fails, and a twin that looks like it and does not: entropy that falls because the
policy learns, answers that grow because longer ones are right, rewards that fall because the tasks became harder. Each
runs many times, every time in another world, through the researcher's own launcher. `python -m
bench.researching.planted` prints the findings of each kind.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from agentjet.research.diagnosis import diagnose
from agentjet.research.journal import StudyLog
from agentjet.research.launcher import TrialLauncher, seed_of
from agentjet.research.models import Arm, Outcome, Study, Trial
from agentjet.research.records import Setting
from bench.researching.failing import STEPS, Plant, Run, fingerprint

UNDISCLOSED = 9_000
"""First of the repeats that are scored. Thresholds were chosen on the first twenty."""


@dataclass(frozen=True)
class Side:
    """An environment and what is run in it: every arm with every seed."""

    plant: Plant = field(default_factory=Plant)
    settings: tuple[Setting, ...] = ({},)
    seeds: int = 1


@dataclass(frozen=True)
class Kind:
    name: str
    cause: str
    ill: Side
    well: Side


def single(plant: Plant | None = None, **setting: float) -> Side:
    return Side(plant or Plant(), ({f"job.{name.replace('__', '.')}": value for name, value in setting.items()},))


KL_ARMS: tuple[Setting, ...] = ({"job.recipe.kl_coef": 0.0}, {"job.recipe.kl_coef": 0.01})
KINDS = (
    Kind("learning rate 80 times too high", "unlearned", single(optimizer__lr=8.0), single(optimizer__lr=0.4)),
    Kind("tasks nobody solves", "too_hard", single(Plant(solvable=0.004)), single(Plant(difficulty=0.9))),
    Kind(
        "tasks everybody solves",
        "too_easy",
        single(Plant(difficulty=-4.0, given=0.002)),
        single(Plant(difficulty=-0.8)),
    ),
    Kind(
        "sampled at temperature 0.02",
        "no_exploration",
        single(Plant(difficulty=0.5), temperature=0.02),
        single(Plant(difficulty=0.5), temperature=0.7),
    ),
    Kind("advantages of the wrong sign", "unlearned", single(Plant(sign=-1.0)), single(Plant(harder_at=45))),
    Kind("the sampler keeps its weights", "stale_weights", single(Plant(sampler_stops_at=10)), single(max_staleness=3)),
    Kind("one seed for all", "duplicated_seed", Side(Plant(seed=7), seeds=2), Side(seeds=2)),
    Kind(
        "a key is not known",
        "ignored_setting",
        Side(Plant(ignores=("job.recipe.kl_coef",)), KL_ARMS),
        Side(settings=KL_ARMS),
    ),
    Kind(
        "a key is known and not used",
        "no_op",
        Side(Plant(unused=("job.recipe.kl_coef",)), KL_ARMS),
        Side(settings=({"job.group_size": 8}, {"job.group_size": 4})),
    ),
    Kind("held-out tasks are trained on", "leak", single(Plant(leaks=True)), single()),
    Kind(
        "broken data from step 50 on",
        "not_a_number",
        single(Plant(broken_rows=(50, STEPS))),
        single(Plant(broken_rows=(50, 53))),
    ),
    Kind("the server dies", "server_lost", single(Plant(dies_at=40)), single(Plant(silent=(40, 44)))),
    Kind("episodes hang", "dead_environment", single(Plant(hangs=0.95, hangs_at=40)), single(Plant(hangs=0.15))),
    Kind("crashes are scored 0", "dead_environment", single(Plant(mute_at=50)), single(Plant(harder_at=50))),
)

FAINT = {
    "learning rate 80 times too high": single(optimizer__lr=2.0),
    "sampled at temperature 0.02": single(Plant(difficulty=0.5), temperature=0.2),
    "the sampler keeps its weights": single(Plant(sampler_stops_at=60)),
    "held-out tasks are trained on": single(Plant(leaks=True), optimizer__lr=0.02),
    "broken data from step 50 on": single(Plant(broken_rows=(75, STEPS))),
    "episodes hang": single(Plant(hangs=0.6, hangs_at=70)),
    "crashes are scored 0": single(Plant(mute_at=80)),
}
"""The same failures where they are weak or late: how far down the rules see."""
HEALTHY = {
    "learning rate 0.02": single(optimizer__lr=0.02),
    "learning rate 0.2": single(optimizer__lr=0.2),
    "groups of 2": single(group_size=2),
    "groups of 32": single(group_size=32),
    "a KL term": single(recipe__kl_coef=0.3),
    "short answers only": single(max_tokens=6),
    "temperature 1.3": single(temperature=1.3),
    "easy tasks": single(Plant(difficulty=-0.5)),
    "hard tasks": single(Plant(difficulty=0.7)),
    "the first steps are not reported": single(Plant(silent=(0, 5))),
    "hardly any success at first": single(Plant(solvable=0.3)),
    "longer answers are right": single(Plant(length_helps=True)),
    "entropy falls by learning": single(Plant(difficulty=-0.3), optimizer__lr=0.3),
    "harder tasks from step 20 on": single(Plant(harder_at=20)),
}
"""Healthy runs that are not the twin of a failure."""


@cache
def trained(plant: Plant, setting: tuple[tuple[str, Any], ...], seed: int) -> Run:
    return Run(plant, dict(setting), seed, STEPS)


class FailingRunner:
    """Runs in memory. An infrastructure failure happens once: the second attempt succeeds."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self._healthy = replace(plant, dies_at=STEPS, mute_at=STEPS, hangs_at=STEPS)
        self._trials: dict[str, Trial] = {}

    def has(self, key: str) -> bool:
        return key in self._trials

    def launch(self, key: str, trial: Trial) -> None:
        self._trials[key] = trial

    def collect(self, key: str) -> Outcome:
        trial, run = self._trials[key], self._run(key)
        signals = {name: tuple(values) for name, values in run.signals.items()}
        if run.plant.dies_at < STEPS:
            return Outcome(trial.id, "infra_failed", signals=signals, note="connection refused")
        after = run.evaluated(run.weights[-1], 1)
        return Outcome(
            trial.id, "completed", score=after, signals=signals, settings=run.understood, facts=facts_of(run, after)
        )

    def _run(self, key: str) -> Run:
        trial = self._trials[key]
        plant = self._plant if key.endswith("-1") else self._healthy
        return trained(plant, tuple(sorted(trial.setting.items())), trial.seed)


def changes(weights: Sequence[np.ndarray[Any, Any]]) -> int:
    hashes = [fingerprint(w) for w in weights]
    return sum(before != after for before, after in pairwise(hashes))


def facts_of(run: Run, after: float) -> dict[str, float]:
    """As `agentjet.research.diagnosis` names them."""
    before, third = run.evaluated(run.weights[0], 0), len(run.rewards) // 3
    learner, sampler = changes(run.weights[-third - 2 : -1]), changes(run.sampler[-third - 1 :])
    return {
        "tasks_held_out": float(len(run.held_out)),
        "tasks_shared": float(len(run.held_out) if run.plant.leaks else 0),
        "held_out_before": before,
        "held_out_after": after,
        "held_out_error": float(np.sqrt((before * (1 - before) + after * (1 - after)) / 1000)),
    } | ({"learner_changes": float(learner), "sampler_changes": sampler / learner} if learner else {})


def said(name: str, side: Side, repeat: int) -> tuple[set[str], StudyLog]:
    """The causes named in one repeat, and the log."""
    arms = tuple(Arm(f"arm {number}", setting) for number, setting in enumerate(side.settings))
    study = Study(name, "success", 0.02, arms, (), budget=20.0, seed=repeat)
    launcher = TrialLauncher(study, StudyLog(), FailingRunner(replace(side.plant, world=repeat)))
    seeds = [seed_of(study, "confirm", number) for number in range(side.seeds)]
    launcher.run([Trial(study.id, arm.name, arm.changes, seed, "confirm") for arm in arms for seed in seeds])
    diagnose(launcher.log)
    return {found.cause for every in launcher.log.diagnoses.values() for found in every}, launcher.log


Said = Counter[str]
"""Number of runs by finding; the empty name counts runs without one."""


def counted(name: str, side: Side, repeats: range) -> Said:
    found = Counter(", ".join(sorted(said(name, side, repeat)[0])) for repeat in repeats)
    trained.cache_clear()
    return found


@dataclass(frozen=True)
class Confusions:
    """By name: the findings of the failures, of faint ones, and of their twins and other healthy runs."""

    ill: dict[str, Said]
    faint: dict[str, Said]
    well: dict[str, Said]

    @classmethod
    def of(cls, repeats: int, first: int) -> Confusions:
        numbers = range(first, first + repeats)
        return cls(
            {kind.name: counted(kind.name, kind.ill, numbers) for kind in KINDS},
            {name: counted(name, side, numbers) for name, side in FAINT.items()},
            {kind.name: counted(kind.name, kind.well, numbers) for kind in KINDS}
            | {name: counted(name, side, numbers) for name, side in HEALTHY.items()},
        )

    def summary(self) -> dict[str, Any]:
        correct = [share(self.ill[kind.name], kind.cause) for kind in KINDS]
        faint = [share(self.faint[kind.name], kind.cause) for kind in KINDS if kind.name in FAINT]
        healthy = sum(found.total() for found in self.well.values())
        alarms = healthy - sum(found[""] for found in self.well.values())
        interval = stats.binomtest(alarms, healthy).proportion_ci(method="exact")
        return {
            "diagnosis_correct": float(np.mean(correct)),
            "diagnosis_worst_kind": min(correct),
            "diagnosis_correct_faint": float(np.mean(faint)),
            "planted_kinds": len(KINDS),
            "false_alarms": alarms / healthy,
            "false_alarms_interval": [float(interval.low), float(interval.high)],
            "healthy_runs": healthy,
        }

    def table(self) -> Table:
        table = Table("planted", "cause", "correct", "said instead", "faint", "said instead", "false alarms", "said")
        for kind in KINDS:
            twin = self.well[kind.name]
            faint = answers_of(self.faint[kind.name], kind.cause) if kind.name in FAINT else ("", "")
            table.add_row(
                kind.name, kind.cause, *answers_of(self.ill[kind.name], kind.cause), *faint, *answers_of(twin, "")
            )
        for name in HEALTHY:
            table.add_row(name, "none: healthy", "", "", "", "", *answers_of(self.well[name], ""))
        return table


def share(found: Said, cause: str) -> float:
    return found[cause] / found.total()


def answers_of(found: Said, cause: str) -> tuple[str, str]:
    """The number of runs with the right finding (healthy runs: without a finding), and the other findings."""
    others = "; ".join(f"{name or 'nothing'} ({n})" for name, n in found.items() if name != cause)
    return f"{share(found, cause) if cause else 1 - share(found, cause):.2f}", others


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of each kind and of each twin")
    parser.add_argument("--first", type=int, default=UNDISCLOSED, help="number of the first repeat: others are others")
    options = parser.parse_args(arguments)
    found = Confusions.of(options.repeats, options.first)
    Console(width=160).print(found.table())
    result = found.summary()
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
