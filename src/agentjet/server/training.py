"""Training of a run: `Engine` supervises its policies, `TrainingLoop` learns batch after batch on them.

The engine adds the policies to the backend, restores them from the newest checkpoint and runs the loop. After a failure
of a worker it does so again, for all policies of the run. Other runs on the worker recover separately.

A batch is learned by operations on each policy: `forward_backward` and `optim_step`, once per optimiser step. Workers
compute at the same time. Then the new weights of all policies are published to the samplers.

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
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from agentjet.compute.protocol import FINGERPRINT, learn
from agentjet.errors import (
    AgentJetError,
    CheckpointError,
    ComputeError,
    ConfigError,
    HookHung,
    Later,
    RecipeError,
    Unavailable,
    WorkerDied,
    WorkerHung,
)
from agentjet.front.tracing import present_run
from agentjet.protocol import CheckpointInfo
from agentjet.server.checkpoints import combined_stamp
from agentjet.server.monitoring import Telemetry, batch_context, divergence, emit_event, metrics_not_finite
from agentjet.server.run_policies import PolicyVersions, all_of
from agentjet.server.teachers import Teachers
from agentjet.swarm import Batch
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, Op, OperationKind, metrics_prefix

log = logging.getLogger(__name__)

MAX_CRASHES = 2
"""Workers that may fail on a batch, or crash while they learn it, before it is quarantined."""
MAX_FAILURES = 5
"""Worker failures without a learned batch or `HEALTHY_SECONDS` between them, after which training stops."""
HEALTHY_SECONDS = 60.0
STOP_GRACE_SECONDS = 10.0
"""Time that calls in progress have to end when the engine is stopped."""


BuildForests = Callable[[int], Awaitable[tuple[dict[str, TrainingBatch], dict[str, float]]]]
"""Returns the forests of a batch by policy, and metrics: see `facts.build`."""


class TrainingLoop:
    """Trains policies that are up. `Engine` brings them up."""

    def __init__(self, versions: PolicyVersions, telemetry: Telemetry, forests: BuildForests | None = None) -> None:
        """`versions` has the policies, their phase and the commits of the run. `forests` builds those of a batch in
        another process; None if a thread does.
        """
        self.stopping = False
        """If set, the loop ends after the present batch. Notify `changed` after setting it."""
        self.error: RecipeError | None = None
        """A failure of the recipe outside the worker, which ends the loop. Notify `changed` after setting it."""
        self.replay_difference = ""
        """A sentence about the first batch since the start whose repetition led to other weights, or ''."""
        self._build = forests
        self._policies = versions.policies
        self._commits = versions.commits
        self._swarm = versions.swarm
        self._phase = versions.phase
        self._versions = versions
        self._telemetry = telemetry
        self.teachers = Teachers(versions.policies, versions.swarm, telemetry.activity)
        self._next_operations = {policy.policy: Op.of(policy, 0) for policy in versions.policies.ids}
        """First operation of the next batch, by policy. A repetition of the present batch reuses its own."""
        self._learning: int | None = None
        """Id of the batch that the worker is learning."""
        self._is_partial = False
        """True from the first operation of a batch until its weights are published. A policy whose weights changed
        samples nothing in that time, so nothing may wait for the end of a call.
        """
        self._crashes: Counter[int] = Counter()
        """Failures by batch id."""

    async def learn(self) -> None:
        """Learns batches and runs tasks between them until `stopping`. Raises the worker's failure."""
        swarm, phase, gate = self._swarm, self._phase, self._phase.gate
        while True:
            await phase.changed.until(
                lambda: bool(self.stopping or self.error or phase.has_tasks or swarm.pending or swarm.batches.ready())
            )
            if self.error is not None and not self.stopping:
                raise self.error
            # With `max_staleness`, completions continue during a step: the worker learns between two of their tokens.
            if not (self.stopping or self._is_partial) and (phase.has_tasks or not swarm.job.max_staleness):
                gate.hold()
                await gate.drained()
            if self.stopping:
                return
            try:
                if not self._is_partial:
                    await phase.run_tasks()
                if not self.stopping and (swarm.pending or swarm.batches.ready()):
                    await self._step()
                    self._telemetry.timer.start_sampling()
            except Later as later:  # The journal refuses writes. The batch stays pending; learning it again is safe.
                await phase.changed.until(lambda: self.stopping, later.retry_after)
            if not (self.stopping or self._is_partial):
                self._sample()

    async def catch_up(self, batches: Iterable[Batch], operations: Mapping[str, int]) -> None:
        """Learns the `batches` after the loaded checkpoint, from the `operations` on. Then opens the gate.

        The samplers get the last version only. Separate samplers may still have it from before the crash.
        """
        self._next_operations = {one.policy: Op.of(one, operations[one.policy]) for one in self._policies.ids}
        self._is_partial = False
        batches = list(batches)
        text = "learning the batches since the checkpoint again"
        with self._telemetry.activity.work("replay", text, len(batches)) as work:
            for batch in batches:
                if self.stopping:
                    return
                is_new = batch.id == self._swarm.policy_version and not self._swarm.batches.is_offered(batch)
                if is_new and await self.teachers.is_asked(batch) and not self.teachers.has_grades(batch):
                    break  # `learn` waits for the grades, and calls go on.
                await self._learn(batch)
                work.done += 1
        if not self.stopping:
            await self._publish(self._swarm.policy_version)
            self._telemetry.timer.start_sampling()
            self._sample()

    def _sample(self) -> None:
        self._phase.enter("sampling")
        self._phase.gate.open()

    async def _step(self) -> None:
        self._phase.enter("learning")
        batch = self._swarm.pending or self._swarm.batches.compose()
        await self._commits.durable()
        await self._learn(batch)
        job, version = self._swarm.job, self._swarm.policy_version
        if version == batch.id:  # It was stopped before.
            return
        if (job.checkpoint_every and version % job.checkpoint_every == 0) or version == job.max_steps:
            await self._versions.try_checkpoint()

    async def _learn(self, batch: Batch) -> None:
        """Learns a batch for the first time, or again after a crash. Only the first time is recorded."""
        replay = batch.id < self._swarm.policy_version
        span = self._telemetry.tracing.span("step", batch_id=batch.id, policy_version=batch.id + 1, replay=replay)
        try:
            with batch_context(batch.id), span:
                taught = await self._taught(batch)
                if taught is None:
                    return
                training, asked = taught
                self._learning = batch.id
                self._telemetry.timer.start_learning()
                metrics, following, fingerprints = await self._apply(batch, training)
                if replay:
                    self._compare(batch, fingerprints)
                elif any(map(self._policies.has_samplers, self._policies.ids)):
                    self._swarm.batches.offered(batch)
                    await self._commits.durable()
                published = await self._publish(batch.id + 1, to_samplers=not replay)
                self._is_partial = False
                if not replay:
                    num_tokens = sum(own.forest.num_targets for own in training.values())
                    timed = self._telemetry.step_metrics(num_tokens)
                    await self._record(batch, {**asked, **metrics, **published, **timed}, fingerprints)
                self._next_operations = following
        except Later:  # A failure of the journal, not of the batch.
            self._learning = None
            raise
        self._learning = None

    async def _taught(self, batch: Batch) -> tuple[dict[str, TrainingBatch], dict[str, float]] | None:
        """Returns the forests of a batch with the grades of its teacher, and metrics; None if the loop is stopped.

        An endpoint may not answer for long. Tasks run in that time, and calls go on if `job.max_staleness` allows it.
        """
        self._learning = batch.id  # An error of the journal is one of the batch, and one of the teacher is not.
        training = await self._forests(batch)
        self._learning = None
        if not await self.teachers.is_asked(batch):
            return await self.teachers.taught(batch, training)
        phase, swarm, was_open = self._phase, self._swarm, self._phase.gate.is_open
        while not self.stopping:
            revision = swarm.job_revision
            asking = asyncio.create_task(self.teachers.taught(batch, training))
            asking.add_done_callback(lambda _: phase.changed.notify())
            is_over = partial(self._is_asked, asking, revision)
            try:
                while not is_over():
                    await phase.changed.until(lambda: is_over() or (phase.is_up and phase.has_tasks))  # noqa: B023  awaited at once
                    if not is_over():
                        phase.gate.hold()
                        await phase.gate.drained()
                        await phase.run_tasks()
                        if was_open and not self.stopping:
                            phase.gate.open()
                if asking.done():
                    return asking.result()
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        return None

    async def _forests(self, batch: Batch) -> dict[str, TrainingBatch]:
        batches = self._swarm.batches
        if self._build is None:
            return await asyncio.to_thread(batches.training_batches, batch)
        batches.check_reach(batch.id)
        training, metrics = await self._build(batch.id)
        batches.built(batch, metrics)
        return training

    def _is_asked(self, asking: asyncio.Future[Any], revision: int) -> bool:
        """True if a teacher has answered, need not answer, or has another address: the job has another revision."""
        return asking.done() or self.stopping or self._swarm.job_revision != revision

    async def _publish(self, version: int, *, to_samplers: bool = True) -> dict[str, float]:
        """Publishes all policies. With `max_staleness`, samplers adopt in turns, so that calls go on."""
        in_turns = bool(self._swarm.job.max_staleness)
        return await self._policies.publish(version, to_samplers=to_samplers, in_turns=in_turns)

    async def _apply(
        self, batch: Batch, training: Mapping[str, TrainingBatch]
    ) -> tuple[dict[str, float], dict[str, Op], dict[str, int]]:
        """Applies the operations of a batch. Returns metrics, and each policy's next operation and fingerprint.

        Workers compute at the same time. Policies of one worker follow each other, so that it holds one gradient.
        """
        metrics: dict[str, float] = {}
        following: dict[str, Op] = {}
        fingerprints: dict[str, int] = {}

        async def apply(names: list[str]) -> None:
            journal = partial(self._journal, batch)
            for name in names:
                first, prefix = self._next_operations[name], metrics_prefix(name, self._policies.names)
                compute = self._policies.compute
                own, following[name] = await learn(compute, first, training[name], batch.job, before=journal)
                if FINGERPRINT in own:
                    fingerprints[name] = int(own.pop(FINGERPRINT))
                metrics.update({f"{prefix}{metric}": value for metric, value in own.items()})

        await all_of(apply([name for name in names if name in training]) for names in self._policies.by_host())
        return metrics, following, fingerprints

    def _compare(self, batch: Batch, fingerprints: Mapping[str, int]) -> None:
        differing = self._swarm.batches.differing(batch, fingerprints)
        if differing and not self.replay_difference:
            self.replay_difference = (
                f"batch {batch.id} was learned again after a restart, and led to other weights of "
                f"{', '.join(differing)}: later batches were sampled by weights that no longer exist. A recipe that "
                "draws random numbers needs a fixed seed; threads, ranks, libraries and the machine must be the same"
            )
            log.warning("%s", self.replay_difference)

    async def _journal(self, batch: Batch, op: Op, kind: OperationKind) -> None:
        self._swarm.batches.record_operation(op.policy, op.number, kind, batch)
        await self._commits.durable()
        self._is_partial = True

    async def _record(self, batch: Batch, metrics: dict[str, float], fingerprints: Mapping[str, int]) -> None:
        slices = self._swarm.batches.learned_in_slices(batch, metrics, fingerprints)
        merged = await self._commits.in_slices(slices)
        await self._commits.durable()
        self._telemetry.metrics.append(batch.id + 1, merged)
        if reason := divergence(merged):
            log.error("%s", reason)
        elif reason := metrics_not_finite([merged], batch.job):
            log.warning("batch %d: %s", batch.id, reason)

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
                self._swarm.restores.append(partial(self._crashes.__setitem__, failed, num_crashes))
            except Later:  # The journal has logged it.
                pass
            except Exception:  # The boundary: the engine's task must not end in between. It fails after `MAX_FAILURES`.
                log.exception("batch %d could not be quarantined", failed)


