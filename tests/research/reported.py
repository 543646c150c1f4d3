"""A study that has everything a report must tell: each verdict, runs that diverged, runs that were lost, diagnoses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from agentjet.research.journal import StudyLog
from agentjet.research.models import Arm, Diagnosis, Hypothesis, Outcome, Study
from agentjet.research.scheduler import conduct
from tests.research.world import KNOB, STUDY, Formula

RICH = replace(
    STUDY,
    topic="Which of b, c and d <help>, against a | alone?",
    arms=(
        Arm("a", {"gain": 0.0}, (KNOB,)),
        Arm("b *bold*", {"gain": 3.0}, (KNOB,)),
        Arm("c", {"gain": 0.1, "code": "x"}, (KNOB,)),
        Arm("d|<i>", {"gain": 1.0, "lr": 16.0}),
    ),
    hypotheses=(
        Hypothesis("b scores higher than a", "b *bold*", "a"),
        Hypothesis("a scores higher than b", "a", "b *bold*"),
        Hypothesis("c scores higher than a", "c", "a"),
        Hypothesis("d scores higher than a by 1", "d|<i>", "a"),
        Hypothesis("b scores higher than c", "b *bold*", "c", confirmatory=False, origin="human"),
    ),
    budget=150.0,
    evaluator="5f1c7c0a",
)
VERDICTS = ["supported", "refuted", "practically_equivalent", "inconclusive", "supported"]


@dataclass
class Told(Formula):
    """Reports the way to a score, too. Of arm d every fourth seed diverges, far below."""

    outcomes_left: int = 10_000
    """So many are answered before whoever waits is interrupted."""

    def collect(self, key: str) -> Outcome:
        if not self.outcomes_left:
            raise KeyboardInterrupt
        self.outcomes_left -= 1
        outcome = super().collect(key)
        trial = self.launched[key]
        if outcome.score is None:
            return outcome
        steps = np.arange(1, 2 + round(11 * trial.fidelity))
        curve = outcome.score * (1 - np.exp(-steps / 4))
        told = replace(outcome, curve=(*curve[:-1].tolist(), outcome.score))
        if trial.arm == "d|<i>" and trial.seed % 4 == 0:
            return replace(told, end="diverged", score=-40.0, note="loss is NaN at step 7")
        return told


@cache
def rich_book() -> StudyLog:
    """Do not write to it."""
    book = StudyLog()
    findings, _ = conduct(RICH, book, Told(lost={3, 4, 40}))
    assert [finding.verdict for finding in findings] == VERDICTS
    ill = next(outcomes[0].trial for outcomes in book.outcomes.values() if outcomes[0].end == "diverged")
    diagnosis = Diagnosis(
        ill, "kl_blow_up", "policy/kl reached 7.3", "at half of lr it stayed at 0.02", "too fast", 7, {"kl": 7.3}
    )
    book.append("diagnosis", diagnosis.to_json())
    return book


def interrupted(study: Study, outcomes: int) -> StudyLog:
    """The book of a study that was stopped after so many outcomes."""
    book = StudyLog()
    try:
        conduct(study, book, Told(outcomes_left=outcomes))
    except KeyboardInterrupt:
        return book
    raise AssertionError(f"the study ended within {outcomes} outcomes")
