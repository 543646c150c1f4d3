"""The report of a study: one facts object, and one template for its Markdown and its HTML.

    log ─► StudyView ─► facts ─► report.md ─► report.html      the same facts are the page's, and facts.json
                          └────► figures (SVG)

Among the facts are sentences that qualify the findings: deviations from the plan, and limitations by rules.

The same facts give the same bytes, so no library draws the figures. Text is escaped where it is printed, so it cannot
form markup. The HTML is one file without scripts. `research.campaign.report` prints the facts of a campaign in the same
way.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt

from agentjet.errors import ConfigError
from agentjet.research.diagnosis import MANY_FAILED, held_out_counts
from agentjet.research.journal import JournalEntry, StudyFolder, StudyLog, write_whole
from agentjet.research.models import (
    EXPECTED,
    VETOED,
    Arm,
    Finding,
    Hypothesis,
    Outcome,
    Setting,
    Study,
    Trial,
    Value,
    canonical,
    of_server,
)
from agentjet.research.question import answer
from agentjet.research.scheduler import AMOUNTS, DIRECTIONAL, Spending, amount, estimate_cost, work_of
from agentjet.research.statistics import POWER, largest_unseen_rate, nominal_level, planned_power, welch
from agentjet.types import beginning

# ---- a study's log, arranged for reports -----------------------------------------------------------------------------

Stage = Literal["planned", "exploring", "confirming", "finished"]


@dataclass(frozen=True, slots=True)
class Launched:
    """A trial with its outcome."""

    name: str
    """`T` and its place among the study's trials, from 1."""
    trial: Trial
    attempts: int
    outcome: Outcome | None
    """Outcome of the last attempt; None if the trial has not ended."""

    @property
    def score(self) -> float | None:
        return self.outcome.score if self.outcome else None

    @property
    def end(self) -> str:
        return self.outcome.end if self.outcome else "unfinished"


class StudyView:
    """The log of a study, arranged for reports; also while the study runs. Raises `ConfigError` without a study."""

    def __init__(self, log: StudyLog) -> None:
        if log.study is None:
            raise ConfigError("this journal holds no study: there is nothing to report; run the study first")
        self.log = log
        self.study: Study = log.study
        self.launched = [
            Launched(f"T{number}", trial, log.attempts[trial.id], next(reversed(log.outcomes.get(trial.id, [])), None))
            for number, trial in enumerate(log.trials.values(), start=1)
        ]

    @cached_property
    def findings(self) -> dict[str, Finding]:
        """By hypothesis; open ones are missing."""
        known = {each.id: self.log.decisions.get(f"finding {each.id}") for each in self.study.hypotheses}
        return {name: Finding.from_json(content) for name, content in known.items() if content}

    def looks(self, hypothesis: str) -> list[Finding]:
        """Its finding at each look, up to the look that closed it."""
        names = (f"look {seeds}" for seeds in self.study.looks)
        looks = cast("list[dict[str, Any]]", [self.log.decisions.get(name, {}) for name in names])
        return [Finding.from_json(look[hypothesis]) for look in looks if hypothesis in look]

    @cached_property
    def chosen(self) -> dict[str, Setting]:
        """By arm, the setting that was frozen for confirmation."""
        return cast("dict[str, Setting]", self.log.decisions.get("frozen", {}))

    @property
    def stage(self) -> Stage:
        if len(self.findings) == len(self.study.hypotheses):
            return "finished"
        return "confirming" if "frozen" in self.log.decisions else "exploring" if self.launched else "planned"

    @cached_property
    def spending(self) -> Spending:
        """Spending at the launch of the last trial. Running trials are debited in full."""
        return Spending(self.study, [(one.trial, one.attempts) for one in self.launched])

    @property
    def spent(self) -> float:
        """Full runs spent on ended trials."""
        ended = [(one.trial, one.attempts) for one in self.launched if one.outcome is not None]
        return Spending(self.study, ended).total

    def confirming(self, arm: str) -> list[Launched]:
        return [one for one in self.launched if one.trial.phase == "confirm" and one.trial.arm == arm]

    def curves(self, arm: str) -> list[tuple[float, ...]]:
        """Curves of the confirming runs that have a score."""
        ended = [one.outcome for one in self.confirming(arm) if one.outcome and one.score is not None]
        return [outcome.curve for outcome in ended if outcome.curve]

    def scores(self, arm: str) -> list[float]:
        """Final scores of the confirming runs."""
        return [one.score for one in self.confirming(arm) if one.score is not None]


