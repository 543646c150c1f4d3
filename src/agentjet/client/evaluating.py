"""One `evaluate` call: every task so many times, nothing of it trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentjet.client.progress import progress_for
from agentjet.client.report import EpisodeResult, EvalReport
from agentjet.client.rollout import Begin, Runner, Slot
from agentjet.types import Task

EVAL_WAIT = 60.0
"""How long an evaluation waits for a place."""


async def evaluated(
    begin: Begin, tasks: Sequence[Task], *, repeats: int, concurrency: int, progress: bool
) -> EvalReport:
    """Run the agent that `begin` gives on every task `repeats` times.

    An episode whose agent fails is begun anew up to twice, then reported as aborted: it counts in no mean.
    """
    started = time.monotonic()
    repeated = [task for task in tasks for _ in range(repeats)]
    results: dict[int, EpisodeResult] = {}
    with progress_for("evaluating", len(repeated), wanted=progress, num_lines=4) as shown:

        def note(slot: Slot, result: EpisodeResult, last: bool) -> None:
            shown.episode(result, counts=last)
            if last:
                results[slot.index] = result

        slots = (Slot(task, "", index) for index, task in enumerate(repeated))
        await Runner(begin, note).run(slots, min(concurrency, len(repeated)))
    ordered = tuple(results[index] for index in sorted(results))
    return EvalReport(results=ordered, seconds=time.monotonic() - started)
