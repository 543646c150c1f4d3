"""`diagnose`: what is the matter with the trials of a study. At most one cause each: the first in the order of `RULES`.

The order is that of causes: what is wrong with a setting or its data explains what it does to the learning. A cause
that follows from one already said is not said.
"""

from __future__ import annotations

from agentjet.research.desk import Desk
from agentjet.research.diagnosis import configuration, infrastructure, learning, reward
from agentjet.research.diagnosis.case import Case, Rule
from agentjet.research.diagnosis.pairs import twins
from agentjet.research.diagnosis.probing import Need, Probes
from agentjet.research.models import Diagnosis

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


def needing(need: Need) -> str:
    """The causes that are never said without this, for people."""
    return ", ".join(rule.cause.replace("_", " ") for rule in RULES if rule.asks == need)


def diagnose(desk: Desk) -> None:
    """Write into the book what it does not say yet. Infrastructure is read off every run, the rest off full ones."""
    trials = sorted(
        (trial for trial in desk.book.trials.values() if trial.phase != "probe"),
        key=lambda trial: trial.phase != "confirm",  # what verdicts stand on is asked about before the money ends
    )
    for trial in trials:
        for outcome in desk.book.outcomes[trial.id]:
            write(desk, infrastructure.lost(outcome))
    ended = [(trial, desk.book.outcomes[trial.id][-1]) for trial in trials if trial.fidelity == 1.0]
    full = [(trial, outcome) for trial, outcome in ended if outcome.signals and outcome.end != "infra_failed"]
    same = {diagnosis.trial: diagnosis for diagnosis in twins(full)}
    probes = Probes(desk)
    for trial, outcome in full:
        write(desk, examined(Case(trial, outcome, probes)) or same.get(trial.id))


def write(desk: Desk, diagnosis: Diagnosis | None) -> None:
    if diagnosis is not None and diagnosis not in desk.book.diagnoses.get(diagnosis.trial, []):
        desk.book.append("diagnosis", diagnosis.to_json())


def examined(case: Case) -> Diagnosis | None:
    """What the first rule that holds says."""
    for rule in RULES:
        sign = rule.sign(case)
        tried = sign and rule.probe(case, sign)
        if sign and tried:
            return Diagnosis(
                case.trial.id,
                rule.cause,
                sign.words,
                tried=tried.words,
                meaning=rule.meaning,
                step=sign.step,
                evidence={**sign.numbers, **tried.numbers},
            )
    return None