def read_study(folder: StudyFolder) -> StudyView:
    """The study of a folder; only planned if it has no journal. Raises `ConfigError`."""
    log = folder.log()
    if log.study is None:
        log.open_study(folder.study())
    return StudyView(log)


# ---- facts -----------------------------------------------------------------------------------------------------------

UNTESTED = frozenset({"too_hard", "too_easy", "no_exploration", "ignored_setting", "no_op", "not_a_number"})
"""Causes after which a run shows nothing about its setting."""
DULL = frozenset({"too_hard", "too_easy", "no_exploration"})
"""Those of them that say nothing against a difference: the other arm may have had something to learn from."""
MANY_SEEDS = 20
"""From this number of seeds per arm, a normal mean needs no warning."""
UNEQUAL = 3.0
"""Ratio of deviations of two arms that strains the approximation of the boundary (see docs/research.md)."""
FIFTH = 0.2
"""Share of the spread between seeds. With a smaller effect of interest, wrong verdicts are more frequent than alpha."""
FAR_APART = 2
"""Ratio of the episodes a step of two arms from which a plan warns."""
SIMULATED = {"alpha": 0.05, "claims": 10, "even": 0.06, "uneven": 0.1, "fine": 0.16, "share": FIFTH}
"""Chances of any wrong verdict: the largest that `python -m bench.error_rates` finds for this alpha and up to so many
claims. `even` and `uneven` spreads have an effect of interest of at least `share` of the spread, `fine` has less.
"""
Facts = dict[str, Any]


def gather(view: StudyView) -> Facts:
    """All facts of a study. Numbers are not rounded."""
    study = view.study
    arms = [arm_facts(arm, view) for arm in study.arms]
    return {
        "study": study.to_json() | {"id": study.id, "subject": study.subject and study.subject.to_json()},
        "stage": view.stage,
        **({"reading": study.reading, "answer": answer(study, view.findings)} if study.form else {}),
        "num_entries": len(view.log.entries),
        "num_unended": sum(one.outcome is None for one in view.launched),
        "findings": [finding_facts(f"F{n}", hypothesis, view) for n, hypothesis in enumerate(study.hypotheses, 1)],
        "arms": arms,
        "trials": [trial_facts(one, study.arm(one.trial.arm).code[:12]) for one in view.launched],
        "evaluation_steps": evaluation_steps(view),
        "in_effect": in_effect(view),
        "ledger": {
            **view.spending.spent,
            "repeated": view.spending.repeated,
            "total": view.spending.total,
            "budget": study.budget,
            "for_exploring": view.spending.for_exploring,
        },
        "diagnoses": diagnosis_facts(view),
        "deviations": list(deviations(view, arms)),
        "limitations": list(limitations(view, arms)),
        "record": record(view.log.entries, [outcome for ended in view.log.outcomes.values() for outcome in ended]),
        "simulated": SIMULATED,
    }


def record(entries: Sequence[JournalEntry], outcomes: Sequence[Outcome]) -> Facts:
    """Dates of the first and the last entry, and what runs were made with: a part may have been resumed elsewhere."""
    made = Counter(canonical(one.machine) for one in outcomes if one.score is not None)
    dates = [f"{datetime.fromtimestamp(entry.at, UTC):%Y-%m-%d %H:%M}" for entry in entries if entry.at]
    machines = [{"runs": runs, "machine": json.loads(machine)} for machine, runs in made.items()]
    return {"began": min(dates, default=""), "newest": max(dates, default=""), "machines": machines}


