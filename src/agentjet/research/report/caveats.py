"""What a finding does not say, each limitation with the facts that it is read from.

A limitation holds or does not hold by a rule over the proceedings; the template has the words.

Facts of what befell a study: diagnoses `D1`.. and their causes `C1`.., questions without an answer `Q1`.., and what
was asked of it later, `X1`...
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentjet.research.diagnosis import needing
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
"""From so many seeds an arm on, a normal mean is not worth a warning."""
UNEQUAL = 3.0
"""Deviations of two arms that differ by this factor strain the boundary's approximation (see docs/research.md)."""
FIFTH = 0.2
"""Of what seeds differ by: a smaller effect of interest is called wrongly more often than alpha says."""
MOST_CLAIMS = 10
"""So many claims of one study were simulated."""
SIMULATED = {"alpha": 0.05, "even": 0.06, "uneven": 0.1, "fine": 0.16, "single_even": 0.057, "single_uneven": 0.068}
"""Chances of any wrong call, the largest that `python -m bench.error_rates` finds for this alpha. The effect of
interest is `FIFTH` or more, spreads are equal or not; `fine`: it is less. The last two: one claim, 4, 8, 12 seeds.
"""


def simulated_facts(facts: Facts) -> Group:
    rates = {name: plain(rate) for name, rate in SIMULATED.items()}
    return facts.group("simulated", {**rates, "fifth": share(FIFTH), "claims": count(MOST_CLAIMS)})


def gather_limits(facts: Facts, done: StudyView, rounding: Rounding) -> Group:
    """Lists of groups, empty where a limitation does not hold, by its name."""
    return {
        "edges": list(edges(facts, done)),
        "apart": list(tuned_apart(facts, done)),
        "unequal": list(unequal_spreads(facts, done, rounding)),
        "fine": list(fine_interests(facts, done)),
        "few_seeds": [f for f in done.findings.values() if f.estimate is not None and f.seeds < MANY_SEEDS] != [],
        "untuned": [quote_group(facts, f"untuned{i}", arm) for i, arm in enumerate(untuned(done), start=1)],
        "lost": list(lost(facts, done)),
        "replayed": list(replayed(facts, done)),
        "running": [one for one in done.launched if one.outcome is None] != [],
        "skipped_rungs": list(skipped_rungs(facts, done)),
        "repeated": repeated(facts, done),
        "diagnosed": diagnosed(facts, done),
        "unpinned": not done.study.evaluator,
    }


def edges(facts: Facts, done: StudyView) -> Iterator[Group]:
    """Knobs that an arm was judged at the end of."""
    number = 0
    for arm in done.study.arms:
        chosen = done.chosen.get(arm.name, {})
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


def tuned_apart(facts: Facts, done: StudyView) -> Iterator[Group]:
    """Pairs that are compared at different values of a knob that both tuned."""
    for number, hypothesis in enumerate(done.study.hypotheses, start=1):
        a, b = (done.chosen.get(name, {}) for name in (hypothesis.arm, hypothesis.against))
        both = {knob.name for knob in done.study.arm(hypothesis.arm).nuisance}
        both &= {knob.name for knob in done.study.arm(hypothesis.against).nuisance}
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


def unequal_spreads(facts: Facts, done: StudyView, rounding: Rounding) -> Iterator[Group]:
    for number, hypothesis in enumerate(done.study.hypotheses, start=1):
        spreads = {name: deviation(done.confirming(name)) for name in (hypothesis.arm, hypothesis.against)}
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


def fine_interests(facts: Facts, done: StudyView) -> Iterator[Group]:
    """Claims whose seeds differ by so much that the smallest effect of interest is less than `FIFTH` of it."""
    for number, hypothesis in enumerate(done.study.hypotheses, start=1):
        differ_by = math.hypot(
            *(deviation(done.confirming(n)) for n in (hypothesis.arm, hypothesis.against))
        ) / math.sqrt(2)
        if done.study.sesoi < FIFTH * differ_by:
            yield facts.group(
                f"fine{number}",
                {
                    "arm": quote(hypothesis.arm),
                    "against": quote(hypothesis.against),
                    "of": share(done.study.sesoi / differ_by),
                },
            )


def deviation(launched: list[Launched]) -> float:
    scores = [one.score for one in launched if one.score is not None]
    return float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0


def untuned(done: StudyView) -> list[Arm]:
    return [arm for arm in done.study.arms if not arm.nuisance]


def quote_group(facts: Facts, name: str, arm: Arm) -> Group:
    return facts.group(name, {"arm": quote(arm.name), "setting": setting_text(arm.changes)})


def lost(facts: Facts, done: StudyView) -> Iterator[Group]:
    """Arms whose confirming seeds did not all come back."""
    for number, arm in enumerate(done.study.arms, start=1):
        launched = done.confirming(arm.name)
        missing = sum(one.end == "infra_failed" for one in launched)
        if missing:
            yield facts.group(
                f"lost{number}", {"arm": quote(arm.name), "num": count(missing), "of": count(len(launched))}
            )


