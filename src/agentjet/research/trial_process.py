"""One trial in a separate process: `python -m agentjet.research.trial_process`, with a `TrialOrder` on standard input.

The process is an ordinary client. It trains the arm's agent on a swarm server up to the trial's last step, plays the
held-out tasks on the way and at the end, and writes the outcome to a file. It is separate because arms may bring code
with equal names, and because an agent may hang or crash. It ends when its standard input closes.

`RunRecord` stores each measurement on disk at once, so that a resumed run measures nothing twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentjet.client import AsyncSwarm
from agentjet.client.threads import exit_with_parent
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research import run_signals
from agentjet.research.journal import write_whole
from agentjet.research.models import End, Outcome, Trial
from agentjet.research.records import Record, Value, canonical, shortened
from agentjet.research.run_signals import FAILED, PLAYS
from agentjet.research.servers import Address
from agentjet.research.subject import Subject


class HeldOutScore(NamedTuple):
    """Mean over the held-out tasks, its standard error and the lowest reward of an episode; and the number of episodes,
    those that failed and were repeated included.
    """

    mean: float
    error: float
    least: float = math.inf
    """Older records lack this and the following fields."""
    plays: int = 0
    failed: int = 0


@dataclass
class RunRecord:
    """Held-out scores and metrics by step (the policy version), in the file `path`."""

    path: Path
    scorings: dict[int, HeldOutScore] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> RunRecord:
        """Reads the file. Returns an empty record if there is none."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        scorings = {int(step): HeldOutScore(*scoring) for step, scoring in content["scorings"].items()}
        return cls(path, scorings, {int(step): metrics for step, metrics in content["metrics"].items()})

    def reset(self) -> None:
        """Clears the record if the run restarts at the base model, because its measurements are of other weights."""
        if self.metrics:
            self.scorings, self.metrics = {}, {}
            self._write()

    def add_score(self, step: int, scoring: HeldOutScore) -> None:
        self.scorings[step] = scoring
        self._write()

    def add_metrics(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """Stores the metrics of some steps and replaces known ones."""
        self.metrics |= {step: dict(of_step) for step, of_step in metrics.items()}
        self._write()

    def curve(self, end: int) -> tuple[float, ...]:
        """Held-out scores up to the step `end`, in order."""
        return tuple(scoring.mean for step, scoring in sorted(self.scorings.items()) if step <= end)

    def floor(self, declared: float) -> float:
        """Score of a run whose policy cannot answer any more: the lowest reward it earned, and at most `declared`.

        This rule is fixed before the data, so that rewards below 0 cannot make divergence pay.
        """
        return min([declared, *(scoring.least for scoring in self.scorings.values())])

    def signals(self, end: int) -> dict[str, tuple[float | None, ...]]:
        """By metric, its value at each step from 1 to `end`; None without a finite number."""
        steps = [self.metrics.get(step, {}) | played(self.scorings.get(step)) for step in range(1, end + 1)]
        names = sorted({name for of_step in steps for name in of_step})
        return {name: tuple(number(of_step.get(name)) for of_step in steps) for name in names}

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"scorings": self.scorings, "metrics": self.metrics}))


def played(scoring: HeldOutScore | None) -> dict[str, float]:
    """Episode counts of an evaluation, as metrics of its step."""
    return {PLAYS: scoring.plays, FAILED: scoring.failed} if scoring and scoring.plays else {}


def number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


WRONG_STUDY = 3
"""Exit code for an error that would affect every trial. The study stops until it is fixed."""
ANSWERS = "answers.json"
"""File beside the outcome."""
MAX_LISTED_EPISODES = 1000
"""Maximum listed episodes when looking for those that an earlier process left live."""


class NotScorable(AgentJetError):
    """The run cannot be scored."""


@dataclass(frozen=True)
class TrialOrder(Record):
    """The task of a trial process. `run` is the folder of the run, `answer` the file for the outcome."""

    trial: Trial
    subject: Subject
    address: Address
    run: str
    answer: str