def setting_text(setting: Setting, code: str = "") -> str:
    named = [f"{name} = {written(value)}" for name, value in sorted(setting.items())]
    return ", ".join([code, *named] if code else named) or "the base"


def written(value: Value) -> str:
    """A setting's value in the notation of settings."""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.10g}") if type(value) is float else str(value)


def trial_facts(one: Launched, code: str = "") -> Facts:
    """`code` is the beginning of the arm's commit, if it is one."""
    outcome = one.outcome
    return {
        **one.trial.to_json(),
        "id": one.trial.id,
        "name": one.name,
        "setting": setting_text(one.trial.setting, code),
        "end": one.end.replace("_", " "),
        "score": one.score,
        "attempts": one.attempts,
        "note": outcome.note if outcome else "",
        "curve": list(outcome.curve) if outcome else None,
    }


def finding_facts(name: str, hypothesis: Hypothesis, view: StudyView) -> Facts:
    """Includes hypotheses without a finding, with the verdict "open"."""
    known = view.findings.get(hypothesis.id)
    found = known or Finding(hypothesis.id, "inconclusive", "")
    trials = [one for one in view.launched if one.trial.id in found.trials]
    expected = EXPECTED[hypothesis.sign] if hypothesis.sign else ""
    return {
        **hypothesis.to_json(),
        **found.to_json(),
        "name": name,
        "verdict": known.verdict if known else "open",
        "expected": f"{expected}: {hypothesis.why}" if hypothesis.why else expected,
        "doubts": list(doubts(found, hypothesis, view)),
        "settings": [f"{arm}: {setting_text(setting)}" for arm, setting in sorted(found.settings.items())],
        "trials": [one.name for one in trials],
        "looks": [look.to_json() for look in view.looks(hypothesis.id)],
    }


def doubts(found: Finding, hypothesis: Hypothesis, view: StudyView) -> Iterator[str]:
    """Sentences about an early verdict; an interval beyond the range of the scores; and arms without spread, whose runs
    have not converged, or of which most confirming runs have a cause in `UNTESTED`.
    """
    study, scores = view.study, {arm: view.scores(arm) for arm in hypothesis.contrast}
    every = [score for of_arm in scores.values() for score in of_arm]
    is_share = bool(every) and 0 <= min(every) <= max(every) <= 1
    trials = Counter(one.trial.arm for one in view.launched if one.trial.id in found.trials)
    seeds = max(trials.values(), default=0)
    if found.verdict in DIRECTIONAL and seeds < study.looks[-1]:
        look = (
            f"This verdict came at look {study.looks.index(seeds) + 1} of {len(study.looks)}."
            if seeds in study.looks
            else "This verdict came before the last look."
        )
        yield f"{look} A study that stops as soon as a difference shows overstates it on average."
    if found.low is not None and found.high is not None and is_share and len(scores) == 2:
        level = float(np.mean(scores[hypothesis.against]))
        if not -level <= found.low <= found.high <= 1 - level:
            yield (
                f"All scores are from 0 to 1. If nothing beyond is paid, “{hypothesis.against}” with {number(level)} "
                f"leaves room for a difference of {0 - level:+.3g} to {1 - level:+.3g}. The interval reaches beyond, "
                "because Welch's t does not know limits of scores."
            )
    means = [float(np.mean(values)) for values in scores.values() if values]
    for end in (0, 1) if is_share and found.verdict not in DIRECTIONAL and hypothesis.metric == "score" else ():
        if all(abs(mean - end) < study.sesoi for mean in means):
            yield (
                f"All its arms end less than {study.sesoi:g} from {end}. If that is an end of the scale, a difference "
                "had no room to show: other tasks, or runs of another length, may tell the arms apart."
            )
    for arm, values in scores.items() if hypothesis.metric == "score" else ():
        rises = [curve[-1] - curve[-2] for curve in view.curves(arm) if len(curve) > 2]
        has_room = abs(1 - float(np.mean(values))) > study.sesoi if values else False
        if len(rises) > 1 and has_room and (low := welch(rises, [0.0] * len(rises)).interval(0.05)[0]) > 0:
            yield (
                f"The score of “{arm}” still rose between the last two evaluations: by {number(float(np.mean(rises)))} "
                f"(at 95 %, {number(low)} or more). So its runs have not converged, and longer ones may end otherwise."
            )
    if flat := [f"“{arm}”" for arm, values in scores.items() if len(values) > 1 and min(values) == max(values)]:
        yield f"All seeds of {' and '.join(flat)} scored the same. Welch's t assumes about normal scores."
    untested = UNTESTED - DULL if found.verdict in DIRECTIONAL else UNTESTED
    for arm in hypothesis.contrast:
        runs = [one.trial.id for one in view.launched if one.trial.id in found.trials and one.trial.arm == arm]
        ill = [[d for d in view.log.diagnoses.get(run, []) if d.cause in untested] for run in runs]
        first = [diagnoses[0] for diagnoses in ill if diagnoses]
        if 2 * len(first) > len(runs):
            causes = ", ".join(sorted({d.cause.replace("_", " ") for d in first}))
            of_runs = f"{len(first)} of {len(runs)} confirming runs of “{arm}”"
            yield f"{of_runs} are diagnosed as {causes}, so they do not test its setting: {first[0].meaning}."


