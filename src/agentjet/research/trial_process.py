"""`RunRecord`: what a run measured so far, on disk after every piece, so that a run that is taken up again measures
nothing twice.

One trial, in a process of its own: `python -m agentjet.research.trial_process`, an order on standard input.

It is an ordinary client: it trains the arm's agent on a swarm server up to the trial's last step, plays the held-out
tasks in eval mode on the way and at the end, and writes the outcome into a file. A process of its own, because arms may
bring code of the same name, and an agent may hang or crash. It ends when standard input does: with whoever ordered it.
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
    """The mean over the held-out tasks, its standard error, and the least that an episode earned; how many were played,
    those counted that failed and were played again.
    """

    mean: float
    error: float
    least: float = math.inf
    """Older records have none, and no numbers of plays."""
    plays: int = 0
    failed: int = 0


@dataclass
class RunRecord:
    """Scorings and metrics by step (the policy version), in the file `path`."""

    path: Path
    scorings: dict[int, HeldOutScore] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> RunRecord:
        """What the file holds; an empty record where there is none."""
        if not path.exists():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        scorings = {int(step): HeldOutScore(*scoring) for step, scoring in content["scorings"].items()}
        return cls(path, scorings, {int(step): metrics for step, metrics in content["metrics"].items()})

    def begin_anew(self) -> None:
        """The run stands at the base model, where no server has it any more: what was measured is of other weights."""
        if self.metrics:
            self.scorings, self.metrics = {}, {}
            self._write()

    def scored(self, step: int, scoring: HeldOutScore) -> None:
        self.scorings[step] = scoring
        self._write()

    def learned(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """The metrics of some steps, whether known before or not."""
        self.metrics |= {step: dict(of_step) for step, of_step in metrics.items()}
        self._write()

    def curve(self, end: int) -> tuple[float, ...]:
        """The scores up to a step, in order."""
        return tuple(scoring.mean for step, scoring in sorted(self.scorings.items()) if step <= end)

    def floor(self, declared: float) -> float:
        """What the run scores once its policy answers no more: the least it was seen to earn, and at most `declared`.

        A rule of before the data that rewards below 0 cannot make a prize for diverging.
        """
        return min([declared, *(scoring.least for scoring in self.scorings.values())])

    def signals(self, end: int) -> dict[str, tuple[float | None, ...]]:
        """By metric, its value at each step from the first to `end`; None where there is no number."""
        steps = [self.metrics.get(step, {}) | played(self.scorings.get(step)) for step in range(1, end + 1)]
        names = sorted({name for of_step in steps for name in of_step})
        return {name: tuple(number(of_step.get(name)) for of_step in steps) for name in names}

    def _write(self) -> None:
        write_whole(self.path, json.dumps({"scorings": self.scorings, "metrics": self.metrics}))


def played(scoring: HeldOutScore | None) -> dict[str, float]:
    """As metrics of the step that was scored."""
    return {PLAYS: scoring.plays, FAILED: scoring.failed} if scoring and scoring.plays else {}


def number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


WRONG_STUDY = 3
"""Exit code: what is wrong would be wrong with every trial, so that the study ends here until it is mended."""
ANSWERS = "answers.json"
"""Beside the outcome."""
MANY = 1000
"""Episodes looked through for those that an earlier process left live."""


class NotScorable(AgentJetError):
    """The run cannot be scored."""


@dataclass(frozen=True)
class TrialOrder(Record):
    """What is to be done: `run` is the folder of the run to be taken further, `answer` the file of the outcome."""

    trial: Trial
    subject: Subject
    address: Address
    run: str
    answer: str


class TrialProcess:
    """An order being carried out."""

    def __init__(self, order: TrialOrder, swarm: AsyncSwarm) -> None:
        """Raises `ConfigError` for code that changed, or cannot be loaded."""
        self._trial, self._subject, self._swarm = order.trial, order.subject, swarm
        order.subject.check_code()
        self._agent = order.subject.player(order.trial.arm)
        self._judge = order.subject.judge()
        self._tasks = order.subject.training_tasks()
        self._held_out = order.subject.held_out_tasks()
        self._record = RunRecord.open(Path(order.run) / "record.json")

    async def done(self) -> Outcome:
        """The trial's outcome, from where the run stands. What the policy is to blame for is a result."""
        marks = self._subject.marks(self._trial.fidelity)
        try:
            await self._clear()
            if not (await self._swarm.status()).policy_version:
                self._record.begin_anew()
            for mark in marks:
                await self._train(mark)
                await self._score(mark)
        except (AgentJetError, TimeoutError) as error:
            why = str(error) or f"no end within subject.patience = {self._subject.patience:g} s"
            with suppress(AgentJetError):  # a policy that diverged in the middle fails its calls
                await self._catch_up()
            if is_broken(self._record.metrics):
                return self._outcome("diverged", self._record.floor(self._subject.floor), shortened(why))
            return self._outcome("infra_failed", None, shortened(why))
        return self._outcome(
            "diverged" if is_broken(self._record.metrics) else "completed", self._record.scorings[marks[-1]].mean
        )

    def _outcome(self, end: End, score: float | None, note: str = "") -> Outcome:
        last = self._subject.steps_at(self._trial.fidelity)
        curve, signals = self._record.curve(last), self._record.signals(last)
        return Outcome(self._trial.id, end, score=score, curve=curve, signals=signals, note=note)

    async def _clear(self) -> None:
        """Abort what an earlier process of this run left live: nobody plays it any more."""
        for episode in (await self._swarm.episodes(MANY)).episodes:
            if episode.status == "live":
                await self._swarm.abort(
                    episode.episode_id, "not needed: its client ended; the trial goes on in another process"
                )

    async def _train(self, mark: int) -> None:
        """On to a step, unless the run stands there."""
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
            self._record.learned({step.policy_version: step.metrics for step in report.steps})
        await self._catch_up()

    async def _catch_up(self) -> None:
        """Take in the metrics of steps that an earlier process trained."""
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
        self._record.learned(found)

    async def _score(self, mark: int) -> None:
        """Play the held-out tasks at a step. A play that fails is tried anew, up to twice, and counted: the score is of
        plays that did not fail. Raises `NotScorable` when all tries of one did: a score has no gaps.
        """
        if mark in self._record.scorings:
            return
        async with asyncio.timeout(self._subject.patience):
            report = await self._swarm.evaluate(
                self._judge,
                self._held_out,
                repeats=self._subject.repeats,
                concurrency=self._subject.concurrency,
                progress=False,
                at_version=mark,
            )
        missing = len(report.results) - len(report.finished)
        if missing:
            reason = report.errors.most_common(1)[0][0]
            raise NotScorable(f"{missing} of {len(report.results)} held-out episodes could not be played: {reason}")
        found = scoring(list(report.by_task.values()))
        plays = len(report.results) + report.num_repeated
        self._record.scored(mark, found._replace(plays=plays, failed=report.num_repeated))

    async def answers(self) -> dict[str, dict[str, Value]]:
        """What a diagnosis may ask about the trial, by question: see `agentjet.research.probes`."""
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
    """Whether the newest step left weights that are no numbers, or changed nothing because its gradients were none."""
    newest = metrics[max(metrics)] if metrics else {}
    return newest.get("weights/finite") == 0 or newest.get("optim/skipped_steps", 0.0) > 0


