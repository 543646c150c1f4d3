"""Sentences that qualify the findings of a study: deviations from its plan, and limitations by rules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from agentjet.research.report.view import StudyView
from agentjet.research.run_record import MANY_FAILED, held_out_counts

MANY_SEEDS = 20
"""From this number of seeds per arm, a normal mean needs no warning."""
UNEQUAL = 3.0
"""Ratio of deviations of two arms that strains the approximation of the boundary (see docs/research.md)."""
FIFTH = 0.2
"""Share of the spread between seeds. With a smaller effect of interest, wrong verdicts are more frequent than alpha."""
SIMULATED = {"alpha": 0.05, "claims": 10, "even": 0.06, "uneven": 0.1, "fine": 0.16, "share": FIFTH}
"""Chances of any wrong verdict: the largest that `python -m bench.error_rates` finds for this alpha and up to so many
claims. `even` and `uneven` spreads have an effect of interest of at least `share` of the spread, `fine` has less.
"""


def deviations(view: StudyView) -> Iterator[str]:
    """Where the study was not conducted as declared."""
    kept = view.log.decisions.get("rungs")
    for rung in [rung for rung in view.study.rungs if isinstance(kept, list) and rung not in kept]:
        yield (
            f"Tuning did not drop settings at {rung:.0%} of a run, because the early ranks of the arm that was tuned "
            "first did not predict the final ones."
        )
    again = [one for one in view.launched if one.attempts > 1]
    if again:
        more = sum(one.attempts - 1 for one in again)
        yield (
            f"{len(again)} trials were lost by the infrastructure and launched again with their seed, in {more} more "
            f"launches. They cost {view.spending.repeated:g} full runs and are not evidence."
        )
    for arm in view.study.arms:
        launched = view.confirming(arm.name)
        lost = sum(one.end == "infra_failed" for one in launched)
        if lost:
            yield (
                f"{lost} of {len(launched)} confirming trials of “{arm.name}” were lost for all attempts, so its "
                "scores lack them. If losses depend on how the trials ran, the remaining scores flatter the arm."
            )
    if view.stage != "finished":
        yield "The study is not finished."


def limitations(view: StudyView) -> Iterator[str]:
    study = view.study
    yield (
        "The findings are for this metric, this base and this evaluator. Other tasks, models and lengths were not run."
    )
    if any(found.estimate is not None and found.seeds < MANY_SEEDS for found in view.findings.values()):
        yield "With so few seeds the intervals assume about normal scores, which the data cannot show."
    yield from tuning_limits(view)
    for hypothesis in study.hypotheses:
        yield from spread_limits(view, hypothesis.arm, hypothesis.against)
    for arm in study.arms:
        plays = held_out_counts(one.outcome for one in view.confirming(arm.name) if one.outcome)
        if plays.failed:
            many = (
                " That is so many that the scores may come from a selection: give failing episodes a reward, and plan "
                "a new study."
            )
            yield (
                f"{plays.failed} of {plays.num} held-out episodes of “{arm.name}” failed ({plays.share:.1%}). Each was "
                f"repeated, so its scores are of episodes that did not fail.{many if plays.share > MANY_FAILED else ''}"
            )
    trials = [one for one in view.launched if one.trial.phase == "confirm"]
    ill = sum(one.trial.id in view.log.diagnoses for one in trials)
    if ill:
        yield f"{ill} of {len(trials)} confirming trials have a diagnosis. Their scores count nevertheless."
    if not study.evaluator:
        yield "The plan has no hash of the evaluator, so this report cannot show that it stayed the same."


def tuning_limits(view: StudyView) -> Iterator[str]:
    for arm in view.study.arms:
        chosen = view.chosen.get(arm.name, {})
        if not arm.nuisance:
            yield f"“{arm.name}” was run at one setting, without tuning: its result may not hold at others."
        for knob in arm.nuisance:
            value, least, most = chosen.get(knob.name), min(knob.values), max(knob.values)
            if least < most and value in (least, most):
                end = "smallest" if value == least else "largest"
                yield f"“{arm.name}” was judged at {knob.name} = {value}, the {end} value that was tried."
    for hypothesis in view.study.hypotheses:
        arms = [view.study.arm(name) for name in (hypothesis.arm, hypothesis.against)]
        a, b = (view.chosen.get(arm.name, {}) for arm in arms)
        for knob in arms[0].nuisance:
            if knob in arms[1].nuisance and knob.name in a and knob.name in b and a[knob.name] != b[knob.name]:
                yield (
                    f"“{arms[0].name}” was judged at {knob.name} = {a[knob.name]} and “{arms[1].name}” at "
                    f"{b[knob.name]}: their difference includes that."
                )


def spread_limits(view: StudyView, arm: str, against: str) -> Iterator[str]:
    """Spreads for which the chance of a wrong verdict is above the declared one."""
    spreads = {name: deviation(view.scores(name)) for name in (arm, against)}
    wide, narrow = sorted(spreads, key=lambda name: -spreads[name])
    if spreads[narrow] > 0 and spreads[wide] / spreads[narrow] >= UNEQUAL:
        yield (
            f"Scores of “{wide}” spread {spreads[wide] / spreads[narrow]:.1f} times as far as those of “{narrow}”, so "
            "the chance of a wrong verdict is above the declared one."
        )
    between = math.hypot(*spreads.values()) / math.sqrt(2)
    if view.study.sesoi < FIFTH * between:
        yield (
            f"The smallest effect of interest is {view.study.sesoi / between:.1%} of the spread between seeds of "
            f"“{arm}” and “{against}”, less than {FIFTH:.0%}: the chance of a wrong verdict is above the declared one."
        )


def deviation(scores: list[float]) -> float:
    return float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
