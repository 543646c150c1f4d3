"""Figures of a run, and the settings in which runs differ: for `agentjet compare` and for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.protocol import EvaluationRequest

FINAL_STEPS = 5
"""The first and the final reward are means of this many batches: the reward of a single batch is mostly noise."""
TIMES = ("time/sample", "time/wait", "time/learn")

Figures = dict[str, float | None]


def figures(steps: Mapping[int, Mapping[str, float | None]], evaluations: Sequence[EvaluationRequest]) -> Figures:
    """Returns the figures of a run. `steps` are its metrics by the policy version after the step, in order.

    Batches that a rollback undid are not among them. Scores are None without evaluations.
    """
    rewards = {version: reward for version, step in steps.items() if (reward := step.get("reward/mean")) is not None}
    scores = [one.score for one in evaluations]
    return {
        "policy_version": max(steps, default=0),
        "batches": len(steps),
        f"reward_first_{FINAL_STEPS}": _mean(list(rewards.values())[:FINAL_STEPS]),
        f"reward_last_{FINAL_STEPS}": _mean(list(rewards.values())[-FINAL_STEPS:]),
        "reward_best": max(rewards.values(), default=None),
        "reward_best_version": max(rewards, key=rewards.__getitem__, default=None),
        "evaluations": len(scores),
        "score_first": scores[0] if scores else None,
        "score_last": scores[-1] if scores else None,
        "score_best": max(scores, default=None),
        "score_best_version": evaluations[scores.index(max(scores))].policy_version if scores else None,
        "episodes": round(_sum(steps, "batch/episodes")),
        "sampled_tokens": round(_sum(steps, "batch/sampled_tokens")),
        "minutes": sum(_sum(steps, name) for name in TIMES) / 60,
    }


def differing_settings(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the value in each run of the settings that differ, by name."""
    values = {key: [one.get(key) for one in settings] for key in dict.fromkeys(key for one in settings for key in one)}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def _sum(steps: Mapping[int, Mapping[str, float | None]], name: str) -> float:
    return math.fsum(step.get(name) or 0.0 for step in steps.values())


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