def weights_changed(signals: run_signals.Signals) -> dict[str, Value]:
    """In how many of the last steps each side's weights changed, as the server's worker saw it; empty where it did not
    look.
    """
    sides = np.array([run_signals.last(signals["weights/learner"]), run_signals.last(signals["weights/sampler"])])
    seen = sides[:, np.isfinite(sides).all(0)]
    if not seen.size:
        return {}
    return {"steps": seen.shape[1], "learner": int(seen[0].sum()), "sampler": int(seen[1].sum())}


def scoring(rewards_by_task: Sequence[Sequence[float]]) -> HeldOutScore:
    """Every task has been played."""
    means = [statistics.fmean(rewards) for rewards in rewards_by_task]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return HeldOutScore(statistics.fmean(means), error, min(map(min, rewards_by_task)))


def flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Settings by their whole names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", value


async def carry_out(order: TrialOrder) -> None:
    """The outcome and the answers, into files. Raises `ConfigError`."""
    async with AsyncSwarm(order.address.url, order.address.token, lease=order.address.lease) as swarm:
        work = TrialProcess(order, swarm)
        outcome = await work.done()
        if outcome.end != "infra_failed":
            write_whole(Path(order.answer).with_name(ANSWERS), canonical(await work.answers()))
    write_whole(Path(order.answer), canonical(outcome.to_json()))


@contextmanager
def alone(run: Path) -> Iterator[None]:
    """One process works on a run: one that is just ending is waited for."""
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    order = TrialOrder.from_json(json.loads(sys.stdin.buffer.readline()))
    exit_with_parent(signal.SIGINT)  # Live episodes are aborted on the way out.
    try:
        with alone(Path(order.run)):
            asyncio.run(carry_out(order))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(WRONG_STUDY) from None


if __name__ == "__main__":
    main()
