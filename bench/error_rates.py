"""Error rates of the researcher's verdicts, by simulation: `python -m bench.error_rates`.

Normal scores of two arms are judged by the rule of `agentjet.research.scheduler`. No claim is stopped early,
because that could only reduce the number of verdicts. A verdict is wrong if it is "supported" or "refuted" for an
effect that is not above the smallest effect of interest: for no effect, and for one of exactly that size. The size is
measured in the root mean square of both arms' deviations over seeds. One arm's scores spread `UNEQUAL` times as far as
the other's. Several claims share alpha by Holm's procedure: before the first wrong verdict, each claim that must not
be supported is tested at no more than an equal share. So the sum of their rates bounds the rate of all.

`campaign_false` is the share of whole campaigns that end with a wrong claim: nothing differs, and a proposer has six
new ideas a round that change nothing. `campaign_found` is the share of the changes with a real gain that campaigns
confirm. Both are also measured by the rule of earlier versions, which spent alpha in each study. Scores are normal, or
`BIMODAL`: a seed learns or it does not. Prints a table, then one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy import special

from agentjet.research.campaign import campaign
from agentjet.research.campaign.campaign import Campaign
from agentjet.research.campaign.runs import Budget, Question
from agentjet.research.campaign.strategist import Intervention, View
from agentjet.research.journal import Inbox, Notebook, StudyJournal
from agentjet.research.models import Outcome, Trial, hash_of
from agentjet.research.scheduler import DIRECTIONAL
from agentjet.research.statistics import nominal_level
from bench.machine import grid

ALPHA = 0.05
LOOKS = (4, 8, 12)
UNEQUAL = (1.0, 3.0, 5.0, 10.0, 30.0)
INTERESTS = (1e-9, 0.05, 0.1, 0.2, 0.3)
OTHERS = ((4,), (12,), (4, 8), LOOKS, (6, 12, 24), (4, 6, 8, 10, 12))
CLAIMS = (1, 2, 4, 10)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at many studies of equal arms: the differences of means, Welch's errors and degrees of freedom."""

    estimates: NDArray[np.float64]
    errors: NDArray[np.float64]
    degrees: NDArray[np.float64]

    def half_widths(self, level: float) -> NDArray[np.float64]:
        """Half widths of the two-sided intervals at `level`; Student's quantile is interpolated over 1/degrees."""
        grid = np.linspace((1 / self.degrees).min(), (1 / self.degrees).max(), 1_000)
        quantiles = special.stdtrit(1 / grid, 1 - level / 2)
        return np.asarray(np.interp(1 / self.degrees, grid, quantiles) * self.errors)


def looked_at(scores: NDArray[np.float64], unequal: float, looks: Sequence[int]) -> list[Look]:
    """`scores` (2, studies, seeds) are standard normal; the first arm's come to spread wider, both by 1 in the mean."""
    narrow = math.sqrt(2 / (1 + unequal**2))
    wide, other = scores[0] * unequal * narrow, scores[1] * narrow
    found = []
    for seeds in looks:
        a, b = wide[:, :seeds], other[:, :seeds]
        parts = a.var(axis=1, ddof=1) / seeds, b.var(axis=1, ddof=1) / seeds
        total = parts[0] + parts[1]
        degrees = total**2 * (seeds - 1) / (parts[0] ** 2 + parts[1] ** 2)
        found.append(Look(a.mean(axis=1) - b.mean(axis=1), np.sqrt(total), degrees))
    return found


def called(looks: Sequence[Look], *, effect: float, sesoi: float, level: float) -> NDArray[np.bool_]:
    """True for each study in which a look finds a difference (`agentjet.research.statistics.read`)."""
    any_look = np.zeros(len(looks[0].errors), bool)
    for look in looks:
        half = look.half_widths(level)
        estimates = look.estimates + effect
        any_look |= (estimates - half > sesoi) | (estimates + half < -sesoi)
    return any_look


def single(scores: NDArray[np.float64]) -> dict[float, list[tuple[float, float]]]:
    """Error rates of one claim, by the ratio of spreads, then by `INTERESTS`: without an effect, and with one of that
    size."""
    level = nominal_level(LOOKS, 2 * ALPHA)
    return {
        unequal: [
            (
                float(called(looks, effect=0.0, sesoi=size, level=level).mean()),
                float(called(looks, effect=size, sesoi=size, level=level).mean()),
            )
            for size in INTERESTS
        ]
        for unequal in UNEQUAL
        for looks in [looked_at(scores, unequal, LOOKS)]
    }


def worst(scores: NDArray[np.float64], size: float, spreads: Sequence[float]) -> float:
    """The largest chance of any wrong call, in alphas, over `OTHERS`, `CLAIMS` and these inequalities of spread."""
    return max(
        num * float(called(found, effect=size, sesoi=size, level=nominal_level(looks, 2 * ALPHA / num)).mean()) / ALPHA
        for looks in OTHERS
        for unequal in spreads
        for found in [looked_at(scores, unequal, looks)]
        for num in CLAIMS
    )


# ---- campaigns -------------------------------------------------------------------------------------------------------

