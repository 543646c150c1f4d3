"""`diagnose`: what is the matter with the trials of a study. At most one cause each: the first in the order of `RULES`.

The order is that of causes: what is wrong with a setting or its data explains what it does to the learning. A cause
that follows from one already said is not said.
"""

from __future__ import annotations

from agentjet.research.desk import Desk
from agentjet.research.diagnosis import configuration, infrastructure, learning, reward
from agentjet.research.diagnosis.case import Case, Rule
from agentjet.research.diagnosis.pairs import twins
from agentjet.research.diagnosis.probing import Probes
from agentjet.research.models import Diagnosis, Outcome, Trial

RULES: tuple[Rule, ...] = (
    configuration.IGNORED,
    configuration.LEAK,
    configuration.STALE,
    learning.NOT_A_NUMBER,
    reward.DRIFTING_JUDGE,
    learning.TOO_HARD,
    learning.TOO_EASY,
    learning.NO_EXPLORATION,
    reward.LENGTH_EXPLOSION,
    reward.REWARD_HACKING,
    learning.STEP_TOO_LARGE,
    learning.WRONG_SIGN,
    learning.ENTROPY_COLLAPSE,
)


def diagnose(desk: Desk) -> None:
    """Write into the book what it does not say yet. Infrastructure is read off every run, the rest off full ones."""
    book = desk.book
    probes = Probes(desk)
    trials = [trial for trial in book.trials.values() if trial.phase != "probe"]
    found = [lost for trial in trials for outcome in book.outcomes[trial.id] if (lost := infrastructure.lost(outcome))]
    full = [
        (trial, book.outcomes[trial.id][-1])
        for trial in trials
        if trial.fidelity == 1.0 and book.outcomes[trial.id][-1].end != "infra_failed"
    ]
    same = {diagnosis.trial: diagnosis for diagnosis in twins(full)}
    for trial, outcome in full:
        diagnosis = examined(trial, outcome, probes) or same.get(trial.id)
        found += [diagnosis] if diagnosis else []
    for diagnosis in found:
        if diagnosis not in book.diagnoses.get(diagnosis.trial, []):
            book.append("diagnosis", diagnosis.to_json())


def examined(trial: Trial, outcome: Outcome, probes: Probes) -> Diagnosis | None:
    """What the first rule that holds says."""
    if not outcome.signals:
        return None
    case = Case(trial, outcome, probes)
    for rule in RULES:
        sign = rule.sign(case)
        tried = sign and rule.probe(case, sign)
        if sign and tried:
            return Diagnosis(
                trial.id,
                rule.cause,
                sign.words,
                tried=tried.words,
                meaning=rule.meaning,
                step=sign.step,
                evidence={**sign.numbers, **tried.numbers},
            )
    return None