def arm_facts(arm: Arm, view: StudyView) -> Facts:
    confirming, scores = view.confirming(arm.name), view.scores(arm.name)
    signals = [one.outcome.signals for one in confirming if one.outcome and one.score is not None]
    ends = Counter(one.end for one in confirming)
    subject = view.study.subject
    return {
        "name": arm.name,
        "changes": "other files" if arm.code and not arm.changes else setting_text(arm.changes),
        "knobs": "; ".join(f"{knob.name} over {', '.join(map(written, knob.values))}" for knob in arm.nuisance),
        "agent": subject.agent_of(arm.name) if subject else arm.code[:12],
        "setting": setting_text(view.chosen[arm.name], arm.code[:12]) if arm.name in view.chosen else "",
        "completed": ends["completed"],
        "diverged": ends["diverged"],
        "lost": ends["infra_failed"],
        "scored": len(scores),
        "first": float(np.mean([curve[0] for curve in view.curves(arm.name)])) if view.curves(arm.name) else None,
        "mean": float(np.mean(scores)) if scores else None,
        "deviation": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "worst": min(scores, default=None),
        "best": max(scores, default=None),
        "unseen": largest_unseen_rate(len(scores)) if scores and not ends["diverged"] else None,
        **{
            name: amount(signals, name) / len(signals) if any(of in run for run in signals for of in parts) else None
            for name, parts in AMOUNTS.items()
        },
        "runs": [one.name for one in confirming],
    }


def in_effect(view: StudyView) -> Setting:
    """The settings with one value in all confirming runs that report theirs. Arms and seeds differ in the others."""
    runs = [one.outcome.settings for one in view.launched if one.trial.phase == "confirm" and one.outcome]
    known = [run for run in runs if run] or [{}]
    return {name: value for name, value in sorted(known[0].items()) if all(run.get(name) == value for run in known)}


def evaluation_steps(view: StudyView) -> list[int]:
    """Steps of the values in a full run's curve; empty if unknown."""
    steps = view.study.subject.evaluation_steps(1.0) if view.study.subject else []
    whole = [one.outcome for one in view.launched if one.trial.phase == "confirm" and one.outcome]
    return steps if all(len(o.curve) == len(steps) for o in whole if o.end == "completed") else []


def diagnosis_facts(view: StudyView) -> list[Facts]:
    """Diagnoses by arm and cause, with the texts and the numbers of the first trial."""
    alike: dict[tuple[str, str], Facts] = {}
    for one in view.launched:
        for found in view.log.diagnoses.get(one.trial.id, []):
            numbers = ", ".join(f"{name} = {number:.4g}" for name, number in sorted(found.evidence.items()))
            new = {"arm": one.trial.arm, "cause": found.cause.replace("_", " "), "trials": [], "seen": found.seen}
            group = alike.setdefault((one.trial.arm, found.cause), new | {"meaning": found.meaning, "numbers": numbers})
            group["trials"].append(one.name)
    return list(alike.values())


