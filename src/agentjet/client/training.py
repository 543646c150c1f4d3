"""The runs of agents: one `train`, `evaluate` or `sft` call, from the server's first status to the report.

These coroutines of `train` run side by side: the rollouts, the stream of the server's steps, the display of the reason
for a wait, and held-out evaluations. The run ends when the server has learned the steps, when the held-out score no
longer improves, or on an exception.

Episodes of an evaluation are never trained on. A score belongs to one policy version: `pin_policy_version` makes
learning wait. `sft` is supervised fine-tuning, from the check of the demonstrations on.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from agentjet.client.agent_source import AgentSource, AgentVersion
from agentjet.client.connection import Connection
from agentjet.client.demonstrations import Example, recipe_name
from agentjet.client.episode import ABORT_SECONDS, AsyncEpisode, begin_episode, close_groups, wait_for_end
from agentjet.client.inputs import build_request, check_counts, payload_digest, pickled_or_itself
from agentjet.client.live_reload import LiveReload
from agentjet.client.report import (
    EpisodeResult,
    EvalReport,
    Evaluation,
    Progress,
    Step,
    TrainReport,
    accuracy_of,
    best_of,
    first_line,
    given_loss,
    html_of,
)
from agentjet.client.rollout import (
    Agent,
    AgentFailing,
    Groups,
    RolloutQueue,
    RolloutSpec,
    Runner,
    StartRollout,
    StreamQueue,
    TaskStream,
    not_needed,
    wait_for_first,
)
from agentjet.errors import AgentJetError, Conflict, InvalidRequest, Later
from agentjet.protocol import (
    REPORTED_BATCHES,
    BeginRequest,
    DemonstrationBody,
    EvaluationRequest,
    Event,
    GroupName,
    SftRequest,
    SftResponse,
    StatusResponse,
    batches_without_variance,
    report_lines,
)
from agentjet.types import Task

# ---- evaluations -----------------------------------------------------------------------------------------------------

EVAL_WAIT = 60.0
"""Longest wait of an evaluation's episode for room."""
CHECKPOINT_WAIT = 600.0
"""Longest wait for a checkpoint: for the batch being learned, and for the disk."""
UNNAMED = "evaluation"
"""Name of the score of tasks without a task set, or of several task sets."""
PIN_TASK_ID = "holding-the-policy-version"
"""Task id of the episode that pins the policy version."""


@asynccontextmanager
async def pin_policy_version(
    connection: Connection, request: BeginRequest, at_version: int | Literal["newest"]
) -> AsyncIterator[int]:
    """Keep the policy at one version, also between two episodes; yields the version.

    An extra episode pins the version, and is aborted at the end. Raises `Conflict` (`version_gone`).
    """
    while True:
        version = (await connection.status()).policy_version if at_version == "newest" else at_version
        try:
            pin = await begin_episode(connection, request.model_copy(update={"at_version": version}), wait=EVAL_WAIT)
            break
        except Conflict as error:  # The policy learned after its status was read.
            if at_version != "newest" or error.code != "version_gone":
                raise
    heartbeats = pin.keep_alive()
    try:
        yield version
    finally:
        heartbeats.cancel()
        aborting = pin.abort("not needed: the evaluation it held the policy version for is over")
        await wait_for_end(aborting, ABORT_SECONDS)


