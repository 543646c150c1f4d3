"""One trial in a separate process: `python -m agentjet.research.trial_process`, with a `TrialOrder` on standard input.

The process has the arm's agent trained on a swarm server up to the trial's last step, scores the held-out tasks on the
way and at the end, and writes the outcome to a file. It is the judge's process: the arm's code runs in another one
(`arm_process`). It ends when its standard input closes.

The held-out tasks are played by the evaluator, an agent. If the subject is `judged`, the arm's agent plays them as it
would be deployed, and the evaluator scores the conversations that the server recorded.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import signal
import sys
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agentjet.client import AsyncSwarm
from agentjet.client.threads import exit_with_parent
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research import arm_process
from agentjet.research.arm_process import ArmClient, ArmFailed, ArmOrder
from agentjet.research.journal import write_whole
from agentjet.research.judged_episodes import JudgedEpisodes, NotScorable
from agentjet.research.models import End, Outcome, Trial
from agentjet.research.records import Record, Value, canonical, dotted, hash_of, shortened
from agentjet.research.run_record import RunRecord, Signals, last, scoring
from agentjet.research.servers import Address
from agentjet.research.subject import Subject

WRONG_STUDY = 3
"""Exit code for an error that would affect every trial. The study stops until it is fixed."""
MAX_LISTED_EPISODES = 1000
"""Maximum listed episodes when looking for those that an earlier process left live."""


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

    def __init__(self, order: TrialOrder, swarm: AsyncSwarm, arm: ArmClient) -> None:
        """Raises `ConfigError` for code of the judge that cannot be loaded."""
        self._trial, self._subject, self._swarm, self._arm = order.trial, order.subject, swarm, arm
        self._held_out = order.subject.held_out_tasks()
        self._judged = JudgedEpisodes(order.subject, self._held_out, swarm, arm) if order.subject.judged else None
        self._evaluator = None if order.subject.judged else order.subject.load_evaluator()
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
        except ConfigError:
            raise
        except (AgentJetError, TimeoutError) as error:
            why = str(error) or f"no end within subject.patience = {self._subject.patience:g} s"
            with suppress(AgentJetError):  # a diverged policy fails its calls
                await self._catch_up()
            if self._record.is_broken():
                return self._outcome("diverged", self._record.floor(self._subject.floor), shortened(why))
            own = self._judged is not None and isinstance(error, ArmFailed)
            return self._outcome("arm_failed" if own else "infra_failed", None, shortened(why))
        end: End = "diverged" if self._record.is_broken() else "completed"
        return self._outcome(end, self._record.scorings[evaluation_steps[-1]].mean)

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
                await self._arm.train(mark - version, self._seed(version))
        await self._catch_up()

    def _seed(self, version: int) -> int:
        """Seeds the tasks and the answers from a policy version on. Trials of equal seed and setting are equal runs."""
        return int(hash_of([self._trial.seed, version])[:8], 16)

    async def _catch_up(self) -> None:
        """Fetches the metrics of the steps that were trained."""
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
            if self._judged is not None:
                self._record.add_score(mark, await self._judged.score(mark, self._seed(mark)))
                return
            assert self._evaluator is not None
            report = await self._swarm.evaluate(
                self._evaluator,
                self._held_out,
                repeats=self._subject.repeats,
                concurrency=self._subject.concurrency,
                progress=False,
                at_version=mark,
                seed=self._seed(mark),
            )
        missing = len(report.results) - len(report.finished)
        if missing:
            reason = report.errors.most_common(1)[0][0]
            raise NotScorable(f"{missing} of {len(report.results)} held-out episodes failed: {reason}")
        plays = len(report.results) + report.num_repeated
        self._record.add_score(mark, scoring(list(report.by_task.values()), plays))

    async def with_facts(self, outcome: Outcome) -> Outcome:
        """The outcome with the settings of the server's job and with facts. A lost run has none."""
        if outcome.score is None:
            return outcome
        known, last = self._record.scorings, self._subject.steps_at(self._trial.fidelity)
        train, held_out = ({(task.task_set, task.id) for task in tasks} for tasks in (self._arm.tasks, self._held_out))
        facts = {"tasks_held_out": float(len(held_out)), "tasks_shared": float(len(train & held_out))}
        if {0, last} <= known.keys():
            facts |= {"held_out_before": known[0].mean, "held_out_after": known[last].mean}
            facts["held_out_error"] = math.hypot(known[0].error, known[last].error)
        facts |= weight_changes(Signals(outcome.signals))
        settings = {
            name: value for name, value in dotted((await self._swarm.job()).job, "job.") if isinstance(value, Value)
        }
        outcome = replace(outcome, settings=settings, facts=facts)
        return outcome if self._judged is None else await self._judged.with_training(outcome)


def weight_changes(signals: Signals) -> dict[str, float]:
    """Facts about the last steps in which the learner's weights changed. Empty without any, or if the worker did not
    check.
    """
    sides = np.array([last(signals[f"weights/{side}"]) for side in ("learner", "sampler")])
    learner, sampler = map(float, sides[:, np.isfinite(sides).all(0)].sum(1))
    return {"learner_changes": learner, "sampler_changes": sampler / learner} if learner else {}


async def carry_out(order: TrialOrder) -> None:
    """Writes the outcome to a file. Raises `ConfigError`."""
    subject = order.subject
    subject.check_code()
    arm_order = ArmOrder(
        subject.agent_of(order.trial.arm),
        subject.tasks,
        order.address,
        subject.concurrency,
        subject.reward,
        str(Path(order.run) / "home"),
        subject.readable,
    )
    async with AsyncSwarm(order.address.url, order.address.token) as swarm:
        try:
            async with arm_process.started(arm_order) as arm:
                work = TrialProcess(order, swarm, arm)
                outcome = await work.with_facts(await work.run())
        except ArmFailed as error:
            if not subject.judged:
                raise ConfigError(str(error)) from None
            outcome = Outcome(order.trial.id, "arm_failed", note=shortened(str(error)))
    write_whole(Path(order.answer), canonical(outcome.to_json()))


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell script may begin with it ignored
    order = TrialOrder.from_json(json.loads(sys.stdin.buffer.readline()))
    exit_with_parent(signal.SIGINT)  # live episodes are aborted on exit
    try:
        with Path(order.run, "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # one process per run; another may just be ending
            asyncio.run(carry_out(order))
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(WRONG_STUDY) from None


if __name__ == "__main__":
    main()