# ---- sentences ------------------------------------------------------------------------------------------------------


def deviations(view: StudyView, arms: Sequence[Facts]) -> Iterator[str]:
    """Where the study was not conducted as declared."""
    for claim in view.study.hypotheses:
        if (found := view.findings.get(claim.id)) and found.reason.startswith(VETOED):
            yield f"People vetoed an arm of “{claim.claim}”: it was not tested on."
    kept = view.log.decisions.get("rungs")
    for rung in [rung for rung in view.study.rungs if isinstance(kept, list) and rung not in kept]:
        yield (
            f"Tuning did not drop settings at {rung:.0%} of a run, because the early ranks of the arm that was tuned "
            "first did not predict the final ones."
        )
    if again := [one for one in view.launched if one.attempts > 1]:
        more = sum(one.attempts - 1 for one in again)
        yield (
            f"{len(again)} trials were lost by the infrastructure and launched again with their seed, in {more} more "
            f"launches. They cost {view.spending.repeated:g} full runs and are not evidence."
        )
    for arm in (arm for arm in arms if arm["lost"]):
        yield (
            f"{arm['lost']} of {len(arm['runs'])} confirming trials of “{arm['name']}” were lost for all attempts, so "
            "its scores lack them. If losses depend on how the trials ran, the remaining scores flatter the arm."
        )
    if view.stage != "finished":
        yield "The study is not finished."


def limitations(view: StudyView, arms: Sequence[Facts]) -> Iterator[str]:
    study, spreads = view.study, {arm["name"]: arm["deviation"] or 0.0 for arm in arms}
    yield (
        "The findings are for this metric, this base and this evaluator. Other tasks, models and lengths were not run."
    )
    if any(found.estimate is not None and found.seeds < MANY_SEEDS for found in view.findings.values()):
        yield "With so few seeds the intervals assume about normal scores, which the data cannot show."
    lengths = [len(curve) for arm in study.arms for curve in view.curves(arm.name)]
    if lengths and max(lengths) == 2:
        yield "Runs were evaluated at step 0 and at their end only, so nothing shows whether they had converged."
    yield from tuning_limits(view)
    of_claims = [{name: spreads[name] for name in one.contrast} for one in study.hypotheses if one.metric == "score"]
    yield from dict.fromkeys(limit for of_claim in of_claims for limit in spread_limits(of_claim, study.sesoi))
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
    ill = [view.log.diagnoses[one.trial.id][0].cause for one in trials if one.trial.id in view.log.diagnoses]
    if ill:
        causes = ", ".join(f"{number} {cause.replace('_', ' ')}" for cause, number in sorted(Counter(ill).items()))
        yield f"{len(ill)} of {len(trials)} confirming trials have a diagnosis ({causes}). Their scores count."
    for one in arms:
        if one["unseen"] is not None:
            yield (
                f"None of {one['scored']} confirming runs of “{one['name']}” diverged. Up to "
                f"{FILTERS['share'](one['unseen'])} of its seeds may fail nevertheless (at 95 %)."
            )
    yield from machine_limits(view)
    if not study.evaluator:
        yield "The plan has no hash of the evaluator, so this report cannot show that it stayed the same."


def batch_warnings(study: Study) -> Iterator[str]:
    """A warning about arms that learn from very different numbers of episodes in a step."""
    base, arms = (study.subject.settings, study.arms) if study.subject else ({}, ())
    sizes = sorted((int(work_of({**base, **of_server(arm.changes)}, 1)), arm.name) for arm in arms)
    if sizes and sizes[-1][0] >= FAR_APART * sizes[0][0]:
        (least, small), (most, large) = sizes[0], sizes[-1]
        yield (
            f"“{large}” learns from {most} episodes a step, and “{small}” from {least}, in equally many steps: a "
            "difference may come from that. Change job.batch_size too, so that the numbers are equal."
        )


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


