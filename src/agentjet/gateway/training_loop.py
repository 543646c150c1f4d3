"""`TrainingLoop`: learns batch after batch on policies that are up, and runs maintenance tasks between batches.

A batch is learned by operations on each policy of the run: `forward_backward` and `optim_step`, once per optimiser
step. Workers compute at the same time. Then the new weights of all policies are published to the samplers.

Invariants:
* calls sample from `swarm.policy_version`: the gate opens only once the worker has learned all batches of the journal;
* nothing is saved or exported while a call is inside the gate. Nothing is learned then either, unless
  `job.max_staleness` is above 0;
* no failure loses a batch, and none applies it twice. The journal has the batch and each of its operations before the
  operation is applied. After a crash all policies load the newest checkpoint and get the later operations again, with
  the same numbers. Only a batch that `MAX_CRASHES` workers crashed on is quarantined, counted and shown;
* a version names the weights of one batch: once separate samplers may have them, the batch is not quarantined.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentjet.compute.operations import FINGERPRINT, learn
from agentjet.compute.protocol import Compute
from agentjet.config import ServeConfig
from agentjet.errors import CheckpointError, Conflict, Later, RecipeError, WorkerDied
from agentjet.gateway import observability
from agentjet.gateway.checkpoints import CheckpointStore, combined_stamp, flush
from agentjet.gateway.concurrency import Broadcast, Gate, GroupCommit
from agentjet.gateway.observability import (
    Activity,
    LoopLag,
    MetricsFile,
    StepTimer,
    Tracing,
    divergence,
    emit_event,
    metrics_not_finite,
)
from agentjet.gateway.read import VarianceReport
from agentjet.protocol import CheckpointInfo
from agentjet.recipes.hooks import PlugInThreads
from agentjet.swarm import Batch, SwarmState
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, Op, OperationKind, PolicyId, metrics_prefix, policy_of

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_CRASHES = 2
"""Workers that may fail on a batch, or crash while they learn it, before it is quarantined."""

MaintenanceTask = Callable[[], Awaitable[Any]]
"""Work on the worker that needs it to neither sample nor learn: a checkpoint, an export."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The objects that the parts of a gateway share."""

    name: str
    config: ServeConfig
    swarm: SwarmState
    commits: GroupCommit
    compute: Compute
    gate: Gate
    store: CheckpointStore
    metrics: MetricsFile
    changed: Broadcast
    tracing: Tracing
    activity: Activity
    lag: LoopLag
    hooks: PlugInThreads
    variance: VarianceReport

    @property
    def policies(self) -> tuple[PolicyId, ...]:
        return tuple(PolicyId(self.name, policy) for policy in self.config.policy_names)

    def policy_id(self, role: str) -> PolicyId:
        """Returns the policy of a role."""
        return PolicyId(self.name, policy_of(role, tuple(self.config.policies)))