BIMODAL = (0.2, 0.8)
"""Scores of seeds that do not learn, and of seeds that do. Half of the seeds learn."""
SPREADS: Mapping[str, float] = {"spread 0.1": 0.1, "spread 0.2": 0.2, "bimodal": 0.0}
GAINS: Mapping[str, tuple[str, float, int]] = {
    "0.2 at 0.1": ("spread 0.1", 0.2, 1),
    "0.3 at 0.1": ("spread 0.1", 0.3, 1),
    "0.4 at 0.2": ("spread 0.2", 0.4, 1),
    "all seeds learn": ("bimodal", 0.0, 1),
    "three of 0.3 at 0.1": ("spread 0.1", 0.3, 3),
}
"""By name: spread of the seeds, gain of a change, and number of such changes, one a round."""
RUNS = 200.0
"""Budget of a campaign."""


class MemoryNotebook(Notebook):
    """A notebook without a file."""

    def __init__(self) -> None:
        StudyJournal.__init__(self, None, now=lambda: 0.0)
        self.path = Path(os.devnull)
        self.inbox = Inbox(self.path)


@dataclass
class Simulated:
    """Subject, runner, proposer and clock of a campaign. A commit ends with the number of its changes that gain."""

    spread: str
    gain: float = 0.0
    real: int = 0
    name: str = "ideas"
    first: str = "subject 0"
    asked: int = 0
    trials: dict[str, Trial] = field(default_factory=dict)

    def propose(self, view: View, most: int) -> list[Intervention]:
        self.asked += 1
        names = [f"idea {self.asked}.{number}" for number in range(most)]
        names[0] += " gains" * (self.asked <= self.real)
        return [Intervention(name, "settings", {"job.max_tokens": self.asked}) for name in names]

    def commit(self, base: str, made: Intervention) -> str:
        return f"{hash_of([base, made.name])} {int(base.split()[1]) + made.name.endswith('gains')}"

    def parts(self, base: str, whole: str) -> list[str]:
        return ["one"]

    def files(self, commit: str) -> dict[str, str]:
        return {}

    def judge_source(self) -> str:
        return ""

    def changed_outside(self) -> list[str]:
        return []

    def has(self, key: str) -> bool:
        return key in self.trials

    def launch(self, key: str, trial: Trial) -> None:
        self.trials[key] = trial

    def collect(self, key: str) -> Outcome:
        trial = self.trials[key]
        rng, gains = np.random.default_rng([trial.seed, *trial.arm.encode()]), int(trial.arm.split()[1])
        score = rng.normal(0.5 + gains * self.gain, SPREADS[self.spread])
        if self.spread == "bimodal":
            score = BIMODAL[int(gains > 0 or rng.random() < 0.5)] + rng.normal(0.0, 0.01)
        return Outcome(trial.id, "completed", score=float(score), curve=(0.1, float(score)))

    def time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None: ...


def conducted(world: Simulated, seed: int) -> tuple[list[str], int]:
    """The verdicts of a campaign, and the number of its accepted changes with a gain."""
    notebook = MemoryNotebook()
    whole = cast(Any, world)
    ended = Campaign(
        Question("t", Budget(runs=RUNS), seed), notebook, whole, whole, [whole], whole, lambda _: None
    ).run()
    return [entry.content["verdict"] for entry in notebook.of("learned")], int(ended["base"].split()[1])


def campaigns(number: int) -> dict[str, Any]:
    """Error rates and power of the present rule in so many campaigns each, and in a quarter of them by the earlier
    rule (`each_study`), which spent alpha in each study and did not know the base's spread.
    """
    found: dict[str, Any] = {}
    for rule, num, alpha_of in (
        ("", number, Question.alpha_of),
        ("_each_study", max(1, number // 4), lambda question, study: question.alpha),
    ):
        spread_of = campaign.spread_of if not rule else lambda studies: 0.0
        with mock.patch.object(Question, "alpha_of", alpha_of), mock.patch.object(campaign, "spread_of", spread_of):
            found[f"campaign_false{rule}"] = {
                spread: float(np.mean([has_claim(conducted(Simulated(spread), seed)[0]) for seed in range(num)]))
                for spread in SPREADS
            }
            found[f"campaign_found{rule}"] = {
                name: float(np.mean([conducted(Simulated(*case), seed)[1] / case[2] for seed in range(-(-num // 10))]))
                for name, case in GAINS.items()
            }
    return found


def has_claim(verdicts: Sequence[str]) -> bool:
    return not set(verdicts).isdisjoint(DIRECTIONAL)


def draw(studies: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=(2, studies, max(looks[-1] for looks in OTHERS)))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200_000)
    parser.add_argument("--campaigns", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    scores = draw(options.studies, options.seed)
    rates = single(scores)
    heads = [f"{size:.2g}: none, of that size" for size in INTERESTS]
    rows = {f"{unequal:g} times apart": dict(zip(heads, row, strict=True)) for unequal, row in rates.items()}
    Console(width=140).print(grid(rows))
    result = {
        "studies": options.studies,
        "single": {f"{unequal:g}": row for unequal, row in rates.items()},
        "worst_in_alphas": {
            "equal_from_a_fifth": worst(scores, 0.2, (1.0,)),
            "unequal_from_a_fifth": worst(scores, 0.2, UNEQUAL),
            "equal": worst(scores, 1e-9, (1.0,)),
            "unequal": worst(scores, 1e-9, UNEQUAL),
        },
        **campaigns(options.campaigns),
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
