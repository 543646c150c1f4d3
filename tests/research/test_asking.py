"""1. A few combinations are all tried. From many, some are proposed, by the scores and a derived seed only.
2. Proposals are values of the knobs, all different, and better than random ones. A lost run is not proposed again.
3. A study with three knobs of many values ends near the best for a fraction of the grid's cost. Resumed, it is the
   same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agentjet.research.journal import StudyLog
from agentjet.research.launcher import TrialLauncher
from agentjet.research.models import Arm, Knob, Setting, canonical
from agentjet.research.scheduler import EACH, FIRST, ROUNDS, is_searched, proposed, tune
from tests.research.world import KNOB, STUDY, Formula

LADDER = tuple(float(value) for value in np.geomspace(1.0, 256.0, 25))
SHARES = tuple(float(value) for value in np.linspace(0.0, 1.0, 25))
ARM = Arm("a", {"gain": 0.0}, (Knob("lr", LADDER), Knob("kl", SHARES), Knob("decay", SHARES)))
WIDE = replace(STUDY, arms=(ARM, Arm("b", {"gain": 3.0}, ARM.nuisance)), budget=200.0)


def height(setting: Setting, fidelity: float = 1.0) -> float:
    """Best at lr = 16, kl = .25, decay = .75."""
    lr, kl, decay = (float(setting[name]) for name in ("lr", "kl", "decay"))
    away = np.log2(lr / 16.0) ** 2 + 16 * (kl - 0.25) ** 2 + 4 * (decay - 0.75) ** 2
    return float(setting["gain"]) + 10.0 * fidelity - away


def test_few_combinations_are_tried_whole() -> None:
    assert not is_searched(STUDY.arms[0])
    assert not is_searched(Arm("a", {}, (KNOB, Knob("kl", (0.0, 1.0)))))
    assert is_searched(Arm("a", {}, (KNOB, Knob("kl", (0.0, 0.5, 1.0)))))


def test_proposals_come_from_the_scores_and_the_event_alone() -> None:
    first = proposed(WIDE, ARM, [])
    assert first == proposed(WIDE, ARM, []) and len(first) == FIRST
    assert first == [{**setting, "gain": 0.0} for setting in proposed(WIDE, WIDE.arms[1], [])]
    known = [(setting, height(setting)) for setting in first]
    second = proposed(WIDE, ARM, known)
    assert second == proposed(WIDE, ARM, known) and len(second) == EACH
    assert second != proposed(WIDE, ARM, [(setting, -score) for setting, score in known])
    assert first != proposed(replace(WIDE, seed=1), ARM, [])


def test_proposals_are_on_the_ladders_and_new() -> None:
    tiny = Arm("a", {}, (Knob("x", (1.0, 2.0, 3.0)), Knob("y", (1.0, 2.0, 3.0)), Knob("z", (1.0, 2.0))))
    known: list[tuple[Setting, float]] = []
    for number in range(1 + ROUNDS):
        score = float("-inf") if number == 0 else 1.0
        known += [(setting, score) for setting in proposed(WIDE, tiny, known)]
    assert all(setting[knob.name] in knob.values for setting, _ in known for knob in tiny.nuisance)
    assert len({canonical(dict(setting)) for setting, _ in known}) == len(known) == 18, "there are no more than 18"


def test_proposals_are_better_than_chance() -> None:
    drawn, learned = [], []
    for seed in range(12):
        study = replace(WIDE, seed=seed)
        known = [(setting, height(setting)) for setting in proposed(study, ARM, [])]
        drawn += [score for _, score in known]
        for _ in range(ROUNDS):
            known += [(setting, height(setting)) for setting in proposed(study, ARM, known)]
        learned += [score for _, score in known[-EACH:]]
    assert np.mean(learned) > np.mean(drawn) + 2.0


def test_a_wide_search_ends_near_the_best_and_is_repeatable() -> None:
    log = StudyLog()
    launcher = TrialLauncher(WIDE, log, Formula(score=height, noise=0.1))
    chosen = tune(WIDE, launcher)
    assert height(chosen["a"]) > 10.0 - 2.0
    assert launcher.spending.total < 60 < len(LADDER) * len(SHARES) ** 2
    again = TrialLauncher(WIDE, log, Formula(score=height, noise=0.1))
    entries = log.num_entries
    assert tune(WIDE, again) == chosen
    assert log.num_entries == entries, "nothing is launched or decided anew"
