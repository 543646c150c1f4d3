"""Facts of a study: `study`, findings `F1`.., arms `A1`.., trials `T1`.., tuned settings `S1`.. and the budget,
`ledger`.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np

from agentjet.research.confirmation import DIRECTIONAL
from agentjet.research.models import EXPECTED, Arm, Finding, Hypothesis, canonical
from agentjet.research.report.caveats import (
    amendment_facts,
    cause_facts,
    diagnosis_facts,
    gather_limits,
    not_added_facts,
    simulated_facts,
    unanswered_facts,
    untested_facts,
)
from agentjet.research.report.facts import (
    NOTHING,
    Explored,
    Fact,
    Facts,
    Group,
    Launched,
    Rounding,
    StudyView,
    chance,
    count,
    counts,
    plain,
    quote,
    runs,
    setting_text,
    share,
    verbatim,
    written,
)
from agentjet.research.statistics import largest_unseen_rate

HEALTHY = 0.05
"""Chance that the failure rate of an arm exceeds `unseen`, if no seed failed."""


def gather(view: StudyView) -> Facts:
    facts = Facts()
    rounding = Rounding(view.study.sesoi)
    trials = {one.trial.id: trial_facts(facts, one, rounding) for one in view.launched}
    facts.groups.update(
        study=study_facts(facts, view, rounding),
        simulated=simulated_facts(facts),
        stage=view.stage,
        findings=[
            finding_facts(facts, number, hypothesis, view, rounding, trials)
            for number, hypothesis in enumerate(view.study.hypotheses, start=1)
        ],
        arms=[arm_facts(facts, number, arm, view, rounding) for number, arm in enumerate(view.study.arms, start=1)],
        trials=list(trials.values()),
        tuned=tuned_facts(facts, view, rounding),
        ledger=ledger_facts(facts, view),
        diagnoses=diagnosis_facts(facts, view, trials),
        causes=cause_facts(facts, view),
        unanswered=unanswered_facts(facts, view),
    )
    facts.groups.update(
        limits=gather_limits(facts, view, rounding),
        amendments=amendment_facts(facts, view),
        not_added=not_added_facts(facts, view),
        subject=subject_facts(facts, view),
    )
    return facts


def study_facts(facts: Facts, view: StudyView, rounding: Rounding) -> Group:
    study = view.study
    return facts.group(
        "study",
        {
            "topic": quote(study.topic),
            "metric": quote(study.metric),
            "id": verbatim(study.id),
            "hash": verbatim("SHA-256"),
            "evaluator": verbatim(study.evaluator),
            "sesoi": plain(study.sesoi),
            "alpha": plain(study.alpha),
            "either": plain(2 * study.alpha),
            "budget": runs(study.budget),
            "reserve": share(study.reserve),
            "looks": counts(study.looks),
            "last_look": count(study.looks[-1]),
            "rungs": quote(", ".join(share(rung).text for rung in study.rungs)),
            "seed": verbatim(str(study.seed)),
            "num_arms": count(len(study.arms)),
            "num_claims": count(len(study.hypotheses)),
            "num_trials": count(len(view.launched)),
            "num_unended": count(sum(one.outcome is None for one in view.launched)),
            "num_entries": count(view.num_entries),
            "num_exchanges": count(view.num_exchanges),
            "plan": verbatim(canonical(study.to_json())),
        },
        consulted=view.num_exchanges > 0,
        tunes=any(num_settings(arm) > 1 for arm in study.arms),
        tuned_alike=len({arm.nuisance for arm in study.arms}) == 1,
        agents_differ=bool(study.subject and study.subject.agents),
        expects=any(hypothesis.sign for hypothesis in study.hypotheses),
    )


def trial_facts(facts: Facts, one: Launched, rounding: Rounding) -> Group:
    trial = one.trial
    return facts.group(
        f"T{one.number}",
        {
            "name": Fact(f"T{one.number}"),
            "id": verbatim(trial.id),
            "arm": quote(trial.arm),
            "seed": verbatim(str(trial.seed)),
            "setting": setting_text(trial.setting),
            "phase": quote(trial.phase),
            "reached": share(trial.fidelity),
            "end": quote(one.end.replace("_", " ")),
            "score": rounding.score(one.score),
            "attempts": count(one.attempts),
            "note": quote(one.outcome.note if one.outcome else ""),
        },
    )


def finding_facts(
    facts: Facts, number: int, hypothesis: Hypothesis, view: StudyView, rounding: Rounding, trials: dict[str, Group]
) -> Group:
    """Includes hypotheses without a finding, with the verdict "open"."""
    found = view.findings.get(hypothesis.id)
    result = found or Finding(hypothesis.id, "inconclusive", "")
    verdict = found.verdict if found else "open"
    return facts.group(
        f"F{number}",
        {
            "name": Fact(f"F{number}"),
            "claim": quote(hypothesis.claim),
            "arm": quote(hypothesis.arm),
            "against": quote(hypothesis.against),
            "expected": quote(expected_text(hypothesis)),
            "origin": quote(hypothesis.origin),
            "verdict": Fact(verdict.replace("_", " "), verdict, kind="verdict"),
            "reason": quote(result.reason),
            "estimate": rounding.difference(result.estimate),
            "low": rounding.difference(result.low),
            "high": rounding.difference(result.high),
            "interval": interval(rounding, result.low, result.high),
            "level": Fact(NOTHING) if result.confidence is None else share(result.confidence, decimals=2),
            "p": chance(result.p_value),
            "permutation_p": chance(result.permutation_p),
            "seeds": count(result.seeds),
            "setting_of_arm": chosen_text(result, hypothesis.arm),
            "setting_of_against": chosen_text(result, hypothesis.against),
        },
        verdict_is=verdict,
        measured=result.estimate is not None,
        exploratory=not hypothesis.confirmatory,
        early=verdict in DIRECTIONAL and seeds_launched(result, view) < view.study.looks[-1],
        untested=untested_facts(facts, number, result, hypothesis, view),
        trials=[trials[name] for name in result.trials if name in trials],
    )


def seeds_launched(found: Finding, view: StudyView) -> int:
    """Seeds per arm at the look of a finding, including lost ones."""
    arms = [one.trial.arm for one in view.launched if one.trial.id in found.trials]
    return max(Counter(arms).values(), default=0)


def expected_text(hypothesis: Hypothesis) -> str:
    """The expectation before the data."""
    if hypothesis.sign is None:
        return ""
    return f"{EXPECTED[hypothesis.sign]}: {hypothesis.why}" if hypothesis.why else EXPECTED[hypothesis.sign]


def interval(rounding: Rounding, low: float | None, high: float | None) -> Fact:
    return Fact(NOTHING if low is None else f"{rounding.difference(low).text} to {rounding.difference(high).text}")


def chosen_text(found: Finding, arm: str) -> Fact:
    return setting_text(found.settings[arm]) if arm in found.settings else Fact(NOTHING)


def arm_facts(facts: Facts, number: int, arm: Arm, view: StudyView, rounding: Rounding) -> Group:
    confirming = view.confirming(arm.name)
    scores = [one.score for one in confirming if one.score is not None]
    ends = [one.end for one in confirming]
    return facts.group(
        f"A{number}",
        {
            "name": quote(arm.name),
            "changes": setting_text(arm.changes),
            "knobs": quote("; ".join(f"{k.name} over {', '.join(map(written, k.values))}" for k in arm.nuisance)),
            "code": verbatim(arm.code[:12]),
            "agent": verbatim(view.study.subject.agent_of(arm.name) if view.study.subject else ""),
            "num_settings": count(num_settings(arm)),
            "setting": setting_text(view.chosen[arm.name]) if arm.name in view.chosen else Fact(NOTHING),
            "num": count(len(confirming)),
            "scored": count(len(scores)),
            "completed": count(ends.count("completed")),
            "diverged": count(ends.count("diverged")),
            "lost": count(ends.count("infra_failed")),
            "mean": rounding.score(float(np.mean(scores)) if scores else None),
            "deviation": rounding.score(float(np.std(scores, ddof=1)) if len(scores) > 1 else None),
            "worst": rounding.score(min(scores, default=None)),
            "best": rounding.score(max(scores, default=None)),
            "unseen": share(largest_unseen_rate(len(scores), HEALTHY), decimals=0) if scores else Fact(NOTHING),
        },
        tuned=bool(arm.nuisance),
        never_failed=bool(scores) and "diverged" not in ends,
        lost_some="infra_failed" in ends,
    )


def num_settings(arm: Arm) -> int:
    """Size of the whole grid."""
    return prod(len(knob.values) for knob in arm.nuisance)


def tuned_facts(facts: Facts, view: StudyView, rounding: Rounding) -> list[Group]:
    """One group per setting that was tried of an arm with knobs."""
    every = [(arm, tried) for arm in view.study.arms if arm.nuisance for tried in view.explored(arm)]
    return [
        facts.group(
            f"S{number}",
            {
                "arm": quote(arm.name),
                "setting": setting_text({knob.name: tried.setting[knob.name] for knob in arm.nuisance}),
                "seeds": count(len(tried.scores)),
                "reached": share(tried.fidelity),
                "mean": rounding.score(float(np.mean(tried.scores)) if tried.scores else None),
                "outcome": quote(tuning_outcome(tried)),
            },
        )
        for number, (arm, tried) in enumerate(every, start=1)
    ]


def tuning_outcome(tried: Explored) -> str:
    if tried.chosen:
        return "chosen"
    if not tried.scores:
        return "unfinished" if any(one.outcome is None for one in tried.launched) else "lost"
    return "run in full" if tried.fidelity == 1 else "dropped early"


def ledger_facts(facts: Facts, view: StudyView) -> Group:
    study, spending = view.study, view.spending
    every = sum(map(num_settings, study.arms))
    seeds = max((found.seeds for found in view.findings.values()), default=0) or study.looks[0]
    declared, used = float(every * study.looks[-1]), float(every * seeds)
    return facts.group(
        "ledger",
        {
            "explore": runs(spending.spent["explore"]),
            "confirm": runs(spending.spent["confirm"]),
            "probe": runs(spending.spent["probe"]),
            "repeated": runs(spending.repeated),
            "total": runs(spending.total),
            "budget": runs(study.budget),
            "left": runs(study.budget - spending.total),
            "for_exploring": runs(spending.for_exploring),
            "used": share(spending.total / study.budget),
            "num_settings": count(every),
            "grid_seeds": count(study.looks[-1]),
            "grid": runs(declared),
            "of_grid": share(spending.total / declared),
            "small_grid_seeds": count(seeds),
            "small_grid": runs(used),
            "of_small_grid": share(spending.total / used),
        },
        probed=spending.spent["probe"] > 0,
        stopped_early=view.stage == "finished" and seeds < study.looks[-1],
    )


def subject_facts(facts: Facts, view: StudyView) -> Group | None:
    subject = view.study.subject
    if subject is None:
        return None
    return facts.group(
        "subject",
        {
            "model": verbatim(subject.model),
            "agent": verbatim(subject.agent),
            "tasks": verbatim(subject.tasks),
            "held_out": verbatim(subject.held_out),
            "settings": setting_text(subject.settings),
            "steps": count(subject.steps),
            "evaluations": count(subject.evaluations),
            "repeats": count(subject.repeats),
            "evaluator": verbatim(subject.evaluator),
            "code": verbatim(subject.code),
        },
        judged_apart=bool(subject.evaluator),
    )
