"""Facts that qualify a study's findings.

Limitations hold by a rule over the study; the template has their texts. Further facts are the diagnoses `D1`.. with
their causes `C1`.., unanswered questions `Q1`.., and later requests `X1`...
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentjet.research.diagnosis import causes_needing
from agentjet.research.models import Arm, Diagnosis, Finding, Hypothesis
from agentjet.research.probes import NEEDS, asked_by, missing
from agentjet.research.report.facts import (
    NOTHING,
    Fact,
    Facts,
    Group,
    Launched,
    Rounding,
    StudyView,
    count,
    plain,
    quote,
    setting_text,
    share,
    trimmed,
    written,
)
from agentjet.research.run_signals import MANY_FAILED, held_out_counts

MANY_SEEDS = 20
"""From this number of seeds per arm, a normal mean needs no warning."""
UNEQUAL = 3.0
"""Ratio of deviations of two arms that strains the approximation of the boundary (see docs/research.md)."""
FIFTH = 0.2
"""Share of the spread between seeds. With a smaller effect of interest, wrong verdicts are more frequent than alpha."""
MOST_CLAIMS = 10
"""Maximum claims of one study that were simulated."""
SIMULATED = {"alpha": 0.05, "even": 0.06, "uneven": 0.1, "fine": 0.16, "single_even": 0.057, "single_uneven": 0.068}
"""Chances of any wrong verdict: the largest that `python -m bench.error_rates` finds for this alpha. `even` and
`uneven` spreads have an effect of interest of `FIFTH` or more, `fine` has less. `single_even` and `single_uneven` have
one claim and 4, 8, 12 seeds.
"""


def simulated_facts(facts: Facts) -> Group:
    rates = {name: plain(rate) for name, rate in SIMULATED.items()}
    return facts.group("simulated", {**rates, "fifth": share(FIFTH), "claims": count(MOST_CLAIMS)})


def gather_limits(facts: Facts, view: StudyView, rounding: Rounding) -> Group:
    """Lists of groups by limitation; empty if it does not hold."""
    return {
        "edges": list(edges(facts, view)),
        "apart": list(tuned_apart(facts, view)),
        "unequal": list(unequal_spreads(facts, view, rounding)),
        "fine": list(fine_interests(facts, view)),
        "few_seeds": [f for f in view.findings.values() if f.estimate is not None and f.seeds < MANY_SEEDS] != [],
        "untuned": [quote_group(facts, f"untuned{i}", arm) for i, arm in enumerate(untuned(view), start=1)],
        "lost": list(lost(facts, view)),
        "replayed": list(replayed(facts, view)),
        "running": [one for one in view.launched if one.outcome is None] != [],
        "skipped_rungs": list(skipped_rungs(facts, view)),
        "repeated": repeated(facts, view),
        "diagnosed": diagnosed(facts, view),
        "unpinned": not view.study.evaluator,
    }


def edges(facts: Facts, view: StudyView) -> Iterator[Group]:
    """Knobs whose chosen value is the lowest or the highest."""
    number = 0
    for arm in view.study.arms:
        chosen = view.chosen.get(arm.name, {})
        for knob in arm.nuisance:
            ends = {min(knob.values): "least", max(knob.values): "largest"}
            value = chosen.get(knob.name)
            if value in ends and len(knob.values) > 1:
                number += 1
                yield facts.group(
                    f"edge{number}",
                    {
                        "arm": quote(arm.name),
                        "knob": quote(knob.name),
                        "value": plain(value),
                        "end": quote(ends[float(value)]),
                    },
                )


def tuned_apart(facts: Facts, view: StudyView) -> Iterator[Group]:
    """Pairs whose arms were judged at different values of a knob that both tuned."""
    for number, hypothesis in enumerate(view.study.hypotheses, start=1):
        a, b = (view.chosen.get(name, {}) for name in (hypothesis.arm, hypothesis.against))
        both = {knob.name for knob in view.study.arm(hypothesis.arm).nuisance}
        both &= {knob.name for knob in view.study.arm(hypothesis.against).nuisance}
        differing = sorted(name for name in both if name in a and name in b and a[name] != b[name])
        if differing:
            yield facts.group(
                f"apart{number}",
                {
                    "arm": quote(hypothesis.arm),
                    "against": quote(hypothesis.against),
                    "at": setting_text({name: a[name] for name in differing}),
                    "against_at": setting_text({name: b[name] for name in differing}),
                },
            )


def unequal_spreads(facts: Facts, view: StudyView, rounding: Rounding) -> Iterator[Group]:
    for number, hypothesis in enumerate(view.study.hypotheses, start=1):
        spreads = {name: deviation(view.confirming(name)) for name in (hypothesis.arm, hypothesis.against)}
        wide, narrow = sorted(spreads, key=lambda name: -spreads[name])
        if spreads[narrow] > 0 and spreads[wide] / spreads[narrow] >= UNEQUAL:
            yield facts.group(
                f"spread{number}",
                {
                    "wide": quote(wide),
                    "narrow": quote(narrow),
                    "wide_by": rounding.score(spreads[wide]),
                    "narrow_by": rounding.score(spreads[narrow]),
                    "factor": quote(trimmed(spreads[wide] / spreads[narrow], 1)),
                },
            )


def fine_interests(facts: Facts, view: StudyView) -> Iterator[Group]:
    """Claims whose smallest effect of interest is less than `FIFTH` of the spread between seeds."""
    for number, hypothesis in enumerate(view.study.hypotheses, start=1):
        differ_by = math.hypot(
            *(deviation(view.confirming(n)) for n in (hypothesis.arm, hypothesis.against))
        ) / math.sqrt(2)
        if view.study.sesoi < FIFTH * differ_by:
            yield facts.group(
                f"fine{number}",
                {
                    "arm": quote(hypothesis.arm),
                    "against": quote(hypothesis.against),
                    "of": share(view.study.sesoi / differ_by),
                },
            )


def deviation(launched: list[Launched]) -> float:
    scores = [one.score for one in launched if one.score is not None]
    return float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0


def untuned(view: StudyView) -> list[Arm]:
    return [arm for arm in view.study.arms if not arm.nuisance]


def quote_group(facts: Facts, name: str, arm: Arm) -> Group:
    return facts.group(name, {"arm": quote(arm.name), "setting": setting_text(arm.changes)})


def lost(facts: Facts, view: StudyView) -> Iterator[Group]:
    """Arms with lost confirming seeds."""
    for number, arm in enumerate(view.study.arms, start=1):
        launched = view.confirming(arm.name)
        missing = sum(one.end == "infra_failed" for one in launched)
        if missing:
            yield facts.group(
                f"lost{number}", {"arm": quote(arm.name), "num": count(missing), "of": count(len(launched))}
            )


def replayed(facts: Facts, view: StudyView) -> Iterator[Group]:
    """Arms with failed held-out episodes in confirming trials."""
    for number, arm in enumerate(view.study.arms, start=1):
        plays = held_out_counts(one.outcome for one in view.confirming(arm.name) if one.outcome)
        if plays.failed:
            yield facts.group(
                f"replayed{number}",
                {
                    "arm": quote(arm.name),
                    "num": count(plays.failed),
                    "of": count(plays.num),
                    "share": share(plays.share),
                },
                many=plays.share > MANY_FAILED,
            )


def skipped_rungs(facts: Facts, view: StudyView) -> Iterator[Group]:
    """Declared rungs that tuning skipped, because the first arm's early ranks were wrong."""
    kept = view.decisions.get("rungs")
    if isinstance(kept, list):
        dropped = [rung for rung in view.study.rungs if rung not in kept]
        for number, rung in enumerate(dropped, start=1):
            yield facts.group(f"rung{number}", {"at": share(rung)})


