"""One trial in a separate process: `python -m agentjet.research.trial_process`, with a `TrialOrder` on standard input.

The process has the arm's agent trained on a swarm server up to the trial's last step, scores the held-out tasks on the
way and at the end, and writes the outcome to a file. It is the judge's process: the arm's code runs in another one
(`arm_process`). It ends when its standard input closes.

The held-out tasks are played by the evaluator, an agent. If the subject is `judged`, the arm's agent plays them as it
would be deployed, and the evaluator scores the conversations that the server recorded.

`RunRecord` stores each measurement on disk at once, so that a resumed run measures nothing twice.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import math
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np

from agentjet.client import AsyncSwarm
from agentjet.client.threads import exit_with_parent
from agentjet.errors import AgentJetError, ConfigError
from agentjet.research import arm_process, run_signals
from agentjet.research.arm_process import Arm, ArmFailed, ArmOrder
from agentjet.research.journal import write_whole
from agentjet.research.models import End, Outcome, Trial
from agentjet.research.records import Record, Value, canonical, shortened
from agentjet.research.run_signals import FAILED, PLAYS
from agentjet.research.servers import Address
from agentjet.research.subject import Judge, Message, Subject, one_line_at
from agentjet.types import Task


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
SEEN = "seen.json"
"""File beside the outcome of a judged subject: see `TrialProcess.seen`."""
MAX_JUDGED = 32
"""Maximum training episodes that the judge scores, for comparison with the training reward."""
MAX_COUNTED = 4000
"""Maximum training episodes that are counted by task."""
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

    def __init__(self, order: TrialOrder, swarm: AsyncSwarm, arm: Arm) -> None:
        """Raises `ConfigError` for code of the judge that cannot be loaded."""
        self._trial, self._subject, self._swarm, self._arm = order.trial, order.subject, swarm, arm
        judged = order.subject.judged
        self._evaluator = None if judged else order.subject.load_evaluator()
        self._judge: Judge | None = order.subject.load_judge() if judged else None
        self._held_out = order.subject.held_out_tasks()
        self._record = RunRecord.open(Path(order.run) / "record.json")
        self._swapped: float | None = None
        self.failed: ArmFailed | None = None
        """The error of the arm's own code that ended the run."""

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
            self.failed = error if isinstance(error, ArmFailed) else None
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
                await self._arm.train(mark - version, self._seed(version))
        await self._catch_up()

    def _seed(self, version: int) -> int:
        """Seeds the tasks and the answers from a policy version on. Trials of equal seed and setting are equal runs."""
        name = canonical([self._trial.seed, version])
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")

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
            if self._evaluator is None:
                self._record.add_score(mark, await self._judged_score(mark))
                return
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
        found = scoring(list(report.by_task.values()))
        plays = len(report.results) + report.num_repeated
        self._record.add_score(mark, found._replace(plays=plays, failed=report.num_repeated))

    async def _judged_score(self, mark: int) -> HeldOutScore:
        """Has the arm's agent play the held-out tasks, and scores what the server recorded. The first `repeats`
        episodes of a task count. Raises `NotScorable`.
        """
        public = self._subject.as_deployed(self._held_out, self._arm.tasks)
        played = await self._arm.play(public, self._subject.repeats, mark, self._seed(mark))
        found: dict[tuple[str, str], list[str]] = {}
        async for episode in self._episodes(mode="eval", sort="oldest", min_version=mark, max_version=mark):
            found.setdefault((episode["task_set"], episode["task_id"]), []).append(episode["episode_id"])
        rewards, conversations = [], []
        for task in self._held_out:
            of_task = found.get((task.task_set, task.id), [])[: self._subject.repeats]
            if len(of_task) < self._subject.repeats:
                raise NotScorable(f"held-out task {task.id!r} was not played: {played['reason'] or 'no episode ended'}")
            heard = [await self._conversation(episode) for episode in of_task]
            if not all(heard):
                raise ArmFailed(f"held-out task {task.id!r}: the agent made no call of the model")
            rewards.append([await self._judgement(task, messages) for messages in heard])
            conversations.append(heard[0])
        await self._swap(conversations)
        return scoring(rewards)._replace(plays=played["plays"], failed=played["plays"] - sum(map(len, rewards)))

    async def _judgement(self, task: Task, messages: list[Message]) -> float:
        """Raises `ConfigError` for a judge that fails."""
        assert self._judge is not None
        try:
            score = float(await asyncio.to_thread(self._judge, task, messages))
        except Exception as error:  # the boundary: the user's judge may raise anything
            raise ConfigError(
                f"subject.evaluator = {self._subject.evaluator!r} failed at task {task.id!r}: {one_line_at(error)}"
            ) from error
        if not math.isfinite(score):
            raise ConfigError(f"subject.evaluator = {self._subject.evaluator!r}: score = {score} of task {task.id!r}")
        return score

    async def _swap(self, conversations: list[list[Message]]) -> None:
        """Scores each conversation under the next held-out task, where tasks have hidden answers. A sound judge pays
        what chance would.
        """
        if not any(
            isinstance(task.payload, dict) and {*self._subject.hidden} & {*task.payload} for task in self._held_out
        ):
            return
        swapped = []
        for task, messages in zip(self._held_out, conversations[1:] + conversations[:1], strict=True):
            with suppress(ConfigError):
                swapped.append(await self._judgement(task, messages))
        self._swapped = statistics.fmean(swapped) if swapped else None

    async def _conversation(self, episode_id: str) -> list[Message]:
        return arm_process.conversation(await self._swarm.episode_tree(episode_id))

    async def _episodes(self, **wanted: object) -> AsyncIterator[dict[str, Any]]:
        """Yields finished episodes by the filters of `GET /episodes`."""
        query, page = {"status": "finished", "limit": MAX_LISTED_EPISODES, **wanted}, ""
        while True:
            path = f"/episodes?{urlencode(query | ({'before': page} if page else {}))}"
            answer = await self._swarm.connection.request("GET", path)
            for episode in answer["episodes"]:
                yield episode
            if (page := answer["next"] or "") == "":
                return

    async def seen(self) -> dict[str, Any]:
        """Facts about the episodes for the observation of a campaign: rewards by training task; the newest training
        episodes whose calls are kept, with training's reward and the judge's score; the score of swapped answers.
        """
        by_task: dict[str, tuple[float, float, int]] = {}
        newest: list[dict[str, Any]] = []
        tasks = {(task.task_set, task.id): task for task in self._arm.tasks}
        counted = 0
        async for episode in self._episodes(mode="train"):
            reward, task = float(episode["reward"]), tasks.get((episode["task_set"], episode["task_id"]))
            least, most, number = by_task.get(episode["task_id"], (reward, reward, 0))
            by_task[episode["task_id"]] = min(least, reward), max(most, reward), number + 1
            if len(newest) < MAX_JUDGED and task and (messages := await self._conversation(episode["episode_id"])):
                judged = None
                with suppress(ConfigError):  # a judge may need what training tasks lack
                    judged = await self._judgement(task, messages)
                newest.append({"task": self._shown(task), "messages": messages, "reward": reward, "judged": judged})
            if (counted := counted + 1) >= MAX_COUNTED:
                break
        return {"by_task": by_task, "newest": newest, "swapped": self._swapped}

    def _shown(self, task: Task) -> Any:
        """A training task's payload without hidden keys."""
        payload = task.payload
        return (
            {k: v for k, v in payload.items() if k not in self._subject.hidden}
            if isinstance(payload, dict)
            else payload
        )

    async def with_facts(self, outcome: Outcome) -> Outcome:
        """The outcome with the settings of the server's job and the facts of `agentjet.research.diagnosis`."""
        known, last = self._record.scorings, self._subject.steps_at(self._trial.fidelity)
        train, held_out = ({(task.task_set, task.id) for task in tasks} for tasks in (self._arm.tasks, self._held_out))
        facts = {"tasks_held_out": float(len(held_out)), "tasks_shared": float(len(train & held_out))}
        if {0, last} <= known.keys():
            facts |= {"held_out_before": known[0].mean, "held_out_after": known[last].mean}
            facts["held_out_error"] = math.hypot(known[0].error, known[last].error)
        facts |= weight_changes(run_signals.Signals(outcome.signals))
        return replace(outcome, settings=dict(flat("job", (await self._swarm.job()).job)), facts=facts)


