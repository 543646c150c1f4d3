"""Correctness and cost of the researcher's conclusions: `python -m bench.research`.

Studies with computed answers are each conducted many times with fresh seeds, beside the verdicts of the whole grid
with 1 to 24 seeds. Prints a table, then one JSON object as the last line; keys of parts that do not exist are null.
`wrong` and `abstain` are means over all claims, `correct` over the decidable ones; a study with two claims counts
twice. `cost_vs_grid` compares with the cheapest grid that is wrong no more often and right no less often. So a grid
that is seldom wrong because it seldom answers does not count. Then one study is killed by SIGKILL at every entry of
its journal: `resume_identical`. At the end come planted failures and their healthy twins: `diagnosis_correct` is a mean
over kinds, `false_alarms` over healthy runs. The method was developed in environment 0, so the other environments are
better evidence.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from agentjet.research.journal import StudyLog
from agentjet.research.models import Verdict
from agentjet.research.scheduler import conduct
from bench.researching.kills import resume_identical
from bench.researching.oracle import Truth, grid, grid_cost, grid_verdicts, truths
from bench.researching.planted import UNDISCLOSED, Confusions
from bench.researching.runner import WorldRunner
from bench.researching.suite import QUICK, Case, suite

GRID_SEEDS = (1, 3, 4, 6, 8, 10, 12, 16, 20, 24)
CALLED = ("supported", "refuted")


@dataclass
class Tally:
    """Verdicts on one claim, over the repeats."""

    case: Case
    claim: str
    truth: Truth
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def wrong(self) -> float:
        return float(np.mean([v not in ("inconclusive", self.truth.verdict) for v in self.verdicts]))

    @property
    def correct(self) -> float:
        return float(np.mean([v == self.truth.verdict for v in self.verdicts]))

    @property
    def abstain(self) -> float:
        return float(np.mean([v == "inconclusive" for v in self.verdicts]))


def scores(tallies: Sequence[Tally]) -> tuple[float, float, float]:
    """Wrong and abstain of all, correct of the decidable: wrong, correct, abstain."""
    decidable = [tally.correct for tally in tallies if tally.truth.decidable]
    return (
        float(np.mean([tally.wrong for tally in tallies])),
        float(np.mean(decidable)) if decidable else float("nan"),
        float(np.mean([tally.abstain for tally in tallies])),
    )


def standard_error(rates: Sequence[tuple[float, int]]) -> float:
    """Standard error of the mean of rates, each with its number of measurements."""
    return float(np.sqrt(sum(rate * (1 - rate) / times for rate, times in rates)) / len(rates))


def blank(case: Case, answers: list[Truth]) -> list[Tally]:
    return [Tally(case, f"{a} > {b}", truth) for (a, b), truth in zip(case.claims, answers, strict=True)]


def conduct_all(case: Case, answers: list[Truth], repeats: int, first: int) -> tuple[list[Tally], list[float]]:
    """The researcher's verdicts and what each study cost, in full runs."""
    tallies, costs = blank(case, answers), []
    for repeat in range(repeats):
        study = case.study(first + repeat)
        findings, launcher = conduct(study, StudyLog(), WorldRunner(case.world, study.rungs))
        costs.append(launcher.spending.total)
        for tally, finding in zip(tallies, findings, strict=True):
            tally.verdicts.append(finding.verdict)
    return tallies, costs