def repeated(facts: Facts, view: StudyView) -> Group | None:
    again = [one for one in view.launched if one.attempts > 1]
    if not again:
        return None
    return facts.group(
        "repeated",
        {"trials": count(len(again)), "launches": count(sum(one.attempts - 1 for one in again))},
    )


def diagnosed(facts: Facts, view: StudyView) -> Group | None:
    """Number of confirming trials with a diagnosis."""
    trials = [one for one in view.launched if one.trial.phase == "confirm"]
    ill = [one for one in trials if one.trial.id in view.diagnoses]
    return facts.group("diagnosed", {"num": count(len(ill)), "of": count(len(trials))}) if ill else None


UNTESTED = frozenset({"too_hard", "too_easy", "no_exploration", "ignored_setting", "no_op", "not_a_number"})
"""Causes after which a run shows nothing about its setting."""


def diagnosis_facts(facts: Facts, view: StudyView, trials: dict[str, Group]) -> list[Group]:
    every = [diagnosis for found in view.diagnoses.values() for diagnosis in found]
    return [
        facts.group(
            f"D{number}",
            {
                "trial": Fact(trials[diagnosis.trial]["name"].text if diagnosis.trial in trials else diagnosis.trial),
                "arm": Fact(trials[diagnosis.trial]["arm"].text if diagnosis.trial in trials else NOTHING),
                "cause": quote(diagnosis.cause.replace("_", " ")),
                "seen": quote(diagnosis.seen),
                "tried": quote(diagnosis.tried),
                "meaning": quote(diagnosis.meaning),
                "step": Fact(NOTHING) if diagnosis.step is None else count(diagnosis.step),
                "evidence": quote(evidence_text(sorted(diagnosis.evidence.items()))),
            },
        )
        for number, diagnosis in enumerate(every, start=1)
    ]