def machine_limits(view: StudyView) -> Iterator[str]:
    """The machines of the arms, if these ran on several kinds and not equally often."""
    arms = [arm.name for arm in view.study.arms]
    ended = {arm: [one.outcome for one in view.confirming(arm) if one.outcome] for arm in arms}
    ran = {arm: Counter(kind for one in ended[arm] if (kind := one.machine.get("hardware"))) for arm in arms}
    if len({*ran[arms[0]]}.union(*ran.values())) > 1 and any(ran[arm] != ran[arms[0]] for arm in arms):
        of_arms = [
            f"“{arm}” {' and '.join(f'{number} on {machine}' for machine, number in sorted(ran[arm].items()))}"
            for arm in arms
            if ran[arm]
        ]
        yield f"Confirming trials ran on machines whose numbers are rounded differently: {'; '.join(of_arms)}."


def spread_limits(spreads: Mapping[str, float], sesoi: float) -> Iterator[str]:
    """Spreads for which the chance of a wrong verdict is above the declared one."""
    wide, *_, narrow = sorted(spreads, key=lambda name: -spreads[name])
    if spreads[narrow] > 0 and spreads[wide] / spreads[narrow] >= UNEQUAL:
        yield (
            f"Scores of “{wide}” spread {spreads[wide] / spreads[narrow]:.1f} times as far as those of “{narrow}”, so "
            "the chance of a wrong verdict may be above the declared one."
        )
    between = math.hypot(*spreads.values()) / math.sqrt(len(spreads))
    if sesoi < FIFTH * between:
        yield (
            f"The smallest effect of interest is {sesoi / between:.1%} of the spread between seeds of "
            f"{' and '.join(f'“{name}”' for name in spreads)}, less than {FIFTH:.0%}: the chance of a wrong verdict "
            "may be above the declared one."
        )


# ---- figures ---------------------------------------------------------------------------------------------------------