class TrainingLoop:
    """Trains the policies of a run. `Engine` brings them up."""

    def __init__(self, run: OpenRun, *, enter: Callable[[Literal["sampling", "learning"]], None]) -> None:
        """`enter` is called at each change between sampling and learning."""
        self.stopping = False
        """If set, the loop ends after the present batch. Notify `changed` after setting it."""
        self.error: RecipeError | None = None
        """A failure of the recipe outside the worker, which ends the loop. Notify `changed` after setting it."""
        self.checkpoint_error = ""
        """Error of the newest checkpoint, or ''."""
        self.replay_difference = ""
        """A sentence about the first batch since the start whose repetition led to other weights, or ''."""
        self.timer = StepTimer(run.gate.busy_seconds)
        self._step_ended = run.lag.now()
        self._run = run
        self._swarm = run.swarm
        self._compute = run.compute
        self._policies = run.policies
        self._next_operations = {policy.policy: Op.of(policy, 0) for policy in run.policies}
        """First operation of the next batch, by policy. A repetition of the present batch reuses its own."""
        self._enter = enter
        self._maintenance: deque[tuple[MaintenanceTask, asyncio.Future[Any]]] = deque()
        self._learning: int | None = None
        """Id of the batch that the worker is learning."""
        self._is_partial = False
        """True from the first operation of a batch until its weights are published. A policy whose weights changed
        samples nothing in that time, so nothing may wait for the end of a call.
        """
        self._crashes: Counter[int] = Counter()
        """Failures by batch id."""

    async def learn(self) -> None:
        """Learns batches and runs maintenance tasks until `stopping`. Raises the worker's failure."""
        swarm, gate = self._swarm, self._run.gate
        while True:
            await self._run.changed.until(
                lambda: bool(self.stopping or self.error or self._maintenance or swarm.pending or swarm.batches.ready())
            )
            if self.error is not None and not self.stopping:
                raise self.error
            # With `max_staleness`, completions continue during a step: the worker learns between two of their tokens.
            if not (self.stopping or self._is_partial) and (self._maintenance or not swarm.job.max_staleness):
                gate.hold()
                await gate.drained()
            if self.stopping:
                return
            try:
                if not self._is_partial:
                    await self._run_maintenance()
                if not self.stopping and (swarm.pending or swarm.batches.ready()):
                    await self._step()
                    self.timer.start_sampling()
            except Later as later:  # The journal refuses writes. The batch stays pending; learning it again is safe.
                await self._run.changed.until(lambda: self.stopping, later.retry_after)
            if not (self.stopping or self._is_partial):
                self._sample()

    async def catch_up(self, batches: Iterable[Batch], operations: Mapping[str, int]) -> None:
        """Learns the `batches` after the loaded checkpoint, from the `operations` on. Then opens the gate.

        The samplers get the last version only. Separate samplers may still have it from before the crash.
        """
        self._next_operations = {policy.policy: Op.of(policy, operations[policy.policy]) for policy in self._policies}
        self._is_partial = False
        batches = list(batches)
        with self._run.activity.work("replay", "learning the batches since the checkpoint again", len(batches)) as work:
            for batch in batches:
                if self.stopping:
                    return
                await self._learn(batch)
                work.done += 1
        if not self.stopping:
            await self._publish(self._swarm.policy_version)
            self.timer.start_sampling()
            self._sample()

    def _sample(self) -> None:
        self._enter("sampling")
        self._run.gate.open()

    # ---- batches ----------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        self._enter("learning")
        batch = self._swarm.pending or self._swarm.batches.compose()
        await self._run.commits.durable()
        await self._learn(batch)
        job, version = self._swarm.job, self._swarm.policy_version
        if (job.checkpoint_every and version % job.checkpoint_every == 0) or version == job.max_steps:
            await self.try_checkpoint()

    async def _learn(self, batch: Batch) -> None:
        """Learns a batch for the first time, or again after a crash. Only the first time is recorded."""
        replay = batch.id < self._swarm.policy_version
        self._learning = batch.id
        span = self._run.tracing.span("step", batch_id=batch.id, policy_version=batch.id + 1, replay=replay)
        try:
            with observability.batch_context(batch.id), span:
                training = await asyncio.to_thread(self._swarm.batches.training_batches, batch)
                self.timer.start_learning()
                metrics, following, fingerprints = await self._apply(batch, training)
                if replay:
                    self._compare(batch, fingerprints)
                if self._has_separate_samplers() and not replay:
                    self._swarm.batches.offered(batch)
                    await self._run.commits.durable()
                published = await self._publish(batch.id + 1, to_samplers=not replay)
                self._is_partial = False
                if not replay:
                    num_tokens = sum(own.forest.num_targets for own in training.values())
                    timed = {**self.timer.metrics(num_tokens), **self._lag()}
                    await self._record(batch, {**metrics, **published, **timed}, fingerprints)
                self._next_operations = following
        except Later:  # A failure of the journal, not of the batch.
            self._learning = None
            raise
        self._learning = None

    def _has_separate_samplers(self) -> bool:
        settings = (self._run.config.compute_of(policy.policy) for policy in self._policies)
        return any(self._compute.capabilities(one).separate_samplers for one in settings)

    async def _publish(self, version: int, *, to_samplers: bool = True) -> dict[str, float]:
        """Publishes all policies at the same time; returns metrics.

        With `max_staleness`, samplers adopt in turns, so that calls go on.
        """
        in_turns = bool(self._swarm.job.max_staleness)
        results = await self._all(
            self._compute.publish(policy, version, to_samplers=to_samplers, in_turns=in_turns)
            for policy in self._policies
        )
        prefixes = [metrics_prefix(policy.policy, self._swarm.store.policies) for policy in self._policies]
        return {
            f"{prefix}{name}": value
            for prefix, metrics in zip(prefixes, results, strict=True)
            for name, value in metrics.items()
        }

    async def _apply(
        self, batch: Batch, training: Mapping[str, TrainingBatch]
    ) -> tuple[dict[str, float], dict[str, Op], dict[str, int]]:
        """Applies the operations of a batch. Returns metrics, and each policy's next operation and fingerprint.

        Workers compute at the same time. Policies of one worker follow each other, so that it holds one gradient.
        """
        metrics: dict[str, float] = {}
        following: dict[str, Op] = {}
        fingerprints: dict[str, int] = {}
        by_host: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in training:
            by_host[self._run.config.host_of(name)].append(name)

        async def apply(names: list[str]) -> None:
            journal = partial(self._journal, batch)
            for name in names:
                first, prefix = self._next_operations[name], metrics_prefix(name, self._swarm.store.policies)
                own, following[name] = await learn(self._compute, first, training[name], batch.job, before=journal)
                if FINGERPRINT in own:
                    fingerprints[name] = int(own.pop(FINGERPRINT))
                metrics.update({f"{prefix}{metric}": value for metric, value in own.items()})

        await self._all(apply(names) for names in by_host.values())
        return metrics, following, fingerprints

    def _compare(self, batch: Batch, fingerprints: Mapping[str, int]) -> None:
        """Reports a repetition of a batch that led to other weights than before."""
        differing = self._swarm.batches.differing(batch, fingerprints)
        if differing and not self.replay_difference:
            self.replay_difference = (
                f"batch {batch.id} was learned again after a restart, and led to other weights of "
                f"{', '.join(differing)}: later batches were sampled by weights that no longer exist. A recipe that "
                "draws random numbers needs a fixed seed; threads, ranks, libraries and the machine must be the same"
            )
            log.warning("%s", self.replay_difference)

    @staticmethod
    async def _all(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Returns the results of works that run at the same time. The first failure ends the others."""
        tasks = [asyncio.create_task(work) for work in works]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _journal(self, batch: Batch, op: Op, kind: OperationKind) -> None:
        self._swarm.batches.record_operation(op.policy, op.number, kind, batch)
        await self._run.commits.durable()
        self._is_partial = True

    def _lag(self) -> dict[str, float]:
        """Returns the worst lag of the event loop since the step before, in seconds."""
        lag = self._run.lag
        worst, self._step_ended = lag.worst(self._step_ended), lag.now()
        return {} if worst is None else {"server/loop_lag": worst.cpu, "server/loop_lag_wall": worst.wall}

    async def _record(self, batch: Batch, metrics: dict[str, float], fingerprints: Mapping[str, int]) -> None:
        slices = self._swarm.batches.learned_in_slices(batch, metrics, fingerprints)
        merged = await self._run.commits.in_slices(slices)
        await self._run.commits.durable()
        self._run.metrics.append(batch.id + 1, merged)
        if reason := divergence(merged):
            log.error("%s", reason)
        elif reason := metrics_not_finite([merged], batch.job):
            log.warning("batch %d: %s", batch.id, reason)
        self._run.variance.batch_learned()

    def worker_failed(self, error: Exception, *, is_ours: bool) -> None:
        """Counts a failure against the batch being learned, if it `is_ours`. Quarantines the batch if needed."""
        failed, self._learning = self._learning, None
        if failed is None or not is_ours:
            return
        pending = self._swarm.pending
        if pending is not None and self._swarm.batches.is_offered(pending):
            return
        self._crashes[failed] += 1
        if pending is not None and pending.id == failed and self._crashes[failed] >= MAX_CRASHES:
            log.error("%d workers failed on batch %d: it is quarantined", self._crashes[failed], failed)
            try:  # If the journal refuses the write or its commit, the next failure quarantines the batch.
                self._swarm.batches.quarantine(pending, str(error))
                num_crashes = self._crashes.pop(failed)
                self._swarm.store.undo_with(partial(self._crashes.__setitem__, failed, num_crashes))
            except Later:  # The journal has logged it.
                pass
            except Exception:  # The boundary: the engine's task must not end in between. It fails after `MAX_FAILURES`.
                log.exception("batch %d could not be quarantined", failed)

    # ---- maintenance ------------------------------------------------------------------------------------------------

    def submit(self, task: MaintenanceTask) -> asyncio.Future[Any]:
        """Queues a maintenance task and returns the future of its result."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._maintenance.append((task, done))
        self._run.changed.notify()
        return done

    def reject_maintenance(self, refusal: Callable[[], Later]) -> None:
        """Refuses all queued tasks."""
        while self._maintenance:
            done = self._maintenance.popleft()[1]
            if not done.done():
                done.set_exception(refusal())

    async def _run_maintenance(self) -> None:
        while self._maintenance:
            task, done = self._maintenance[0]  # It stays first if it is cancelled: another worker of the run died.
            result, failure = None, None
            try:
                result = await task()
            except WorkerDied:
                raise
            except Exception as error:  # The boundary: the submitter gets it.
                failure = error
            self._maintenance.popleft()
            if done.done():  # The submitter was cancelled during the task.
                continue
            if failure is not None:
                done.set_exception(failure)
            else:
                done.set_result(result)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    async def checkpoint(self) -> CheckpointInfo:
        """Saves the present policy version unless it is saved already. To be run as a maintenance task.

        Raises `CheckpointError`, and `Conflict` if a policy has diverged: its checkpoint would displace a good one.
        """
        version, keep, store = self._swarm.policy_version, self._swarm.job.keep_checkpoints, self._run.store
        if (written := store.good(version)) is not None:
            return written
        try:
            self.refuse_diverged()
            with self._run.activity.work("checkpoint", f"saving the checkpoint of version {version}"):
                info = await store.write(version, self._save, self._record_checkpoint, keep=keep)
        except (CheckpointError, Conflict) as error:
            self.checkpoint_error = str(error)
            emit_event(self._swarm, "checkpoint", {"ok": False, "policy_version": version, "error": str(error)})
            raise
        self.checkpoint_error = ""
        if (covered := store.covers(keep)) is not None:
            self._swarm.batches.checkpointed(covered)
        emit_event(self._swarm, "checkpoint", {"ok": True, "policy_version": version, "path": info.path})
        return info

    async def try_checkpoint(self) -> None:
        """Saves a checkpoint. A failure is logged and recorded, and training continues."""
        try:
            await self.checkpoint()
        except (CheckpointError, Conflict) as error:
            log.error("no checkpoint of policy version %d: %s", self._swarm.policy_version, error)

    async def _save(self, path: Path) -> CheckpointStamp:
        """Writes all policies to a new folder."""
        if not self._swarm.store.policies:
            return await self._compute.save(self._policies[0], path)
        path.mkdir(parents=True)
        stamps = {policy.policy: await self._compute.save(policy, path / policy.policy) for policy in self._policies}
        flush(path)
        return combined_stamp(stamps)

    def refuse_diverged(self) -> None:
        """Raises `Conflict` if a policy has diverged: its weights are useless."""
        if reason := divergence(self._swarm.last_step):
            raise Conflict(reason, code="policy_diverged")

    async def _record_checkpoint(self, stamp: CheckpointStamp) -> None:
        self._swarm.batches.record_checkpoint(stamp)
        await self._run.commits.durable()
