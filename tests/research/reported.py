"""A study with everything that a report shows: each verdict, diverged runs, lost runs, diagnoses."""

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
    """Also reports curves. Every fourth seed of arm d diverges with a very low score."""

    outcomes_left: int = 10_000
    """Number of outcomes before the waiting caller is interrupted."""

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
    """Read-only."""
    log = StudyLog(now=lambda: 0.0)
    findings, _ = conduct(RICH, log, Told(lost={3, 4, 40}))
    assert [finding.verdict for finding in findings] == VERDICTS
    ill = next(outcomes[0].trial for outcomes in log.outcomes.values() if outcomes[0].end == "diverged")
    diagnosis = Diagnosis(ill, "kl_blow_up", "policy/kl reached 7.3", "too fast", {"kl": 7.3})
    log.entry("diagnosis", diagnosis.to_json())
    return log


def interrupted(study: Study, outcomes: int) -> StudyLog:
    """The log of a study that stopped after `num` outcomes."""
    log = StudyLog()
    try:
        conduct(study, log, Told(outcomes_left=outcomes))
    except KeyboardInterrupt:
        return log
    raise AssertionError(f"the study ended within {outcomes} outcomes")