WIDTH, LEFT, ROW = 860, 240, 46
"""In pixels: the figure, its column of names, and a row."""
COLOURS = ("#0072b2", "#c45100", "#008a63", "#b8578d", "#8a6d00", "#4b5fb3")
"""Near those of Okabe and Ito (2008), which most colour-blind people can distinguish."""
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#22303c}.soft{fill:#5b6975}.line{stroke:#d9dfe4}.band{fill:#eaeef1}
@media (prefers-color-scheme:dark){text{fill:#e3e9ee}.soft{fill:#9fadb9}.line{stroke:#36424d}.band{fill:#26323c}}
</style>"""
FARTHEST = 3.0
"""A point farther from the middle half than this many times its width is drawn at the margin."""


def svg(height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}">{STYLE}\n{body}\n</svg>\n'


def label(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {look}>{escape(text)}</text>'


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """A function from values to pixels. Values outside are at the margin."""
    width = (high - low) or 1.0
    return lambda value: start + (end - start) * min(1.0, max(0.0, (value - low) / width))


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Range of the values without those far from the middle half."""
    low, high = np.quantile(values, [0.25, 0.75])
    room = FARTHEST * (high - low) or max(1e-9, 0.1 * abs(high))
    inside = [value for value in values if low - room <= value <= high + room]
    margin = 0.06 * (max(inside) - min(inside)) or room
    return min(inside) - margin, max(inside) + margin


def effects(findings: Sequence[Mapping[str, Any]], sesoi: float) -> str:
    """Estimates with intervals over the band of differences that do not matter; empty without any."""
    rows = [found for found in findings if found["estimate"] is not None]
    if not rows:
        return ""
    reach = 1.1 * max(1.2 * sesoi, *(abs(row[end]) for row in rows for end in ("low", "high")))
    at, height = scale(-reach, reach, LEFT, WIDTH - 170), ROW * len(rows) + 30
    parts = [
        f'<rect class="band" x="{at(-sesoi):.1f}" y="20" width="{at(sesoi) - at(-sesoi):.1f}" height="{height - 20}"/>',
        f'<path class="line" d="M{at(0):.1f} 20V{height}"/>',
        label(at(0), 13, f"± {sesoi:g} does not matter", 'class="soft"', "middle"),
    ]
    for number, row in enumerate(rows):
        y, (low, middle, high) = 20 + ROW * (number + 0.5), (at(row[n]) for n in ("low", "estimate", "high"))
        lines = textwrap.wrap(row["claim"], 34, max_lines=3, placeholder=" …")
        interval = f"{row['estimate']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})"
        parts += [
            *(label(0, y + 4 + 15 * (place - (len(lines) - 1) / 2), line) for place, line in enumerate(lines)),
            f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{COLOURS[0]}" stroke-width="3"/>',
            f'<circle cx="{middle:.1f}" cy="{y}" r="5" fill="{COLOURS[0]}"/>',
            label(WIDTH - 160, y - 3, row["verdict"].replace("_", " "), 'font-weight="bold"'),
            label(WIDTH - 160, y + 13, interval, 'font-size="11"'),
        ]
    return svg(height, parts)


def curves(named: Sequence[tuple[str, Sequence[Sequence[float]]]], steps: Sequence[int] = ()) -> str:
    """The mean of the curves of each name, and thin ones. Empty without a curve. `steps` are those of the longest."""
    every = [curve for _, found in named for curve in found]
    longest = max(map(len, every), default=0)
    if longest < 2:
        return ""
    steps = steps if len(steps) == longest else range(1, longest + 1)
    low, high = usual_range([value for curve in every for value in curve])
    x, y = scale(steps[0], steps[-1], 60, WIDTH - 190), scale(high, low, 10, 270)
    parts = [f'<path class="line" d="M60 {y(value):.1f}H{WIDTH - 190}"/>' for value in (low, high)]
    parts += [label(54, y(value) + 4, f"{value:.3g}", 'class="soft"', "end") for value in (low, high)]
    parts += [label(x(step), 290, str(step), 'class="soft"', "middle") for step in (steps[0], steps[-1])]
    for number, (name, found) in enumerate(named):
        colour = COLOURS[number % len(COLOURS)]
        means = [float(np.mean([c[i] for c in found if len(c) > i])) for i in range(max(map(len, found), default=0))]
        for curve, width in (*((one, 0.7) for one in found), (means, 3)):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, curve, strict=False))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(label(WIDTH - 180, 20 + 20 * number, beginning(name, 24), f'style="fill:{colour}"'))
    return svg(300, parts)


# ---- documents -------------------------------------------------------------------------------------------------------

TEMPLATES = Path(__file__).parent / "templates"
MARKUP = re.compile(r"([\\`*<>|\[\]#&]|(?<!\w)_|_(?!\w))")
FIGURE = re.compile(r'<img src="figures/(\w+)\.svg" alt="([^"]*)" />')
NOTHING = "–"
MOST_PROBLEMS = 20
LONGEST = 80
"""Maximum characters of a line in a message."""


class Code(str):
    """Text for a code span or a code block. It is printed as it is."""


def number(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:{form}}"


FILTERS: Mapping[str, Callable[..., Any]] = {
    "code": lambda value: Code(" ".join(str(value).replace("`", "'").split())),
    "block": lambda value: Code(str(value)[:4000].replace("```", "'''")),
    "number": number,
    "signed": lambda value: number(value, "+.3g"),
    "p": lambda value: NOTHING if value is None else "< 0.0001" if value < 1e-4 else f"{value:.2g}",
    "share": lambda value: f"{100 * value:.3g} %",
    "shares": lambda values: ", ".join(f"{100 * value:.3g} %" for value in values),
    "words": lambda value: str(value).replace("_", " "),
    "values": lambda values: ", ".join(map(number, values or ())),
    "whole": Code,
}


@cache
def templates() -> Environment:
    options: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True, "autoescape": False}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), finalize=printed, **options)
    environment.filters |= FILTERS
    return environment


def printed(value: object) -> str:
    """The text of a value in one line that forms no markup."""
    return value if isinstance(value, Code) else MARKUP.sub(r"\\\1", " ".join(str(value).split()) or NOTHING)