class TrialProcess:
    """Executes a trial."""

    def __init__(self, order: TrialOrder, swarm: AsyncSwarm) -> None:
        """Raises `ConfigError` for code that changed or cannot be loaded."""
        self._trial, self._subject, self._swarm = order.trial, order.subject, swarm
        order.subject.check_code()
        self._agent = order.subject.load_arm_agent(order.trial.arm)
        self._evaluator = order.subject.load_evaluator()
        self._tasks = order.subject.training_tasks()
        self._held_out = order.subject.held_out_tasks()
        self._record = RunRecord.open(Path(order.run) / "record.json")

    async def run(self) -> Outcome:
        """Returns the outcome, continuing the run from its present step. A failure of the policy is a result."""
        evaluation_steps = self._subject.evaluation_steps(self._trial.fidelity)
        try:
            await self._abort_leftovers()
            if not (await self._swarm.status()).policy_version:
                self._record.reset()
            for mark in evaluation_steps:
                await self._train(mark)
                await self._score(mark)
        except (AgentJetError, TimeoutError) as error:
            why = str(error) or f"no end within subject.patience = {self._subject.patience:g} s"
            with suppress(AgentJetError):  # a diverged policy fails its calls
                await self._catch_up()
            if is_broken(self._record.metrics):
                return self._outcome("diverged", self._record.floor(self._subject.floor), shortened(why))
            return self._outcome("infra_failed", None, shortened(why))
        return self._outcome(
            "diverged" if is_broken(self._record.metrics) else "completed",
            self._record.scorings[evaluation_steps[-1]].mean,
        )

    def _outcome(self, end: End, score: float | None, note: str = "") -> Outcome:
        last = self._subject.steps_at(self._trial.fidelity)
        curve, signals = self._record.curve(last), self._record.signals(last)
        return Outcome(self._trial.id, end, score=score, curve=curve, signals=signals, note=note)

    async def _abort_leftovers(self) -> None:
        """Aborts episodes that an earlier process of this run left live."""
        for episode in (await self._swarm.episodes(MAX_LISTED_EPISODES)).episodes:
            if episode.status == "live":
                await self._swarm.abort(
                    episode.episode_id, "not needed: its client ended; the trial goes on in another process"
                )

    async def _train(self, mark: int) -> None:
        """Trains up to a step, unless the run has reached it."""
        version = (await self._swarm.status()).policy_version
        if version < mark:
            async with asyncio.timeout(self._subject.patience):
                report = await self._swarm.train(
                    self._agent,
                    self._tasks,
                    steps=mark - version,
                    concurrency=self._subject.concurrency,
                    seed=self._trial.seed + version,
                    progress=False,
                )
            self._record.add_metrics({step.policy_version: step.metrics for step in report.steps})
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Fetches the metrics of steps that an earlier process trained."""
        status = await self._swarm.status()
        missing = set(range(1, status.policy_version + 1)) - self._record.metrics.keys()
        if not missing:
            return
        found = {}
        async with aclosing(self._swarm.events()) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] in missing:
                    found[event.body["policy_version"]] = event.body["metrics"]
                if event.seq >= status.last_event:
                    break
        self._record.add_metrics(found)

    async def _score(self, mark: int) -> None:
        """Plays the held-out tasks at a step. A failed episode is repeated up to twice and counted. Raises
        `NotScorable` if all tries of one fail, because a score needs every task.
        """
        if mark in self._record.scorings:
            return
        async with asyncio.timeout(self._subject.patience):
            report = await self._swarm.evaluate(
                self._evaluator,
                self._held_out,
                repeats=self._subject.repeats,
                concurrency=self._subject.concurrency,
                progress=False,
                at_version=mark,
            )
        missing = len(report.results) - len(report.finished)
        if missing:
            reason = report.errors.most_common(1)[0][0]
            raise NotScorable(f"{missing} of {len(report.results)} held-out episodes failed: {reason}")
        found = scoring(list(report.by_task.values()))
        plays = len(report.results) + report.num_repeated
        self._record.add_score(mark, found._replace(plays=plays, failed=report.num_repeated))

    async def answers(self) -> dict[str, dict[str, Value]]:
        """Answers to questions of the diagnosis: see `agentjet.research.probes`."""
        known, last = self._record.scorings, self._subject.steps_at(self._trial.fidelity)
        train, held_out = ({(task.task_set, task.id) for task in tasks} for tasks in (self._tasks, self._held_out))
        found: dict[str, dict[str, Value]] = {
            "settings": dict(flat("job", (await self._swarm.job()).job)),
            "tasks": {"train": len(train), "held_out": len(held_out), "shared": len(train & held_out)},
        }
        if {0, last} <= known.keys():
            error = math.hypot(known[0].error, known[last].error)
            found["held_out"] = {"before": known[0].mean, "after": known[last].mean, "error": error}
        if weights := weights_changed(run_signals.Signals(self._record.signals(last))):
            found["weights"] = weights
        return found


def is_broken(metrics: Mapping[int, Mapping[str, float]]) -> bool:
    """True if the newest step left weights that are not finite, or was skipped because its gradients were not."""
    newest = metrics[max(metrics)] if metrics else {}
    return newest.get("weights/finite") == 0 or newest.get("optim/skipped_steps", 0.0) > 0


def weights_changed(signals: run_signals.Signals) -> dict[str, Value]:
    """Counts in how many of the last steps the learner's and the sampler's weights changed. Empty if the worker did not
    check.
    """
    sides = np.array([run_signals.last(signals["weights/learner"]), run_signals.last(signals["weights/sampler"])])
    seen = sides[:, np.isfinite(sides).all(0)]
    if not seen.size:
        return {}
    return {"steps": seen.shape[1], "learner": int(seen[0].sum()), "sampler": int(seen[1].sum())}


def scoring(rewards_by_task: Sequence[Sequence[float]]) -> HeldOutScore:
    means = [statistics.fmean(rewards) for rewards in rewards_by_task]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return HeldOutScore(statistics.fmean(means), error, min(map(min, rewards_by_task)))


def flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Yields settings with their full dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


async def carry_out(order: TrialOrder) -> None:
    """Writes the outcome and the answers to files. Raises `ConfigError`."""
    async with AsyncSwarm(order.address.url, order.address.token) as swarm:
        work = TrialProcess(order, swarm)
        outcome = await work.run()
        if outcome.end != "infra_failed":
            write_whole(Path(order.answer).with_name(ANSWERS), canonical(await work.answers()))
    write_whole(Path(order.answer), canonical(outcome.to_json()))


@contextmanager
def run_lock(run: Path) -> Iterator[None]:
    """Allows one process per run; waits for one that is just ending."""
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    order = TrialOrder.from_json(json.loads(sys.stdin.buffer.readline()))
    exit_with_parent(signal.SIGINT)  # live episodes are aborted on exit
    try:
        with run_lock(Path(order.run)):
            asyncio.run(carry_out(order))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(WRONG_STUDY) from None


if __name__ == "__main__":
    main()