def is_broken(metrics: Mapping[int, Mapping[str, float]]) -> bool:
    """True if the newest step left weights that are not finite, or was skipped because its gradients were not."""
    newest = metrics[max(metrics)] if metrics else {}
    return newest.get("weights/finite") == 0 or newest.get("optim/skipped_steps", 0.0) > 0


def weight_changes(signals: run_signals.Signals) -> dict[str, float]:
    """Facts about the last steps in which the learner's weights changed. Empty without any, or if the worker did not
    check.
    """
    sides = np.array([run_signals.last(signals[f"weights/{side}"]) for side in ("learner", "sampler")])
    learner, sampler = map(float, sides[:, np.isfinite(sides).all(0)].sum(1))
    return {"learner_changes": learner, "sampler_changes": sampler / learner} if learner else {}


def scoring(rewards_by_task: Sequence[Sequence[float]]) -> HeldOutScore:
    means = [statistics.fmean(rewards) for rewards in rewards_by_task]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return HeldOutScore(statistics.fmean(means), error, min(map(min, rewards_by_task)))


def flat(prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Value]]:
    """Yields settings with their full dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(f"{prefix}.{name}", value)
        elif isinstance(value, Value):
            yield f"{prefix}.{name}", value


async def carry_out(order: TrialOrder) -> None:
    """Writes the outcome to a file, and what a campaign reads beside it. Raises `ConfigError`."""
    answer, subject = Path(order.answer), order.subject
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
                outcome, failed = await work.run(), work.failed
                if outcome.end != "infra_failed":
                    outcome = await work.with_facts(outcome)
                    if subject.judged:
                        write_whole(answer.with_name(SEEN), json.dumps(await work.seen(), allow_nan=False))
        except ArmFailed as error:
            if not subject.judged:
                raise ConfigError(str(error)) from None
            outcome, failed = Outcome(order.trial.id, "infra_failed", note=shortened(str(error))), error
    if failed is not None and outcome.end == "infra_failed":
        write_whole(answer.with_name(SEEN), json.dumps({"failed": str(failed)}))
    write_whole(answer, canonical(outcome.to_json()))


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
