"""How good a policy is at held-out sums, for `agentjet demo` and `agentjet eval` alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentjet.cli.arithmetic import FirstAnswer, held_out_tasks
from agentjet.client import Swarm, wilson_interval
from agentjet.errors import AgentJetError


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of the held-out tasks whose first answer was right, and was well formed, with 95 % intervals (Wilson)."""

    tasks: int
    success: float
    success_interval: tuple[float, float]
    well_formed: float
    well_formed_interval: tuple[float, float]
    answers: Mapping[str, str]
    policy_version: int
    seconds: float

    def __str__(self) -> str:
        low, high = self.success_interval
        return (
            f"{self.success:.1%} of {self.tasks} first answers right (95 % interval {low:.1%} to {high:.1%}), "
            f"{self.well_formed:.1%} well formed"
        )

    def to_json(self) -> dict[str, Any]:
        """As `agentjet eval --json` prints it."""
        return {
            "tasks": self.tasks,
            "success": self.success,
            "success_interval": list(self.success_interval),
            "well_formed": self.well_formed,
            "well_formed_interval": list(self.well_formed_interval),
            "policy_version": self.policy_version,
            "seconds": round(self.seconds, 3),
            "answers": dict(self.answers),
        }


def score_policy(
    swarm: Swarm, *, tasks: int, temperature: float, seed: int, concurrency: int, progress: bool = True
) -> Score:
    """Ask each held-out sum once. Raises `AgentJetError` when one could not be asked: a score never has gaps."""
    examiner = FirstAnswer(temperature=temperature, seed=seed)
    report = swarm.evaluate(examiner, held_out_tasks(tasks), concurrency=concurrency, progress=progress)
    missing = len(report.results) - len(report.finished)
    if missing:
        raise AgentJetError(f"{missing} of {tasks} tasks could not be asked: {report.errors.most_common(1)[0][0]}")
    right, formed = report.mean_reward, report.mean_metric("well_formed")
    return Score(
        tasks=tasks,
        success=right,
        success_interval=wilson_interval(right * tasks, tasks),
        well_formed=formed,
        well_formed_interval=wilson_interval(formed * tasks, tasks),
        answers=examiner.answers,
        policy_version=report.policy_versions[1],
        seconds=report.seconds,
    )
