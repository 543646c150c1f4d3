"""The facts of a study: one JSON object from its journal, for its report, for the page and for `facts.json`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from agentjet.research.confirmation import DIRECTIONAL
from agentjet.research.models import EXPECTED, Arm, Finding, Hypothesis
from agentjet.research.records import Setting, Value
from agentjet.research.report.limits import SIMULATED, deviations, limitations
from agentjet.research.report.view import Launched, StudyView
from agentjet.research.statistics import largest_unseen_rate

UNTESTED = frozenset({"too_hard", "too_easy", "no_exploration", "ignored_setting", "no_op", "not_a_number"})
"""Causes after which a run shows nothing about its setting."""
Facts = dict[str, Any]


def gather(view: StudyView) -> Facts:
    """All facts of a study. Numbers are not rounded."""
    study = view.study
    return {
        "study": study.to_json() | {"id": study.id, "subject": study.subject and study.subject.to_json()},
        "stage": view.stage,
        "num_entries": len(view.log.entries),
        "num_unended": sum(one.outcome is None for one in view.launched),
        "findings": [finding_facts(f"F{n}", hypothesis, view) for n, hypothesis in enumerate(study.hypotheses, 1)],
        "arms": [arm_facts(arm, view) for arm in study.arms],
        "trials": [trial_facts(one) for one in view.launched],
        "evaluation_steps": evaluation_steps(view),
        "ledger": {
            **view.spending.spent,
            "repeated": view.spending.repeated,
            "total": view.spending.total,
            "budget": study.budget,
            "for_exploring": view.spending.for_exploring,
        },
        "diagnoses": diagnosis_facts(view),
        "deviations": list(deviations(view)),
        "limitations": list(limitations(view)),
        "simulated": SIMULATED,
    }


def setting_text(setting: Setting) -> str:
    return ", ".join(f"{name} = {written(value)}" for name, value in sorted(setting.items())) or "the base"


def written(value: Value) -> str:
    """A setting's value in the notation of settings."""
    return re.sub(r"e([+-])0*", r"e\1", f"{value:.10g}") if type(value) is float else str(value)


def trial_facts(one: Launched) -> Facts:
    outcome = one.outcome
    return {
        **one.trial.to_json(),
        "id": one.trial.id,
        "name": one.name,
        "setting": setting_text(one.trial.setting),
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
    seeds = max(Counter(one.trial.arm for one in trials).values(), default=0)
    expected = EXPECTED[hypothesis.sign] if hypothesis.sign else ""
    return {
        **hypothesis.to_json(),
        **found.to_json(),
        "name": name,
        "verdict": known.verdict if known else "open",
        "expected": f"{expected}: {hypothesis.why}" if hypothesis.why else expected,
        "early": found.verdict in DIRECTIONAL and seeds < view.study.looks[-1],
        "untested": untested(found, hypothesis, view),
        "settings": [f"{arm}: {setting_text(setting)}" for arm, setting in sorted(found.settings.items())],
        "trials": [one.name for one in trials],
        "looks": [look.to_json() for look in view.looks(hypothesis.id)],
    }


def untested(found: Finding, hypothesis: Hypothesis, view: StudyView) -> list[str]:
    """A sentence for each side of a claim with a cause in `UNTESTED` in most of its confirming runs."""
    sentences = []
    for arm in (hypothesis.arm, hypothesis.against):
        runs = [one.trial.id for one in view.launched if one.trial.id in found.trials and one.trial.arm == arm]
        ill = [[d for d in view.log.diagnoses.get(run, []) if d.cause in UNTESTED] for run in runs]
        first = [diagnoses[0] for diagnoses in ill if diagnoses]
        if 2 * len(first) > len(runs):
            causes = ", ".join(sorted({d.cause.replace("_", " ") for d in first}))
            sentences.append(
                f"{len(first)} of {len(runs)} confirming runs of “{arm}” are diagnosed as {causes}: {first[0].meaning}."
            )
    return sentences


def arm_facts(arm: Arm, view: StudyView) -> Facts:
    confirming, scores = view.confirming(arm.name), view.scores(arm.name)
    ends = Counter(one.end for one in confirming)
    subject = view.study.subject
    return {
        "name": arm.name,
        "changes": setting_text(arm.changes),
        "knobs": "; ".join(f"{knob.name} over {', '.join(map(written, knob.values))}" for knob in arm.nuisance),
        "agent": subject.agent_of(arm.name) if subject else arm.code[:12],
        "setting": setting_text(view.chosen[arm.name]) if arm.name in view.chosen else "",
        "completed": ends["completed"],
        "diverged": ends["diverged"],
        "lost": ends["infra_failed"],
        "scored": len(scores),
        "mean": float(np.mean(scores)) if scores else None,
        "deviation": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "worst": min(scores, default=None),
        "best": max(scores, default=None),
        "unseen": largest_unseen_rate(len(scores)) if scores and not ends["diverged"] else None,
        "runs": [one.name for one in confirming],
    }


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