def markdown(template: str, facts: Facts) -> str:
    text = templates().get_template(template).render(facts)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html(text: str, drawings: Mapping[str, str]) -> str:
    """The page of a report. `drawings` are SVG by name."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    body = parser.render(text).replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = FIGURE.sub(
        lambda image: f'<span class="figure" role="img" aria-label="{image[2]}">{drawings[image[1]]}</span>', body
    )
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    title = escape(text.splitlines()[0].removeprefix("# ").replace("\\", ""))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def files_of(template: str, facts: Facts, drawings: Mapping[str, str]) -> dict[str, str]:
    """Files of a report by name."""
    text = markdown(template, {**facts, "figures": drawings})
    return {
        "report.html": html(text, drawings),
        "report.md": text,
        "facts.json": json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        **{f"figures/{name}.svg": drawing for name, drawing in drawings.items() if drawing},
    }


def write_files(files: Mapping[str, str], out: Path) -> Path:
    """Writes the files of a report into a folder. Returns the path of the HTML."""
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
    return out / "report.html"


# ---- studies --------------------------------------------------------------------------------------------------------


def render(log: StudyLog, more: Mapping[str, Any] = {}) -> dict[str, str]:
    """Files of a study's report by name. `more` are facts of its campaign. Raises `ConfigError` without a study."""
    facts = {**gather(StudyView(log)), **more}
    drawings = {"effects": effects(facts["findings"], facts["study"]["sesoi"]), "curves": curves_of(facts)}
    return files_of("study.md.jinja", facts, drawings)


def curves_of(study: Facts, steps: Sequence[int] = ()) -> str:
    """The curves of a study's confirming runs by arm."""
    trials = {one["name"]: one["curve"] for one in study["trials"]}
    along = [(arm["name"], [trials[name] for name in arm["runs"] if trials[name]]) for arm in study["arms"]]
    return curves(along, steps or study["evaluation_steps"])


def plan_page(study: Study) -> str:
    """The page of a study before its data."""
    log = StudyLog()
    log.open_study(study)
    known = {"cost": estimate_cost(study), "power": [*power_facts(study)], "chance": POWER, "figures": {}}
    return markdown("study.md.jinja", {**gather(StudyView(log)), **known, "warnings": [*batch_warnings(study)]})


def power_facts(study: Study) -> Iterator[Facts]:
    """For the claims with equal weights, the smallest differences that the last look can be expected to decide."""
    share = study.alpha / max(1, sum(claim.confirmatory for claim in study.hypotheses))
    level, last = nominal_level(study.looks, 2 * share), study.looks[-1]
    for weights in dict.fromkeys(tuple(sorted(claim.contrast.values())) for claim in study.hypotheses):
        claims = [f"F{n}" for n, one in enumerate(study.hypotheses, 1) if sorted(one.contrast.values()) == [*weights]]
        beyond, within = planned_power(weights, last, level, share)
        yield {"claims": ", ".join(claims), "beyond": beyond, "within": within}


def build(log: StudyLog, out: Path, more: Mapping[str, Any] = {}) -> Path:
    """Writes the files of the report into the folder `out`. Returns the path of the HTML."""
    return write_files(render(log, more), out)


def check(path: Path, log: StudyLog, more: Mapping[str, Any] = {}) -> list[str]:
    """Returns the lines in which a file of a report differs from its journal, a sentence each."""
    kinds = {".html": "report.html", ".md": "report.md", ".json": "facts.json"}
    if path.suffix not in kinds:
        raise ConfigError(f"{path}: a report is a .html, .md or .json file; name one of these")
    try:
        found = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a report that is there") from None
    made = render(log, more)[kinds[path.suffix]].splitlines()
    return [
        f"line {number}: {there[:LONGEST]!r} stands where the journal gives {line[:LONGEST]!r}"
        for number, (line, there) in enumerate(zip_longest(made, found.splitlines(), fillvalue=""), start=1)
        if line != there
    ][:MOST_PROBLEMS]