class Engine:
    """The supervisor of a run's policies. One task supervises; `start` and `stop` begin and end it."""

    def __init__(self, training: TrainingLoop, versions: PolicyVersions) -> None:
        self.num_hung = 0
        """Number of workers killed so far because they hung."""
        self.fatal: AgentJetError | None = None
        """The error after which no further worker was started."""
        self.training = training
        self._policies = versions.policies
        self._swarm = versions.swarm
        self._phase = versions.phase
        self._versions = versions
        self._store = versions.store
        self._activity = versions.activity
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._failures = 0
        self._version_at_failure = 0

    # ---- start and stop ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Brings the policies up in the background. Does nothing if they are. Raises `Later` during a stop."""
        if self._stop_task is not None and not self._stop_task.done():
            raise Unavailable("The engine is being stopped.", code="engine_stopping", retry_after=2.0)
        if self._task is None or self._task.done():
            self.training.stopping, self.training.error = False, None
            self._failures, self.fatal = 0, None
            self._phase.gate.hold()
            self._phase.enter("loading")
            self._task = asyncio.create_task(self._supervise())

    async def wait_until_up(self) -> None:
        """Waits until the policies are up. Raises the error of a failed start: `ConfigError` for an unusable model."""
        await self._phase.changed.until(lambda: self._phase.state not in ("loading", "draining"))
        if self.fatal is not None:
            raise self.fatal

    async def stop(self) -> None:
        """Refuses calls, finishes the batch being learned, saves a checkpoint, removes the policies. Idempotent."""
        if self._stop_task is None or self._stop_task.done():
            self._stop_task = asyncio.create_task(self._stop())
        await asyncio.shield(self._stop_task)

    async def _stop(self) -> None:
        phase = self._phase
        if phase.state == "offline":
            return
        was_up = phase.is_up
        self.training.stopping = True
        phase.gate.shut(phase.refusal)
        if phase.state != "failed":
            phase.enter("draining")
        if self._task is not None:
            if not was_up:
                self._task.cancel()
            phase.changed.notify()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                await phase.gate.drained()
        except TimeoutError:
            log.warning("calls that the stop cut off: %d", phase.gate.num_calls())
        if was_up and self.fatal is None and self._swarm.policy_version:
            try:
                await self._versions.try_checkpoint()
            except (AgentJetError, OSError) as error:  # The journal has all batches since the last good one.
                log.error("no checkpoint at the stop: %s", error)
        await self._policies.remove()
        phase.close()
        phase.enter("offline")

    def recipe_failed(self, error: RecipeError) -> Later:
        """Stops training for a failure of the recipe in the gateway. Returns the refusal of the request.

        The request had no effect, and its client repeats it until the recipe is mended.
        """
        self.training.error = error
        self._phase.changed.notify()
        return Unavailable(f"The engine failed: {error}", code="engine_failed", retry_after=30.0)

    # ---- supervision ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Boundary: an error that `_keep_up` does not handle fails the engine."""
        present_run.set(self._policies.run)
        try:
            await self._keep_up()
        except Exception as error:
            log.exception("the engine failed")
            await self._fail(error if isinstance(error, AgentJetError) else ComputeError(repr(error)))

    async def _keep_up(self) -> None:
        """Brings the policies up, again after each crash, until stopped."""
        while not self.training.stopping:
            began = time.monotonic()
            try:
                await self._bring_up()
                if not self.training.stopping:
                    await self._train_while_alive()
            except (ConfigError, CheckpointError) as error:
                await self._fail(error)
                return
            except Exception as error:  # The boundary of worker failures: `_recover` logs it.
                if not await self._recover(error, lived=time.monotonic() - began):
                    return

    async def _train_while_alive(self) -> None:
        training = asyncio.create_task(self.training.learn())
        death = asyncio.create_task(self._policies.compute.died(self._policies.ids))
        try:
            await asyncio.wait([training, death], return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                training.result()
            else:
                raise death.result()
        finally:
            training.cancel()
            death.cancel()
            await asyncio.gather(training, death, return_exceptions=True)

    async def _recover(self, error: Exception, *, lived: float) -> bool:
        """Handles a failure `lived` seconds after the worker's start. Returns True if another one is to be started."""
        log.warning("the worker failed: %s", error, exc_info=None if isinstance(error, AgentJetError) else error)
        self.num_hung += isinstance(error, WorkerHung)
        # The journal refuses writes for a while: the worker is not to blame.
        is_ours = not (isinstance(error, Later) or self._policies.is_of_another_run(error))
        version = self._swarm.policy_version
        if is_ours and isinstance(error, HookHung):  # The recipe is to blame, not the batch.
            self.training.worker_failed(error, is_ours=False)
            await self._fail(error)
            return False
        self.training.worker_failed(error, is_ours=is_ours)
        if self.training.stopping:
            return False
        has_learned, self._version_at_failure = version > self._version_at_failure, version
        self._failures = (0 if has_learned or lived > HEALTHY_SECONDS else self._failures) + is_ours
        is_new = is_ours and not self._policies.renderers and self._store.newest() is None and version == 0
        if is_new or self._failures > MAX_FAILURES:
            await self._fail(error if isinstance(error, AgentJetError) else WorkerDied(repr(error)))
            return False
        if not self._samples_in_recovery():
            self._phase.gate.hold()
        self._phase.enter("loading", f"the worker failed and is started again: {error}")
        await self._policies.remove(keep_samplers=True)
        pause = 0.0 if self._failures <= 1 else min(30.0, 2.0 ** (self._failures - 2))
        await self._sleep(error.retry_after if isinstance(error, Later) else pause)
        return True

    def _samples_in_recovery(self) -> bool:
        """True if calls continue while the policies are brought up again, because all have separate samplers."""
        can_sample = self._phase.gate.is_open and all(map(self._policies.has_samplers, self._policies.ids))
        return can_sample and bool(self._swarm.job.max_staleness)

    async def _fail(self, error: AgentJetError) -> None:
        failed = f" after {self._failures} consecutive worker failures" if self._failures > MAX_FAILURES else ""
        is_new = self._phase.state == "loading" and self._policies.num_starts <= 1
        log.error("%s%s: %s", "the run could not start" if is_new else "training stopped", failed, error)
        await self._policies.remove()
        self.fatal = error
        self._phase.enter("failed", str(error))
        self._phase.close()

    # ---- bringing the policies up -----------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Adds the policies to the backend and brings them to the policy version of the journal."""
        await self._store.sweep()
        await self._policies.check_job(self._swarm.job)
        self._policies.num_starts += 1
        await self._add_policies()
        # A run that has learned goes on sampling without its teacher, whose grades a replay finds on the disk.
        await self.training.teachers.check(self._swarm.job, waits=not self._swarm.policy_version)
        batches, operations = await self._load_newest()
        self._swarm.record_origin()
        renderers = self._policies.renderers
        self._swarm.record_models(
            {name: one.control_tokens for name, one in renderers.items()},
            {name: one.context_length for name, one in renderers.items()},
        )
        await self.training.catch_up(batches, operations)

    async def _add_policies(self) -> None:
        await self._policies.add(self._swarm.job, self._activity, self._swarm.check_origin)

    async def _load_newest(self) -> tuple[list[Batch], dict[str, int]]:
        """Loads the newest good checkpoint, if any. Returns the batches after it, and each policy's next operation.

        Renames unusable checkpoints and tries older ones. Raises `ConfigError` for an intact one of other settings or
        beyond the journal, `CheckpointError` if neither a checkpoint nor the journal leads to the present version.
        """
        refused: list[str] = []
        stamps: dict[str, CheckpointStamp] = {}
        for info in reversed(self._store.listing()):
            try:
                with self._activity.work("load", f"loading the checkpoint of version {info.policy_version}"):
                    stamps = await self._policies.load(info)
                self._swarm.batches.check_checkpoint(combined_stamp(stamps))
                self._store.good_versions.add(info.policy_version)
                break
            except CheckpointError as error:
                stamps = {}
                refused.append(self._quarantine(info, error))
        stamp = combined_stamp(stamps) if stamps else None
        await asyncio.to_thread(self._swarm.batches.read_recipes, 0 if stamp is None else stamp.policy_version)
        try:
            batches = self._swarm.batches.resume(stamp)
        except CheckpointError as error:
            earlier = ", ".join(path.name for path in self._store.unusable())
            found = [f"Unusable checkpoints in {self._store.folder}: {earlier}."] if earlier else []
            raise CheckpointError("; ".join([*refused, str(error), *found])) from error
        if refused and not stamps:  # A failed load may leave any state behind.
            await self._add_policies()
        return batches, {
            policy.policy: stamps[policy.policy].operation if stamps else 0 for policy in self._policies.ids
        }

    def _quarantine(self, info: CheckpointInfo, error: CheckpointError) -> str:
        """Renames an unusable checkpoint. Returns a sentence about it."""
        renamed = self._store.quarantine(info.policy_version)
        log.error("unusable checkpoint, renamed to %s: %s", renamed, error)
        body = {"ok": False, "policy_version": info.policy_version, "error": str(error), "set_aside": str(renamed)}
        emit_event(self._swarm, "checkpoint", body)
        return f"{error} (renamed to {renamed})"
