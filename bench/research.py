"""Correctness and cost of the researcher's conclusions: `python -m bench.research`.

Studies with known answers (`cases/studies.toml`) are each conducted many times with fresh seeds, beside the verdicts of
a whole grid. A score is a formula of setting and length of a run, plus noise of the seed, so the truth is known: an
effect of at least the smallest of interest has its sign as the right verdict, a smaller one is equivalence.

Prints tables, then one JSON object as the last line. `wrong` and `abstain` are means over all studies, `correct` over
the decidable ones: those that one look at the last number of seeds would decide with a power of .8. `cost_vs_grid`
compares with the cheapest grid that is wrong no more often and right no less often. So a grid that is seldom wrong
because it seldom answers does not count. `resume_identical` are the tests that kill a study at every entry of its
journal. At the end come planted failures and their healthy twins: `diagnosis_correct` is a mean over kinds,
`false_alarms` over healthy runs.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy import integrate, special, stats

from agentjet.research.journal import StudyLog
from agentjet.research.models import Arm, Hypothesis, Knob, Outcome, Setting, Study, Trial, Verdict, canonical
from agentjet.research.scheduler import conduct
from agentjet.research.statistics import nominal_level, read
from bench.machine import CASES, grid, report, tests_pass
from tests.research.planted_failures import UNDISCLOSED, Confusions

Floats = NDArray[np.float64]
RATES = tuple(2.0**power for power in range(8))  # Learning rates that an arm tunes over
LOOKS = (4, 8, 16)
ALPHA = 0.05
ENOUGH_POWER = 0.8
GRID_SEEDS = (4, 8, 12, 16, 20, 24)
RUINED = 30.0  # Points that a ruined seed loses
CALLED = ("supported", "refuted")


@dataclass(frozen=True)
class Case:
    """A study of `cases/studies.toml`; scores are points of 100."""

    name: str
    gain: float
    spread: float = 1.0
    sesoi: float = 2.0
    tuned: bool = True
    crosses: bool = False  # Large rates are best in short runs, small ones at the end
    lottery: float = 0.0

    @property
    def effect(self) -> float:
        return self.gain - self.lottery * RUINED

    @property
    def truth(self) -> Verdict:
        if abs(self.effect) < self.sesoi:
            return "practically_equivalent"
        return "supported" if self.effect > 0 else "refuted"

    @property
    def power(self) -> float:
        """Chance that one look at the last number of seeds decides rightly."""
        level = 2 * ALPHA if self.truth == "practically_equivalent" else nominal_level(LOOKS, 2 * ALPHA)
        unequal = math.hypot(self.spread, RUINED * math.sqrt(self.lottery * (1 - self.lottery)))
        return power(self.effect, (self.spread, unequal), LOOKS[-1], sesoi=self.sesoi, level=level)

    def study(self, seed: int) -> Study:
        nuisance = (Knob("lr", RATES),) if self.tuned else ()
        arms = (Arm("a", {"gain": 0.0}, nuisance), Arm("b", {"gain": self.gain, "lottery": self.lottery}, nuisance))
        claims = (Hypothesis("b scores higher than a", "b", "a"),)
        budget = 32.0 * len(arms)
        return Study(self.name, "points", self.sesoi, arms, claims, budget=budget, looks=LOOKS, seed=seed)

    def score(self, setting: Setting, seed: int, share: float) -> float:
        """The score of a run after a share of its length. The noise of a seed is that of the whole run."""
        height = np.log2(float(setting.get("lr", 16.0)) / 16.0)
        loss = (height if share == 1.0 else -height) if self.crosses else height**2
        rng = np.random.default_rng([seed, *canonical(dict(setting)).encode()])
        noise = self.spread * rng.normal() - RUINED * (rng.random() < float(setting.get("lottery", 0.0)))
        return float(40.0 + share * (10.0 - loss + float(setting["gain"]) + noise))


class CaseRunner:
    """A `TrialRunner` of formulas, in memory."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._trials: dict[str, Trial] = {}

    def has(self, key: str) -> bool:
        return key in self._trials

    def launch(self, key: str, trial: Trial) -> None:
        self._trials[key] = trial

    def collect(self, key: str) -> Outcome:
        trial = self._trials[key]
        score = self._case.score(trial.setting, trial.seed, trial.fidelity)
        return Outcome(trial.id, "completed", score=score, curve=(score,))


def power(effect: float, deviations: tuple[float, float], seeds: int, *, sesoi: float, level: float) -> float:
    """Chance that one look of `seeds` per arm gives the right verdict (see `read`), for normal scores and the true
    `effect`.

    An effect of at least `sesoi` must get the verdict of its sign, a smaller one must be called equivalent.
    """
    variances = [deviation**2 / seeds for deviation in deviations]
    error = math.sqrt(sum(variances))
    degrees = sum(variances) ** 2 / sum(v**2 / (seeds - 1) for v in variances)
    quantile = float(special.stdtrit(degrees, 1 - level / 2))

    def over_errors(chance: Floats, scales: Floats) -> float:
        return float(integrate.trapezoid(chance * stats.chi.pdf(scales, degrees), scales))

    scales = np.linspace(1e-6, math.sqrt(degrees) + 8, 2_000)
    estimated = error * scales / math.sqrt(degrees)
    if abs(effect) >= sesoi:
        needed = sesoi + quantile * estimated
        return over_errors(stats.norm.sf(needed, loc=abs(effect), scale=error), scales)
    room = np.maximum(0.0, sesoi - quantile * estimated)
    return over_errors(
        stats.norm.cdf(room, loc=effect, scale=error) - stats.norm.cdf(-room, loc=effect, scale=error), scales
    )


