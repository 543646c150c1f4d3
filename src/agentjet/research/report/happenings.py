"""Facts of what befell a study: diagnoses `D1`.. and their causes `C1`.., questions without an answer `Q1`.., and what
was asked of it later, `X1`...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.research.diagnosis.diagnose import needing
from agentjet.research.diagnosis.probing import NEEDS, asked_by, missing
from agentjet.research.models import Diagnosis, Finding, Hypothesis
from agentjet.research.report.facts import NOTHING, Fact, Facts, Group, count, quote, setting_text, written
from agentjet.research.report.proceedings import Proceedings

UNTESTED = frozenset({"too_hard", "too_easy", "no_exploration", "ignored_setting", "no_op", "not_a_number"})
"""Causes after which a run says nothing of the setting that it was of."""


def diagnosis_facts(facts: Facts, done: Proceedings, trials: dict[str, Group]) -> list[Group]:
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


def cause_facts(facts: Facts, done: Proceedings) -> list[Group]:
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


def unanswered_facts(facts: Facts, done: Proceedings) -> list[Group]:
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


def untested_facts(facts: Facts, number: int, found: Finding, hypothesis: Hypothesis, done: Proceedings) -> list[Group]:
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


def amendment_facts(facts: Facts, done: Proceedings) -> list[Group]:
    return [
        facts.group(
            f"X{number}",
            {
                "asked": quote(asked_text(amendment.asked)),
                "origin": quote({"human": "a person", "llm": "a language model"}.get(amendment.origin, "the plan")),
                "point": count(amendment.point),
                "refused": quote(amendment.refused.rstrip(".")),
            },
            is_refused=bool(amendment.refused),
        )
        for number, amendment in enumerate(done.amendments, start=1)
    ]


def not_added_facts(facts: Facts, done: Proceedings) -> list[Group]:
    return [
        facts.group(f"not_added{number}", {"claim": quote(claim), "why": quote(why)})
        for number, (claim, why) in enumerate(done.not_added.items(), start=1)
    ]


def asked_text(asked: Mapping[str, Any]) -> str:
    """An action as `kind (field: value, ...)`; what was none, as it was said."""
    if "kind" not in asked:
        return str(asked.get("text", ""))
    said = {
        name: setting_text(value).text if isinstance(value, dict) else written(value) for name, value in asked.items()
    }
    rest = ", ".join(f"{name}: {said[name]}" for name, value in asked.items() if name != "kind" and value)
    return said["kind"].replace("_", " ") + (f" ({rest})" if rest else "")
