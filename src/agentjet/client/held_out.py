"""`HeldOut`: evaluations on held-out tasks within a training run, and whether their score still improves.

They run beside the training episodes; learning waits while a version is evaluated, so every score is of one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentjet.client.code import Version
from agentjet.client.report import EvalReport, Evaluation, best_of
from agentjet.client.rollout import AgentFailing
from agentjet.errors import Conflict


@dataclass
class HeldOut:
    """The evaluations of one run: when they are due, and their scores so far."""

    evaluate: Callable[[Version], Awaitable[EvalReport]]
    """Evaluates the newest policy version with a version of the agent."""
    every: int
    """Batches from one evaluation to the next."""
    stop_after: int = 0
    """Evaluations in a row that may pass without a new best score; 0: any number."""
    done: list[Evaluation] = field(default_factory=list)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    def learned(self, num_steps: int) -> None:
        """The run has learned so many batches; the first evaluation is due before the first."""
        if num_steps % self.every == 0:
            self.due.set()

    async def watch(self, version: Callable[[], Version], say: Callable[[str], None]) -> None:
        """Evaluate whenever one is due; ends when the score no longer improves."""
        while not self.stalled:
            await self.due.wait()
            self.due.clear()
            await self.run(version(), say)

    async def finish(self, version: Version, policy_version: int, say: Callable[[str], None]) -> None:
        """Evaluate the last version of a run, unless that is done."""
        if not self.done or self.done[-1].policy_version != policy_version:
            await self.run(version, say)

    async def run(self, version: Version, say: Callable[[str], None]) -> None:
        """One evaluation. The run goes on without it when it takes longer than the server holds a version."""
        try:
            report = await self.evaluate(version)
        except Conflict as gone:
            if gone.code != "version_gone":
                raise
            say(f"held-out tasks were not all evaluated before the policy learned on: {gone}")
            return
        except AgentFailing as failing:
            raise AgentFailing(f"held-out evaluation: {failing.fact}", tasks="eval_tasks") from None
        self.done.append(Evaluation(report.policy_versions[0], report))
        best = "; the best so far" if best_of(self.done) is self.done[-1] and len(self.done) > 1 else ""
        say(f"held-out tasks at version {self.done[-1].policy_version}: {report}{best}")

    @property
    def stalled(self) -> bool:
        """True if the last `stop_after` evaluations brought no new best score."""
        return bool(self.stop_after) and best_of(self.done[: -self.stop_after]) is best_of(self.done) is not None


def check(eval_tasks: Sequence[object], every: int, stop_after: int) -> None:
    """Raises `ValueError` for settings of the evaluations that do not fit each other."""
    for name, value in (("eval_every", every), ("stop_after", stop_after)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} = {value!r}: it must be a whole number, 0 for none")
    if bool(eval_tasks) != bool(every):
        given, missing = ("eval_tasks", "eval_every") if eval_tasks else (f"eval_every = {every}", "eval_tasks")
        raise ValueError(f"{given} needs {missing}: held-out tasks, and the number of batches between evaluations")
    if stop_after and not every:
        raise ValueError(f"stop_after = {stop_after} counts evaluations: give eval_tasks and eval_every, too")
