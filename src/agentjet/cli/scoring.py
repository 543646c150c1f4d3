"""How good a policy is at held-out sums, for `agentjet demo` and `agentjet eval` alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agentjet.cli.arithmetic import FirstAnswer, held_out_tasks
from agentjet.client import Endpoint, Estimate, Swarm
from agentjet.errors import AgentJetError


@dataclass(frozen=True, slots=True)
class Exam:
    """What is asked, and of whom; see `Swarm.evaluate`."""

    tasks: int
    temperature: float = 1.0
    seed: int = 0
    concurrency: int = 64
    repeats: int = 1
    pass_at: tuple[int, ...] = ()
    at_version: int | Literal["newest"] | None = None
    endpoint: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of first answers to the held-out tasks that were right, and well formed, with 95 % intervals."""

    tasks: int
    repeats: int
    right: Estimate
    formed: Estimate
    answers: Mapping[str, str]
    policy_version: int
    seconds: float
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """By k."""

    @property
    def success(self) -> float:
        return self.right.value

    @property
    def success_interval(self) -> tuple[float, float]:
        return self.right.low, self.right.high

    @property
    def well_formed(self) -> float:
        return self.formed.value

    @property
    def well_formed_interval(self) -> tuple[float, float]:
        return self.formed.low, self.formed.high

    def __str__(self) -> str:
        low, high = self.success_interval
        asked = f"{self.tasks} first answers" if self.repeats == 1 else f"{self.tasks} x {self.repeats} first answers"
        line = (
            f"{self.success:.1%} of {asked} right (95 % interval {low:.1%} to {high:.1%}), "
            f"{self.well_formed:.1%} well formed"
        )
        return "".join([line, *[f"; pass@{k} {chance}" for k, chance in self.pass_at.items()]])

    def to_json(self) -> dict[str, Any]:
        """As `agentjet eval --json` prints it."""
        return {
            "tasks": self.tasks,
            "repeats": self.repeats,
            "success": self.success,
            "success_interval": list(self.success_interval),
            "well_formed": self.well_formed,
            "well_formed_interval": list(self.well_formed_interval),
            "pass_at": {str(k): {"value": e.value, "interval": [e.low, e.high]} for k, e in self.pass_at.items()},
            "policy_version": self.policy_version,
            "seconds": round(self.seconds, 3),
            "answers": dict(self.answers),
        }


def score_policy(swarm: Swarm, exam: Exam, *, progress: bool = True) -> Score:
    """Ask each held-out sum. Raises `AgentJetError` when one could not be asked: a score never has gaps."""
    examiner = FirstAnswer(temperature=exam.temperature, seed=exam.seed)
    report = swarm.evaluate(
        examiner,
        held_out_tasks(exam.tasks),
        repeats=exam.repeats,
        concurrency=exam.concurrency,
        progress=progress,
        at_version=exam.at_version,
        endpoint=exam.endpoint,
    )
    missing = len(report.results) - len(report.finished)
    if missing:
        raise AgentJetError(
            f"{missing} of {len(report.results)} could not be asked: {report.errors.most_common(1)[0][0]}"
        )
    return Score(
        tasks=exam.tasks,
        repeats=exam.repeats,
        right=report.mean_at_k,
        formed=report.metric_at_k("well_formed"),
        answers=examiner.answers,
        policy_version=report.policy_versions[1],
        seconds=report.seconds,
        pass_at={k: report.pass_at(k) for k in exam.pass_at},
    )
