"""Batches that could teach nothing, because in each of their groups all rewards were equal: the count and the report.

An advantage compares the episodes of a group, so equal rewards leave the weights as they are. Server log, status and
training output print the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentjet.protocol.bodies import ZeroVariance

REPORTED_BATCHES = 3
"""So many batches in a row without variance are reported. One or two happen by chance."""


def batches_without_variance(steps: Sequence[Mapping[str, float]]) -> int:
    """The number of newest batches in a row in which no group had any variance; `steps` are their metrics in order."""
    count = 0
    for metrics in reversed(steps):
        if metrics.get("groups/zero_variance") != 1.0:
            break
        count += 1
    return count


def report_lines(found: ZeroVariance) -> list[str]:
    """The report for people: one group, and what to look at. Texts are escaped, so they cannot steer a terminal."""
    shown = [f"task {found.task_id!r}{f', prompt {found.prompt!r}' if found.prompt else ''}"]
    shown += [f"reward {a.reward:g} x {a.count}{f': {a.answer!r}' if a.answer else ''}" for a in found.answers]
    return [
        f"{found.batches} batches in a row could teach nothing: in every group all rewards were equal",
        *(f"  {line}" for line in shown),
        *(f"  look at {advice}" for advice in _advice(found)),
    ]


def _advice(found: ZeroVariance) -> list[str]:
    advice = []
    if found.truncated:
        advice.append(f"job.max_tokens: {found.truncated:.0%} of the answers were cut off")
    if len({one.answer for one in found.answers}) > 1:
        advice.append("the reward: the answers differ; does it accept what is right in them, or could it be partial?")
    elif found.prompt:
        advice.append("job.temperature: all answers are the same, so there is nothing to compare")
    advice.append("the tasks: take easier ones if every attempt fails, harder ones if every attempt succeeds")
    advice.append("job.group_size: more attempts at a task find rare successes")
    return advice