def replayed(facts: Facts, done: StudyView) -> Iterator[Group]:
    """Arms of whose held-out plays some failed, in the confirming trials."""
    for number, arm in enumerate(done.study.arms, start=1):
        plays = held_out_counts(one.outcome for one in done.confirming(arm.name) if one.outcome)
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


def skipped_rungs(facts: Facts, done: StudyView) -> Iterator[Group]:
    """Rungs that the study declared and the first arm's ranks did not bear out."""
    kept = done.decisions.get("rungs")
    if isinstance(kept, list):
        dropped = [rung for rung in done.study.rungs if rung not in kept]
        for number, rung in enumerate(dropped, start=1):
            yield facts.group(f"rung{number}", {"at": share(rung)})


def repeated(facts: Facts, done: StudyView) -> Group | None:
    again = [one for one in done.launched if one.attempts > 1]
    if not again:
        return None
    return facts.group(
        "repeated",
        {"trials": count(len(again)), "launches": count(sum(one.attempts - 1 for one in again))},
    )


def diagnosed(facts: Facts, done: StudyView) -> Group | None:
    """Confirming trials that something was the matter with."""
    trials = [one for one in done.launched if one.trial.phase == "confirm"]
    ill = [one for one in trials if one.trial.id in done.diagnoses]
    return facts.group("diagnosed", {"num": count(len(ill)), "of": count(len(trials))}) if ill else None


UNTESTED = frozenset({"too_hard", "too_easy", "no_exploration", "ignored_setting", "no_op", "not_a_number"})
"""Causes after which a run says nothing of the setting that it was of."""


def diagnosis_facts(facts: Facts, done: StudyView, trials: dict[str, Group]) -> list[Group]:
    every = [diagnosis for told in done.diagnoses.values() for diagnosis in told]
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


def cause_facts(facts: Facts, done: StudyView) -> list[Group]:
    """Diagnoses of the same cause in the same arm, told by the first of them."""
    alike: dict[tuple[str, str], list[Diagnosis]] = {}
    arms = {one.trial.id: one.trial.arm for one in done.launched}
    for diagnosis in (diagnosis for told in done.diagnoses.values() for diagnosis in told):
        alike.setdefault((arms.get(diagnosis.trial, NOTHING), diagnosis.cause), []).append(diagnosis)
    return [
        facts.group(
            f"C{number}",
            {
                "arm": quote(arm),
                "cause": quote(cause.replace("_", " ")),
                "num": count(len({diagnosis.trial for diagnosis in told})),
                "seen": quote(told[0].seen),
                "tried": quote(told[0].tried),
                "meaning": quote(told[0].meaning),
            },
        )
        for number, ((arm, cause), told) in enumerate(alike.items(), start=1)
    ]


def unanswered_facts(facts: Facts, done: StudyView) -> list[Group]:
    """What was asked of trials and the runner could not tell, `Q1`.., with the causes that need it."""
    asked = Counter(need for name in done.decisions for need in asked_by(name))
    silent = Counter(need for name, answer in done.decisions.items() for need in missing(name, answer))
    return [
        facts.group(
            f"Q{number}",
            {
                "asked": quote(NEEDS[need]),
                "num": count(silent[need]),
                "of": count(asked[need]),
                "causes": quote(needing(need)),
            },
        )
        for number, need in enumerate((need for need in NEEDS if silent[need]), start=1)
    ]


def untested_facts(facts: Facts, number: int, found: Finding, hypothesis: Hypothesis, done: StudyView) -> list[Group]:
    """The sides of a claim most of whose confirming runs a diagnosis calls untested."""
    told = []
    for side, arm in enumerate((hypothesis.arm, hypothesis.against), start=1):
        runs = [one.trial.id for one in done.launched if one.trial.id in found.trials and one.trial.arm == arm]
        ill = [[d for d in done.diagnoses.get(run, []) if d.cause in UNTESTED] for run in runs]
        first = [diagnoses[0] for diagnoses in ill if diagnoses]
        if 2 * len(first) > len(runs):
            told.append(
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
    return told


def evidence_text(numbers: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} = {number:.4g}" for name, number in numbers)


def amendment_facts(facts: Facts, done: StudyView) -> list[Group]:
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
        for number, amendment in enumerate(done.amendments, start=1)
    ]


def not_added_facts(facts: Facts, done: StudyView) -> list[Group]:
    return [
        facts.group(f"not_added{number}", {"claim": quote(claim), "why": quote(why)})
        for number, (claim, why) in enumerate(done.not_added.items(), start=1)
    ]


def action_text(asked: Mapping[str, Any]) -> str:
    """An action as `kind (field: value, ...)`; what was none, as it was said."""
    if "kind" not in asked:
        return str(asked.get("text", ""))
    said = {
        name: setting_text(value).text if isinstance(value, dict) else written(value) for name, value in asked.items()
    }
    rest = ", ".join(f"{name}: {said[name]}" for name, value in asked.items() if name != "kind" and value)
    return said["kind"].replace("_", " ") + (f" ({rest})" if rest else "")
