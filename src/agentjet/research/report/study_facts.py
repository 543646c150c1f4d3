"""Every fact of a study, from its proceedings: `study`, findings `F1`.., arms `A1`.., trials `T1`.., what tuning tried
`S1`.., diagnoses `D1`.., the `ledger`, and the lists that limitations are said of (`limits`).
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
"""The chance that an arm fails more often than its `unseen` says, having never failed here."""


def gather(done: StudyView) -> Facts:
    facts = Facts()
    rounding = Rounding(done.study.sesoi)
    trials = {one.trial.id: trial_facts(facts, one, rounding) for one in done.launched}
    facts.groups.update(
        study=study_facts(facts, done, rounding),
        simulated=simulated_facts(facts),
        stage=done.stage,
        findings=[
            finding_facts(facts, number, hypothesis, done, rounding, trials)
            for number, hypothesis in enumerate(done.study.hypotheses, start=1)
        ],
        arms=[arm_facts(facts, number, arm, done, rounding) for number, arm in enumerate(done.study.arms, start=1)],
        trials=list(trials.values()),
        tuned=tuned_facts(facts, done, rounding),
        ledger=ledger_facts(facts, done),
        diagnoses=diagnosis_facts(facts, done, trials),
        causes=cause_facts(facts, done),
        unanswered=unanswered_facts(facts, done),
    )
    facts.groups.update(
        limits=gather_limits(facts, done, rounding),
        amendments=amendment_facts(facts, done),
        not_added=not_added_facts(facts, done),
        subject=subject_facts(facts, done),
    )
    return facts


def study_facts(facts: Facts, done: StudyView, rounding: Rounding) -> Group:
    study = done.study
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
            "num_trials": count(len(done.launched)),
            "num_unended": count(sum(one.outcome is None for one in done.launched)),
            "num_entries": count(done.num_entries),
            "num_exchanges": count(done.num_exchanges),
            "plan": verbatim(canonical(study.to_json())),
        },
        consulted=done.num_exchanges > 0,
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
    facts: Facts, number: int, hypothesis: Hypothesis, done: StudyView, rounding: Rounding, trials: dict[str, Group]
) -> Group:
    """Of a hypothesis without a finding too: its verdict is "open"."""
    found = done.findings.get(hypothesis.id)
    said = found or Finding(hypothesis.id, "inconclusive", "")
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
            "reason": quote(said.reason),
            "estimate": rounding.difference(said.estimate),
            "low": rounding.difference(said.low),
            "high": rounding.difference(said.high),
            "interval": interval(rounding, said.low, said.high),
            "level": Fact(NOTHING) if said.confidence is None else share(said.confidence, decimals=2),
            "p": chance(said.p_value),
            "permutation_p": chance(said.permutation_p),
            "seeds": count(said.seeds),
            "setting_of_arm": chosen_text(said, hypothesis.arm),
            "setting_of_against": chosen_text(said, hypothesis.against),
        },
        verdict_is=verdict,
        measured=said.estimate is not None,
        exploratory=not hypothesis.confirmatory,
        early=verdict in DIRECTIONAL and seeds_launched(said, done) < done.study.looks[-1],
        untested=untested_facts(facts, number, said, hypothesis, done),
        trials=[trials[name] for name in said.trials if name in trials],
    )


def seeds_launched(found: Finding, done: StudyView) -> int:
    """An arm, for the look that a finding was read at; those that were lost are among them."""
    arms = [one.trial.arm for one in done.launched if one.trial.id in found.trials]
    return max(Counter(arms).values(), default=0)


def expected_text(hypothesis: Hypothesis) -> str:
    """Of the first arm, before the data."""
    if hypothesis.sign is None:
        return ""
    return f"{EXPECTED[hypothesis.sign]}: {hypothesis.why}" if hypothesis.why else EXPECTED[hypothesis.sign]


def interval(rounding: Rounding, low: float | None, high: float | None) -> Fact:
    return Fact(NOTHING if low is None else f"{rounding.difference(low).text} to {rounding.difference(high).text}")


def chosen_text(found: Finding, arm: str) -> Fact:
    return setting_text(found.settings[arm]) if arm in found.settings else Fact(NOTHING)


def arm_facts(facts: Facts, number: int, arm: Arm, done: StudyView, rounding: Rounding) -> Group:
    confirming = done.confirming(arm.name)
    scores = [one.score for one in confirming if one.score is not None]
    ends = [one.end for one in confirming]
    return facts.group(
        f"A{number}",
        {
            "name": quote(arm.name),
            "changes": setting_text(arm.changes),
            "knobs": quote("; ".join(f"{k.name} over {', '.join(map(written, k.values))}" for k in arm.nuisance)),
            "code": verbatim(arm.code[:12]),
            "agent": verbatim(done.study.subject.agent_of(arm.name) if done.study.subject else ""),
            "num_settings": count(num_settings(arm)),
            "setting": setting_text(done.chosen[arm.name]) if arm.name in done.chosen else Fact(NOTHING),
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
    """Of its whole grid."""
    return prod(len(knob.values) for knob in arm.nuisance)


def tuned_facts(facts: Facts, done: StudyView, rounding: Rounding) -> list[Group]:
    """One for each setting that was tried of an arm with knobs."""
    every = [(arm, tried) for arm in done.study.arms if arm.nuisance for tried in done.explored(arm)]
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


def ledger_facts(facts: Facts, done: StudyView) -> Group:
    study, ledger = done.study, done.ledger
    every = sum(map(num_settings, study.arms))
    seeds = max((found.seeds for found in done.findings.values()), default=0) or study.looks[0]
    declared, used = float(every * study.looks[-1]), float(every * seeds)
    return facts.group(
        "ledger",
        {
            "explore": runs(ledger.spent["explore"]),
            "confirm": runs(ledger.spent["confirm"]),
            "probe": runs(ledger.spent["probe"]),
            "repeated": runs(ledger.repeated),
            "total": runs(ledger.total),
            "budget": runs(study.budget),
            "left": runs(study.budget - ledger.total),
            "for_exploring": runs(ledger.for_exploring),
            "used": share(ledger.total / study.budget),
            "num_settings": count(every),
            "grid_seeds": count(study.looks[-1]),
            "grid": runs(declared),
            "of_grid": share(ledger.total / declared),
            "small_grid_seeds": count(seeds),
            "small_grid": runs(used),
            "of_small_grid": share(ledger.total / used),
        },
        probed=ledger.spent["probe"] > 0,
        stopped_early=done.stage == "finished" and seeds < study.looks[-1],
    )


def subject_facts(facts: Facts, done: StudyView) -> Group | None:
    subject = done.study.subject
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
