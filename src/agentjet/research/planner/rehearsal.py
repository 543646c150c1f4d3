"""What a study would cost, found out by conducting it on made-up scores: the procedure itself says what it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from agentjet.research.journal import Book
from agentjet.research.models import Outcome, Study, Trial, canonical
from agentjet.research.scheduler import conduct

PLENTY = 1e6
"""A budget that no study exhausts, in full runs."""


@dataclass(frozen=True)
class Cost:
    """In full runs."""

    least: float
    """Where every claim is plain at the first look, and early ranks are those of the end."""
    most: float
    """Where nothing is decided before the last look, and early ranks mislead."""


def rehearse(study: Study) -> Cost:
    plenty = replace(study, budget=PLENTY)
    return Cost(
        *(conduct(plenty, Book(), MadeUp(plenty, plain=plain))[1].ledger.total for plain in (True, False)),
    )


class MadeUp:
    """A runner without runs: arms far apart and ranked alike throughout, or ranked the other way round early on, and in
    the end so alike that only the last look can say so.
    """

    def __init__(self, study: Study, *, plain: bool) -> None:
        self._sesoi = study.sesoi
        self._apart = {arm.name: 1e3 * study.sesoi * number for number, arm in enumerate(study.arms)}
        self._plain = plain
        self._trials: dict[str, Trial] = {}

    def has(self, key: str) -> bool:
        return key in self._trials

    def launch(self, key: str, trial: Trial) -> None:
        self._trials[key] = trial

    def collect(self, key: str) -> Outcome:
        trial = self._trials[key]
        setting = noise(canonical(dict(trial.setting)))
        seed = noise(trial.id)
        if self._plain:
            score = self._apart[trial.arm] + setting + 1e-3 * seed
        elif trial.phase == "explore":
            score = 10 * self._sesoi * (setting if trial.fidelity == 1 else -setting)
        else:
            score = 0.1 * self._sesoi * seed
        return Outcome(trial.id, "completed", score=score)


def noise(name: str) -> float:
    return float(np.random.default_rng([*name.encode()]).normal())