async def run_evaluation(
    start: StartRollout,
    tasks: Sequence[Task],
    *,
    repeats: int,
    concurrency: int,
    progress: bool,
    base: str = "",
    title: str = "evaluating",
    capacity: Mapping[str, int] | None = None,
    on_end: Callable[[RolloutSpec, EpisodeResult], None] = lambda spec, result: None,
) -> EvalReport:
    """Run every task `repeats` times with the agent of `start`. `base` seeds the episodes. `capacity` is the maximum
    number of live episodes by task set. `on_end` is called with each result.

    A failed episode is attempted up to twice more, then reported as aborted: it counts in no mean.
    """
    started = time.monotonic()
    num = repeats * len(tasks)
    results: dict[int, EpisodeResult] = {}
    num_repeated = 0
    shown = Progress(title, num, wanted=progress, num_lines=4)

    def note(spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        nonlocal num_repeated
        shown.episode(result, counts=last)
        num_repeated += not last
        if last:
            results[spec.index] = result
            on_end(spec, result)

    queue = RolloutQueue.once(tasks, repeats, base, capacity or ())
    await Runner(start, note, capacity=capacity).run(queue, min(concurrency, num))
    ordered = tuple(results[index] for index in sorted(results))
    return EvalReport(results=ordered, seconds=time.monotonic() - started, num_repeated=num_repeated)


async def record_score(
    connection: Connection, policy_version: int, report: EvalReport, task_list: str, *, held_out: bool
) -> None:
    """Store a version's score on the server, which may save its checkpoint. Does nothing if no episode finished.

    `task_list` is the identity of the tasks: see `TaskList`.
    """
    score = report.mean_at_k
    if not score.num_tasks:
        return
    task_sets = {result.task_set for result in report.results}
    body = EvaluationRequest(
        policy_version=policy_version,
        score=score.value,
        num_tasks=score.num_tasks,
        num_episodes=len(report.finished),
        name=(task_sets.pop() if len(task_sets) == 1 else "") or UNNAMED,
        task_list=task_list,
        held_out=held_out,
        client_id=connection.settings.client_id,
    )
    await connection.request("POST", "/evaluations", body=body, server_wait=CHECKPOINT_WAIT)


async def record_if_possible(connection: Connection, report: EvalReport, task_list: str) -> str:
    """Store the score of an evaluation that saw one policy version. Returns the reason if it is not stored, else ''.

    A failure is not raised, because the report is worth more than its record.
    """
    first, last = report.policy_versions
    try:
        last = max(last, (await connection.status()).policy_version)
        if first == last and report.finished:
            await record_score(connection, first, report, task_list, held_out=False)
            return ""
    except AgentJetError as error:
        return str(error)
    if first == last:
        return "no episode finished"
    return (
        f"the policy learned during the evaluation, from version {first} to {last}, and a score belongs to one "
        "version. With at_version = 'newest' learning waits for the evaluation"
    )


@dataclass
class HeldOutEvaluations:
    """The evaluations on held-out tasks within one training run. They run beside the training episodes."""

    evaluate: Callable[[AgentVersion], Awaitable[EvalReport]]
    """Evaluates the newest policy version with a version of the agent."""
    every: int
    """Batches from one evaluation to the next."""
    stop_after: int = 0
    """Evaluations in a row without a new best score, after which the run ends; 0: never."""
    done: list[Evaluation] = field(default_factory=list)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    def learned(self, num_steps: int) -> None:
        """Called with the number of batches learned. The first evaluation is due at 0."""
        if num_steps % self.every == 0:
            self.due.set()

    async def watch(
        self, version: Callable[[], AbstractAsyncContextManager[AgentVersion]], notify: Callable[[str], None]
    ) -> None:
        """Evaluate whenever one is due; returns when the score no longer improves. `version` keeps the agent's version
        during an evaluation.
        """
        while not self.stalled:
            await self.due.wait()
            self.due.clear()
            async with version() as kept:
                await self.run(kept, notify)

    async def finish(self, version: AgentVersion, policy_version: int, notify: Callable[[str], None]) -> None:
        """Evaluate the last policy version of a run, unless that is done."""
        if not self.done or self.done[-1].policy_version != policy_version:
            await self.run(version, notify)

    async def run(self, version: AgentVersion, notify: Callable[[str], None]) -> None:
        """One evaluation. It is skipped if it takes longer than the server holds a version."""
        try:
            report = await self.evaluate(version)
        except Conflict as error:
            if error.code != "version_gone":
                raise
            notify(f"held-out tasks were not all evaluated before the policy learned on: {error}")
            return
        except AgentFailing as failing:
            raise AgentFailing(f"held-out evaluation: {failing}") from None
        self.done.append(Evaluation(report.policy_versions[0], report))
        best = "; the best so far" if best_of(self.done) is self.done[-1] and len(self.done) > 1 else ""
        notify(f"held-out tasks at version {self.done[-1].policy_version}: {report}{best}")

    @property
    def stalled(self) -> bool:
        """True if the last `stop_after` evaluations brought no new best score."""
        return bool(self.stop_after) and best_of(self.done[: -self.stop_after]) is best_of(self.done) is not None


def trained_held_out(tasks: Sequence[Task], eval_tasks: Sequence[Task]) -> str:
    """Returns a sentence if held-out tasks are also trained on, else ''. Lists may use equal ids for other payloads."""

    def content(task: Task) -> tuple[str, bytes]:
        return task.id, payload_digest(task.payload, pickled_or_itself)

    ids = {task.id for task in eval_tasks}
    trained = {content(task) for task in tasks if task.id in ids}
    num = sum(content(task) in trained for task in eval_tasks) if trained else 0
    if not num:
        return ""
    return (
        f"{num} of {len(eval_tasks)} held-out tasks are also trained on: their score shows what was memorised, too. "
        "Leave them out of the training tasks"
    )


def check_held_out(eval_tasks: Sequence[object], every: int, stop_after: int) -> None:
    """Raises `ValueError` for settings of held-out evaluations that contradict each other."""
    check_counts(0, eval_every=every, stop_after=stop_after)
    if bool(eval_tasks) != bool(every):
        given, missing = ("eval_tasks", "eval_every") if eval_tasks else (f"eval_every = {every}", "eval_tasks")
        raise ValueError(f"{given} needs {missing}: held-out tasks, and the number of batches between evaluations")
    if stop_after and not every:
        raise ValueError(f"stop_after = {stop_after} counts evaluations: give eval_tasks and eval_every, too")


# ---- training --------------------------------------------------------------------------------------------------------

DELAYED_SECONDS = 5.0
"""Interval between looks for repeated requests. Shorter delays are not worth a line."""
QUIET_SECONDS = 30.0
"""Time without a new episode after which the display shows what the server waits for."""


@dataclass
class Training:
    """The arguments of one `train` call, and its state.

    Raises `Conflict` if the engine is stopped, and `InvalidRequest` if the job ends before the steps.
    """

    connection: Connection
    status: StatusResponse
    """The server's status at the begin."""
    request: Callable[..., BeginRequest]
    """Makes the request for an episode: `AsyncSwarm.episode_request`."""
    version: AgentVersion
    tasks: Sequence[Task] | TaskStream
    steps: int
    seed: int
    progress: bool
    code: AgentSource | None
    """Watched for newer versions of the agent."""
    held_out: HeldOutEvaluations | None
    reproducible: bool = False

    def __post_init__(self) -> None:
        status, connection = self.status, self.connection
        self._target = target_version(status, self.steps)
        """The last policy version wanted."""
        self._shown = Progress("training", self.steps, wanted=self.progress)
        self._shown.policies = status.policies
        base = f"{self.seed}/{status.policy_version}" if self.reproducible else ""
        self._queue = (
            StreamQueue(self.tasks, Groups(status.group_size, status.spare_episodes, base), self.seed)
            if isinstance(self.tasks, TaskStream)
            else RolloutQueue.training(self.tasks, status.group_size, self.seed, status.spare_episodes, base)
        )
        sleep, notify = connection.retry.sleep, self._shown.notify
        self._live = LiveReload(self.version, self.code, group_size=status.group_size, sleep=sleep, notify=notify)
        self._runner = Runner(
            self._start,
            self._note,
            needs_calls=True,
            is_on_trial=self._live.is_on_trial,
            close_groups=self._close_groups,
            capacity=getattr(self.version.agent, "capacity", None),
            notify=notify,
        )
        self._results: list[EpisodeResult] = []
        self._has_finished = False
        """True if an episode of this client finished since the last step."""
        self._learned: list[Step] = []

    async def run(self, concurrency: int) -> TrainReport:
        """See `AsyncSwarm.train`. Raises `Conflict` if the engine fails."""
        started, held_out = time.monotonic(), self.held_out
        if self.code is not None:
            self._shown.notify(self.code.described())
        coroutines = [
            self._runner.run(self._queue, concurrency),
            self._watch_steps(),
            self._show_waiting_reason(),
            self._show_delays(),
        ]
        if held_out is not None:
            coroutines.append(self._evaluate(held_out))
        await wait_for_first(coroutines)
        self._live.end()
        if held_out is not None and not held_out.stalled:
            async with self._live.held_out(reload=False) as version:
                await held_out.finish(version, self._target, self._shown.notify)
        return TrainReport(
            results=tuple(self._results),
            steps=tuple(self._learned),
            seconds=time.monotonic() - started,
            code_changes=tuple(self._live.changes),
            evaluations=tuple(held_out.done) if held_out is not None else (),
            stopped_early=len(self._learned) < self.steps,
        )

    async def _start(self, spec: RolloutSpec) -> tuple[AsyncEpisode, Agent]:
        def on_abort(episode: AsyncEpisode) -> None:
            self._note(spec, not_needed(episode), True)

        async def request(code_version: str) -> AsyncEpisode:
            if not spec.is_wanted:
                raise Conflict(f"The recipe wants {spec.visit.size} episodes of {spec.group!r}.", code="group_closed")
            body = self.request(spec.task.id, spec.task.task_set, spec.group, code_version=code_version)
            update = {
                "join_only": spec.spare,
                "unless_full": self._queue.has_sets,
                "unless_skipped": not self._queue.is_skipped(spec.task.task_set),
                "place": spec.place,
                "seed": spec.seed,
                "ends_at_version": self._target,
            }
            body = body.model_copy(update=update)
            return await begin_episode(self.connection, body, wait=math.inf, on_abort=on_abort)

        if spec.seed is not None:
            await spec.visit.wait_for_turn(spec.place)
        return await self._live.begin(spec, request)

    async def _close_groups(self, specs: Sequence[RolloutSpec], not_needed: bool) -> None:
        names = [GroupName(group=spec.group, task_set=spec.task.task_set) for spec in specs]
        await close_groups(self.connection, names, not_needed=not_needed)

    def _note(self, spec: RolloutSpec, result: EpisodeResult, last: bool) -> None:
        self._results.append(result)
        self._has_finished = self._has_finished or result.outcome == "finished"
        self._live.ended(spec, result, last)
        self._shown.episode(result)

    async def _watch_steps(self) -> None:
        """Record the server's steps up to the last one wanted. Raises `Conflict` if the engine fails."""
        version = self.status.policy_version
        async with aclosing(self.connection.events(after=self.status.last_event)) as events:
            async for event in events:
                if event.kind == "step" and event.body["policy_version"] > version:
                    version = event.body["policy_version"]
                    await self._record(Step(version, event.body["metrics"]))
                    if version >= self._target:
                        self._runner.goal_reached = True
                        return
                elif event.kind == "state" and event.body["state"] == "failed":
                    raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")

    async def _record(self, step: Step) -> None:
        """Record a step; shows a report once for each streak of batches without a learning signal."""
        self._learned.append(step)
        self._queue.forget_skipped()
        self._shown.step(step.metrics, "" if self._has_finished else "no episode of this client finished meanwhile")
        self._has_finished = False
        if self.held_out is not None and len(self._learned) < self.steps:
            self.held_out.learned(len(self._learned))
        if batches_without_variance([step.metrics for step in self._learned]) == REPORTED_BATCHES:
            with suppress(AgentJetError):  # The rollouts raise if the server is away.
                found = (await self.connection.status()).zero_variance
                if found is not None:
                    self._shown.notify("\n".join(report_lines(found)))

    async def _show_waiting_reason(self) -> None:
        """Without end: show what the server waits for while no episode is live and none could be begun for a while."""
        while True:
            num_begun = self._runner.num_begun
            await self.connection.retry.sleep(QUIET_SECONDS)
            if not self._runner.live and self._runner.num_begun == num_begun:
                with suppress(AgentJetError):  # The rollouts raise if the server is away.
                    self._shown.notify(f"waiting for {(await self.connection.status()).waiting_for}")

    async def _show_delays(self) -> None:
        """Without end: show once why requests are repeated, and their end. Those that are cancelled end nothing."""
        is_shown, resumed = False, 0
        while True:
            await self.connection.retry.sleep(DELAYED_SECONDS)
            reason = self.connection.delay_reason
            if reason and not is_shown:
                self._shown.notify(reason)
                resumed = self.connection.num_resumed
            elif is_shown and not reason and self.connection.num_resumed > resumed:
                self._shown.notify("the server takes requests again")
            is_shown = bool(reason)

    async def _evaluate(self, held_out: HeldOutEvaluations) -> None:
        held_out.learned(0)
        await held_out.watch(self._live.held_out, self._shown.notify)
        self._runner.goal_reached = True


def target_version(status: StatusResponse, steps: int) -> int:
    """The policy version after `steps` more batches, if the server can get there."""
    if status.state in ("offline", "failed"):
        raise Conflict(f"the engine is {status.state}: {status.waiting_for}", code=f"engine_{status.state}")
    target = status.policy_version + steps
    if status.max_steps and target > status.max_steps:
        raise InvalidRequest(
            f"the job ends at max_steps = {status.max_steps} and the policy is at version {status.policy_version}: "
            f"{status.max_steps - status.policy_version} steps are left, {steps} were asked for",
            param="steps",
        )
    return target


TOKENISE_WAIT = 600.0
"""Seconds that the server may need to tokenise a batch, besides the usual limit of a request."""


@dataclass(frozen=True, slots=True, repr=False)
class SftReport:
    """The result of `sft`."""

    steps: tuple[Step, ...]
    """One for each batch that was learned."""
    num_demonstrations: int
    """Demonstrations of `sft`; of other recipes lines, such as pairs."""
    num_answers: int
    num_tokens: int
    """Tokens of the answers in one epoch."""
    seconds: float
    recipe: str = "sft"

    @property
    def loss_name(self) -> str:
        return "cross-entropy" if self.recipe == "sft" else "loss"

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each batch before the batch was learned: of `sft` the mean cross-entropy per token."""
        return tuple(given_loss(step.metrics) for step in self.steps)

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The part of each batch's preferences that the policy had before the batch was learned; NaN for `sft`."""
        return tuple(accuracy_of(step.metrics) for step in self.steps)

    @property
    def ends(self) -> dict[str, tuple[float, float]]:
        """The loss and the accuracy of the first and of the last batch, those that there are."""
        figures = {self.loss_name: self.losses, "accuracy": self.accuracies} if self.steps else {}
        return {name: (of[0], of[-1]) for name, of in figures.items() if not math.isnan(of[-1])}

    def __str__(self) -> str:
        shown = "".join(f", {name} {first:.3f} to {last:.3f}" for name, (first, last) in self.ends.items())
        return f"{len(self.steps)} batches of {self.num_demonstrations} demonstrations in {self.seconds:.0f} s{shown}"

    def __repr__(self) -> str:
        return first_line(self)

    def _repr_html_(self) -> str:
        """The report in a notebook, with the curve of the loss."""
        table = {"answers": self.num_answers, "tokens": self.num_tokens}
        return html_of(str(self), table, self.losses, f"{self.loss_name} of each batch")


@dataclass
class SftTraining:
    """The arguments of one `sft` call."""

    connection: Connection
    examples: Sequence[Example]
    epochs: int
    batch_size: int
    lr: float | None
    policy: str
    seed: int
    progress: bool
    recipe: str | Mapping[str, Any] = ""

    def __post_init__(self) -> None:
        """Raises `ValueError` for an argument out of range."""
        check_counts(1, epochs=self.epochs, batch_size=self.batch_size)
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr = {self.lr!r}: it is a number above 0")

    async def run(self) -> SftReport:
        started = time.monotonic()
        batches = self._batches()
        status = await self.connection.status()
        target_version(status, len(batches))
        shown = Progress("sft", len(batches), wanted=self.progress)
        checked = [await self._send(part, check_only=True) for part in self._parts(self.examples)]
        num_tokens = sum(part.num_tokens for part in checked)
        shown.notify(f"{len(self.examples)} demonstrations with {num_tokens} tokens of answers")
        steps: list[Step] = []
        async with aclosing(self.connection.events(after=status.last_event)) as events:
            for part in batches:
                sent = await self._send(part)
                assert sent.batch is not None and sent.last_event is not None, "the batch is on disk"
                steps.append(await _learned(sent.batch, sent.last_event, events))
                shown.step(steps[-1].metrics)
        return SftReport(
            steps=tuple(steps),
            num_demonstrations=len(self.examples),
            num_answers=sum(part.num_answers for part in checked),
            num_tokens=num_tokens,
            seconds=time.monotonic() - started,
            recipe=recipe_name(self.recipe),
        )

    def _batches(self) -> list[list[DemonstrationBody]]:
        """The batches of all epochs. Each epoch has another order, which depends on the seed only."""
        found: list[list[DemonstrationBody]] = []
        for epoch in range(self.epochs):
            order = list(self.examples)
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            found += self._parts(order)
        return found

    def _parts(self, examples: Sequence[Example]) -> list[list[DemonstrationBody]]:
        size = self.batch_size
        parts = (examples[at : at + size] for at in range(0, len(examples), size))
        return [list(itertools.chain(*part)) for part in parts]

    async def _send(self, part: list[DemonstrationBody], *, check_only: bool = False) -> SftResponse:
        body = build_request(
            SftRequest,
            demonstrations=part,
            policy=self.policy,
            lr=self.lr,
            recipe=self.recipe,
            check_only=check_only,
            client_id=self.connection.settings.client_id,
        )
        key, retry = uuid.uuid4().hex, self.connection.retry
        for attempt in itertools.count():  # A batch of another client, or an evaluation, may take long.
            try:
                send = self.connection.request(
                    "POST", "/sft", body=body, key=key, patience=0, server_wait=TOKENISE_WAIT
                )
                return SftResponse.model_validate(await send)
            except Later as later:
                if later.code == "engine_failed":
                    raise Conflict(later.message, code=later.code) from None
                await retry.sleep(max(later.retry_after, retry.delay(attempt)))
        raise AssertionError("the attempts have no end")


async def _learned(batch: int, committed: int, events: AsyncIterator[Event]) -> Step:
    """Returns the step of a batch once it is learned. Raises `Conflict` if it never will be.

    Events up to number `committed` are about earlier batches, perhaps one with the same id.
    """
    async for event in events:
        if event.seq <= committed:
            continue
        if event.kind == "step" and event.body["policy_version"] == batch + 1:
            return Step(batch + 1, event.body["metrics"])
        if event.kind == "batch" and event.body["batch"] == batch:
            raise Conflict(
                f"batch {batch} was given up, because workers crash on it: {event.body['reason']}; try a smaller "
                "batch_size",
                code="batch_set_aside",
            )
        if event.kind == "state" and event.body["state"] == "failed":
            raise Conflict(f"the engine failed: {event.body['reason']}", code="engine_failed")
    raise AssertionError("the stream of events has no end")