def cause_facts(facts: Facts, view: StudyView) -> list[Group]:
    """Groups diagnoses by arm and cause, with the texts of the first."""
    alike: dict[tuple[str, str], list[Diagnosis]] = {}
    arms = {one.trial.id: one.trial.arm for one in view.launched}
    for diagnosis in (diagnosis for found in view.diagnoses.values() for diagnosis in found):
        alike.setdefault((arms.get(diagnosis.trial, NOTHING), diagnosis.cause), []).append(diagnosis)
    return [
        facts.group(
            f"C{number}",
            {
                "arm": quote(arm),
                "cause": quote(cause.replace("_", " ")),
                "num": count(len({diagnosis.trial for diagnosis in found})),
                "seen": quote(found[0].seen),
                "tried": quote(found[0].tried),
                "meaning": quote(found[0].meaning),
            },
        )
        for number, ((arm, cause), found) in enumerate(alike.items(), start=1)
    ]


def unanswered_facts(facts: Facts, view: StudyView) -> list[Group]:
    """Questions about trials that the runner could not answer, `Q1`.., with the causes that need them."""
    asked = Counter(need for name in view.decisions for need in asked_by(name))
    silent = Counter(need for name, answer in view.decisions.items() for need in missing(name, answer))
    return [
        facts.group(
            f"Q{number}",
            {
                "asked": quote(NEEDS[need]),
                "num": count(silent[need]),
                "of": count(asked[need]),
                "causes": quote(causes_needing(need)),
            },
        )
        for number, need in enumerate((need for need in NEEDS if silent[need]), start=1)
    ]


def untested_facts(facts: Facts, number: int, found: Finding, hypothesis: Hypothesis, view: StudyView) -> list[Group]:
    """Sides of a claim with a cause in `UNTESTED` in most of their confirming runs."""
    groups = []
    for side, arm in enumerate((hypothesis.arm, hypothesis.against), start=1):
        runs = [one.trial.id for one in view.launched if one.trial.id in found.trials and one.trial.arm == arm]
        ill = [[d for d in view.diagnoses.get(run, []) if d.cause in UNTESTED] for run in runs]
        first = [diagnoses[0] for diagnoses in ill if diagnoses]
        if 2 * len(first) > len(runs):
            groups.append(
                facts.group(
                    f"untested{number}_{side}",
                    {
                        "arm": quote(arm),
                        "num": count(len(first)),
                        "of": count(len(runs)),
                        "causes": quote(", ".join(sorted({d.cause.replace("_", " ") for d in first}))),
                        "meaning": quote(first[0].meaning),
                    },
                )
            )
    return groups


def evidence_text(numbers: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} = {number:.4g}" for name, number in numbers)


def amendment_facts(facts: Facts, view: StudyView) -> list[Group]:
    return [
        facts.group(
            f"X{number}",
            {
                "asked": quote(action_text(amendment.asked)),
                "origin": quote({"human": "a person", "llm": "a language model"}.get(amendment.origin, "the plan")),
                "point": count(amendment.point),
                "refused": quote(amendment.refused.rstrip(".")),
            },
            is_refused=bool(amendment.refused),
        )
        for number, amendment in enumerate(view.amendments, start=1)
    ]


def not_added_facts(facts: Facts, view: StudyView) -> list[Group]:
    return [
        facts.group(f"not_added{number}", {"claim": quote(claim), "why": quote(why)})
        for number, (claim, why) in enumerate(view.not_added.items(), start=1)
    ]


def action_text(asked: Mapping[str, Any]) -> str:
    """Formats an action as `kind (field: value, ...)`, and an invalid request as its text."""
    if "kind" not in asked:
        return str(asked.get("text", ""))
    texts = {
        name: setting_text(value).text if isinstance(value, dict) else written(value) for name, value in asked.items()
    }
    rest = ", ".join(f"{name}: {texts[name]}" for name, value in asked.items() if name != "kind" and value)
    return texts["kind"].replace("_", " ") + (f" ({rest})" if rest else "")