def baseline(
    cases: Sequence[Case], grids: dict[str, Any], answers: dict[str, list[Truth]], seeds: int, draws: int
) -> list[Tally]:
    """The grid's verdicts, from as many draws of the oracle's seeds."""
    rng = np.random.default_rng(seeds)
    every = []
    for case in cases:
        tallies = blank(case, answers[case.name])
        for _ in range(draws):
            for tally, verdict in zip(tallies, grid_verdicts(case, grids[case.name], seeds, rng), strict=True):
                tally.verdicts.append(verdict)
        every += tallies
    return every


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    console = Console(width=140)
    cases = QUICK if options.quick else suite(options.environment)
    repeats, oracle_seeds = (2, 32) if options.quick else (options.repeats, 128)
    grids = {case.name: grid(case, oracle_seeds, options.cache) for case in cases}
    answers = {case.name: truths(case, grids[case.name]) for case in cases}
    tallies: list[Tally] = []
    costs: dict[str, float] = {}
    for case in cases:
        num = repeats * (5 if case.is_aa and not options.quick else 1)
        found, spent = conduct_all(case, answers[case.name], num, options.first)
        tallies += found
        costs[case.name] = float(np.mean(spent))
    console.print(table_of(tallies, costs))

    wrong, correct, abstain = scores(tallies)
    peers = {n: scores(baseline(cases, grids, answers, n, 20 if options.quick else 200)) for n in GRID_SEEDS}
    prices = {n: sum(grid_cost(case.study(0), n) for case in cases) for n in GRID_SEEDS}
    matched = next((n for n in GRID_SEEDS if peers[n][0] <= wrong and peers[n][1] >= correct), None)
    console.print(table_of_peers(peers, prices, (wrong, correct, abstain), sum(costs.values())))
    disturbed = next(case for case in cases if case.tuned != options.quick and not case.is_aa)
    identical, kills = resume_identical(disturbed.study(options.first), disturbed.world)
    console.print(f"killed {kills} times: the study {'ends the same' if identical else 'ENDS DIFFERENTLY'}")
    planted = Confusions.of(1 if options.quick else repeats, UNDISCLOSED)
    console.print(planted.table())
    false = [verdict in CALLED for tally in tallies if tally.case.is_aa for verdict in tally.verdicts]
    interval = stats.binomtest(sum(false), len(false)).proportion_ci(method="exact")
    result = {
        "wrong": wrong,
        "wrong_error": standard_error([(tally.wrong, len(tally.verdicts)) for tally in tallies]),
        "correct": correct,
        "correct_of_all": float(np.mean([tally.correct for tally in tallies])),
        "abstain": abstain,
        "cost_vs_grid": sum(costs.values()) / prices[matched or GRID_SEEDS[-1]],
        "matched_grid_seeds": matched,
        "cost_vs_grid_by_seeds": {str(n): sum(costs.values()) / price for n, price in prices.items()},
        "aa_false_positive": sum(false) / len(false),
        "aa_interval": [float(interval.low), float(interval.high)],
        "studies": len(cases),
        "claims": len(tallies),
        "decidable": sum(tally.truth.decidable for tally in tallies),
        "repeats": repeats,
        **planted.summary(),
        "resume_identical": identical,
        "kills": kills,
    }
    print(json.dumps(result))
    return result


def table_of(tallies: Sequence[Tally], costs: dict[str, float]) -> Table:
    table = Table("study", "claim", "true effect", "right verdict", "decidable", "correct", "wrong", "abstain", "runs")
    for tally in tallies:
        truth = tally.truth
        table.add_row(
            tally.case.name,
            tally.claim,
            f"{truth.effect:+.2f} ± {truth.error:.2f} (of {tally.case.sesoi:g})",
            truth.verdict,
            f"{'yes' if truth.decidable else 'no'} ({truth.power:.2f})",
            *(f"{value:.2f}" for value in (tally.correct, tally.wrong, tally.abstain)),
            f"{costs[tally.case.name]:.1f}",
        )
    return table


def table_of_peers(
    peers: dict[int, tuple[float, float, float]],
    prices: dict[int, float],
    ours: tuple[float, float, float],
    price: float,
) -> Table:
    table = Table("protocol", "wrong", "correct of decidable", "abstain", "runs, all studies once")
    for n, found in peers.items():
        table.add_row(f"whole grid, {n} seeds", *(f"{value:.3f}" for value in found), f"{prices[n]:.0f}")
    table.add_row("the researcher", *(f"{value:.3f}" for value in ours), f"{price:.0f}")
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of each study; five times as many of A/A")
    parser.add_argument("--first", type=int, default=1000, help="number of the first repeat: others are other draws")
    parser.add_argument("--environment", type=int, default=0, help="number of the worlds that the studies are of")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "agentjet-research-grids")
    parser.add_argument("--quick", action="store_true", help="three studies twice: does it run")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