def conducted(case: Case, repeats: int, first: int) -> tuple[list[Verdict], float]:
    """The researcher's verdicts, and the mean cost of a study in full runs."""
    verdicts, costs = list[Verdict](), []
    for repeat in range(repeats):
        [finding], launcher = conduct(case.study(first + repeat), StudyLog(), CaseRunner(case))
        verdicts.append(finding.verdict)
        costs.append(launcher.spending.total)
    return verdicts, float(np.mean(costs))


def grid_verdicts(case: Case, num_seeds: int, repeats: int, first: int) -> list[Verdict]:
    """Verdicts of a whole grid of so many seeds: each arm at its best mean, tested once."""
    found = []
    rates = RATES if case.tuned else (16.0,)
    for repeat in range(repeats):
        seeds = [1_000_000 + 1000 * (first + repeat) + number for number in range(num_seeds)]
        best = []
        for arm in case.study(0).arms:
            rows = [[case.score({**arm.changes, "lr": lr}, seed, 1.0) for seed in seeds] for lr in rates]
            best.append(max(rows, key=lambda row: float(np.mean(row))))
        a, b = best
        found.append(read(b, a, sesoi=case.sesoi, difference_level=2 * ALPHA, equivalence_level=ALPHA).verdict)
    return found


def rates(cases: Sequence[Case], verdicts: Sequence[Sequence[Verdict]]) -> tuple[float, float, float]:
    """Wrong and inconclusive verdicts of all studies, and right ones of the decidable: wrong, correct, abstain."""
    pairs = list(zip(cases, verdicts, strict=True))
    wrong = [np.mean([one not in ("inconclusive", case.truth) for one in each]) for case, each in pairs]
    correct = [np.mean([one == case.truth for one in each]) for case, each in pairs if case.power >= ENOUGH_POWER]
    return float(np.mean(wrong)), float(np.mean(correct)), float(np.mean([_share(each) for each in verdicts]))


def _share(verdicts: Sequence[Verdict], verdict: Verdict = "inconclusive") -> float:
    return float(np.mean([one == verdict for one in verdicts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of each study; five times as many of A/A")
    parser.add_argument("--first", type=int, default=1000, help="number of the first repeat: others are other draws")
    parser.add_argument("--quick", action="store_true", help="each study twice: does it run")
    given = parser.parse_args()
    repeats, console = 2 if given.quick else given.repeats, Console(width=140)
    cases = [Case(**row) for row in tomllib.loads((CASES / "studies.toml").read_text(encoding="utf-8"))["case"]]
    ours = [conducted(case, repeats * (1 if case.gain or given.quick else 5), given.first) for case in cases]
    verdicts, costs = [verdicts for verdicts, _ in ours], [cost for _, cost in ours]
    rows = {
        case.name: {
            "effect": f"{case.effect:+.1f} (of {case.sesoi:g})",
            "truth": case.truth,
            "power": case.power,
            "correct": _share(each, case.truth),
            "inconclusive": _share(each),
            "runs": cost,
        }
        for case, each, cost in zip(cases, verdicts, costs, strict=True)
    }
    wrong, correct, abstain = rates(cases, verdicts)
    peers = {n: rates(cases, [grid_verdicts(case, n, repeats, given.first) for case in cases]) for n in GRID_SEEDS}
    prices = {n: float(sum(n * 2 * (len(RATES) if case.tuned else 1) for case in cases)) for n in GRID_SEEDS}
    heads = ("wrong", "correct of decidable", "inconclusive", "runs of all studies")
    of_peers = {f"whole grid, {n} seeds": dict(zip(heads, (*peers[n], prices[n]), strict=True)) for n in GRID_SEEDS}
    of_peers["the researcher"] = dict(zip(heads, (wrong, correct, abstain, sum(costs)), strict=True))
    matched = next((n for n in GRID_SEEDS if peers[n][0] <= wrong and peers[n][1] >= correct), GRID_SEEDS[-1])
    planted = Confusions.of(1 if given.quick else repeats, UNDISCLOSED)
    console.print(planted.table())
    equal = [verdict in CALLED for case, each in zip(cases, verdicts, strict=True) if not case.gain for verdict in each]
    interval = stats.binomtest(sum(equal), len(equal)).proportion_ci(method="exact")
    figures = {
        "wrong": wrong,
        "correct": correct,
        "abstain": abstain,
        "cost_vs_grid": sum(costs) / prices[matched],
        "matched_grid_seeds": matched,
        "cost_vs_grid_by_seeds": {str(n): sum(costs) / price for n, price in prices.items()},
        "aa_false_positive": sum(equal) / len(equal),
        "aa_interval": [float(interval.low), float(interval.high)],
        "studies": len(cases),
        "decidable": sum(case.power >= ENOUGH_POWER for case in cases),
        "repeats": repeats,
        **planted.summary(),
        "resume_identical": tests_pass("tests/research", "-k", "killed and not campaign"),
    }
    report("research", figures, grid(rows), grid(of_peers), width=140, machine=False)


if __name__ == "__main__":
    main()
