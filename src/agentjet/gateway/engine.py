"""The engine: a worker kept alive and taught. It brings the worker up, replays what the journal holds beyond the
newest checkpoint, learns batch after batch, saves checkpoints, and starts over when the worker dies.

Invariants:
* the policy a call samples from is `swarm.policy_version`: the gate opens only once the worker has caught up with
  the journal;
* nothing is saved or exported while a call is inside the gate, and nothing learned unless `job.max_staleness` is
  above 0;
* a failure never loses a batch: it is in the journal before it is learned, and learning is idempotent. Only a batch
  that fails `MAX_CRASHES` workers, one after the other, is set aside, counted and shown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from agentjet.compute import Compute
from agentjet.config import JobConfig
from agentjet.errors import AgentJetError, CheckpointError, ConfigError, Conflict, Later, WorkerDied, WorkerHung
from agentjet.gateway import observability, states
from agentjet.gateway.checkpoints import CheckpointStore
from agentjet.gateway.concurrency import Broadcast, Gate, GroupCommit
from agentjet.gateway.observability import DIVERGED, MetricsFile, StepTimer, Tracing, has_diverged
from agentjet.gateway.views import zero_variance
from agentjet.protocol import REPORTED_BATCHES, CheckpointInfo, report_lines
from agentjet.rendering import Renderer
from agentjet.swarm import Batch, SwarmState
from agentjet.types import CheckpointStamp, EngineState, ModelInfo

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_FAILURES = 5
"""Failures in a row, with nothing learned and less than `HEALTHY_SECONDS` lived in between, after which training stops.
"""
HEALTHY_SECONDS = 60.0
MAX_CRASHES = 2
"""So many workers a batch may fail, or take down with it, before it is set aside."""
STOP_GRACE_SECONDS = 10.0
"""How long calls being sampled may go on when the engine is stopped."""


class Engine:
    """Owns the worker's life. One task runs it; `start` and `stop` are its switch."""

    def __init__(
        self,
        swarm: SwarmState,
        commits: GroupCommit,
        compute: Compute,
        gate: Gate,
        store: CheckpointStore,
        metrics: MetricsFile,
        changed: Broadcast,
        *,
        tracing: Tracing | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state: EngineState = "offline"
        self.reason = ""
        """Why the engine is in a state that nobody asked for: how the worker died, what failed."""
        self.card: ModelInfo | None = None
        self.renderer: Renderer | None = None
        """Of the card; both are there from the first time the worker was up."""
        self.num_workers = 0
        """Started so far."""
        self.num_hung = 0
        """Killed so far because they hung."""
        self.fatal: AgentJetError | None = None
        """What made the engine give up."""
        self._swarm = swarm
        self._commits = commits
        self._compute = compute
        self._gate = gate
        self._store = store
        self._metrics = metrics
        self._changed = changed
        self._sleep = sleep
        self._monotonic = monotonic
        self._entered = monotonic()
        self._tracing = tracing or Tracing()
        self._timer = StepTimer(gate.busy_seconds, monotonic=monotonic)
        self._errands: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._stopping = False
        self._failures = 0
        self._trying: int | None = None
        """The batch a worker is learning."""
        self._deaths: Counter[int] = Counter()
        self._refuse_calls()

    # ---- the switch -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring the worker up, in the background; nothing happens when that is under way or done.

        Raises `Later` during a stop.
        """
        if self._stop_task is not None and not self._stop_task.done():
            raise Later("The engine is being stopped.", code="engine_stopping", status=503, retry_after=2.0)
        if self._task is None or self._task.done():
            self._stopping, self._failures, self.fatal = False, 0, None
            self._gate.hold()
            self._enter("loading")
            self._task = asyncio.create_task(self._supervise())

    async def settled(self) -> None:
        """Wait until the worker is up. Raises what made the engine give up."""
        await self._changed.until(lambda: self.state not in ("loading", "draining"))
        if self.fatal is not None:
            raise self.fatal

    async def stop(self) -> None:
        """Refuse calls, end the batch being learned, save a checkpoint, end the worker.

        Asked twice, it is done once.
        """
        if self._stop_task is None or self._stop_task.done():
            self._stop_task = asyncio.create_task(self._wind_down())
        await asyncio.shield(self._stop_task)

    async def _wind_down(self) -> None:
        if self.state == "offline":
            return
        was_up = self.state in ("sampling", "learning")
        self._stopping = True
        self._refuse_calls()
        if self.state != "failed":
            self._enter("draining")
        if self._task is not None:
            if not was_up:
                self._task.cancel()
            self._changed.notify()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                await self._gate.drained()
        except TimeoutError:
            log.warning("%d calls were cut off by the stop", self._gate.inside)
        if was_up and self.fatal is None:
            await self._last_checkpoint()
        await self._compute.close()
        self._reject_errands()
        self._enter("offline")

    def seconds_in_state(self) -> float:
        """How long the engine has been in its present state."""
        return self._monotonic() - self._entered

    async def between_batches(self, name: states.Demand, errand: Callable[[], Awaitable[Result]]) -> Result:
        """The result of `errand`, carried out while nothing is sampled or learned.

        Raises `IllegalInState` when the engine is stopped, `Later` when it is stopped before the errand's turn.
        """
        states.demand(name, self.state)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._errands.append((errand, done))
        self._changed.notify()
        result: Result = await done
        return result

    async def checkpoint(self) -> CheckpointInfo:
        """Save the present policy, unless that was done already.

        An errand: see `between_batches`. Raises `CheckpointError`, and `Conflict` for a policy that has diverged: its
        checkpoint would push out the last good one.
        """
        version = self._swarm.policy_version
        if (written := self._store.good(version)) is not None:
            return written
        try:
            self.refuse_diverged()
            keep = self._swarm.job.keep_checkpoints
            info = await self._store.write(version, self._compute.save, self._record_checkpoint, keep=keep)
        except (CheckpointError, Conflict) as error:
            self._emit("checkpoint", {"ok": False, "policy_version": version, "error": str(error)})
            raise
        if (covered := self._store.covers(keep)) is not None:
            self._swarm.batches.checkpointed(covered)
        self._emit("checkpoint", {"ok": True, "policy_version": version, "path": info.path})
        return info

    async def _record_checkpoint(self, stamp: CheckpointStamp) -> None:
        self._swarm.batches.record_checkpoint(stamp)
        await self._commits.durable()

    def refuse_diverged(self) -> None:
        """Raises `Conflict` where the present policy has diverged: nothing written of it is of use."""
        if has_diverged(self._swarm.last_step):
            raise Conflict(DIVERGED, code="policy_diverged")

    def refusal(self) -> Later:
        """What a request for an engine that is not running gets."""
        if self.state == "failed":
            return Later(f"The engine gave up: {self.reason}", code="engine_failed", status=503, retry_after=30.0)
        return Later("The engine is stopped.", code="engine_stopped", status=503, retry_after=10.0)

    # ---- the worker's life ------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Until stopped: a worker, brought up and taught; another one when it fails."""
        while not self._stopping:
            began = self._monotonic()
            try:
                await self._bring_up()
                if not self._stopping:
                    await self._train_while_alive()
            except (ConfigError, CheckpointError) as error:
                await self._give_up(error)
                return
            except Exception as error:  # The boundary of the worker's failures: recorded once, in `_recover`.
                if not await self._recover(error, lived=self._monotonic() - began):
                    return

    async def _recover(self, error: Exception, *, lived: float) -> bool:
        """After a failure `lived` seconds after the start: whether another worker is to be started, now."""
        log.warning("the worker failed: %s", error, exc_info=None if isinstance(error, WorkerDied) else error)
        self.num_hung += isinstance(error, WorkerHung)
        self._blame(error)
        if self._stopping:
            return False
        self._failures = 1 if lived > HEALTHY_SECONDS else self._failures + 1
        is_new = self.card is None and self._store.newest() is None and self._swarm.policy_version == 0
        if is_new or self._failures > MAX_FAILURES:
            await self._give_up(error if isinstance(error, AgentJetError) else WorkerDied(repr(error)))
            return False
        self._gate.hold()
        self._enter("loading", f"the worker failed and is started again: {error}")
        await self._compute.close()
        await self._sleep(0.0 if self._failures == 1 else min(30.0, 2.0 ** (self._failures - 2)))
        return True

    def _blame(self, error: Exception) -> None:
        """Count the failure against the batch being learned, and set aside the pending one when that was too often."""
        tried, self._trying = self._trying, None
        if tried is None:
            return
        self._deaths[tried] += 1
        pending = self._swarm.pending
        if pending is not None and pending.id == tried and self._deaths[tried] >= MAX_CRASHES:
            del self._deaths[tried]
            log.error("batch %d failed %d workers: set aside", tried, MAX_CRASHES)
            self._swarm.batches.quarantine(pending, str(error))

    async def _bring_up(self) -> None:
        """Start the worker and take it to where the journal stands."""
        self._store.sweep(self._swarm.batches.recorded_digest)
        await self._start_worker()
        batches = await self._load_newest()
        self._swarm.record_origin()
        for batch in batches:
            if self._stopping:
                return
            await self._learn(batch)
        if not self._stopping:
            self._timer.roll()
            self._roll()

    async def _load_newest(self) -> list[Batch]:
        """Load the newest good checkpoint, if any; returns the batches to learn from there on.

        Unusable ones are set aside. Raises `ConfigError` for one made under other settings, and for one that the
        journal ends before: it is whole, so nothing else is tried. Raises `CheckpointError` if neither a checkpoint nor
        the journal leads to the present version.
        """
        refused: list[str] = []
        for info in reversed(self._store.listing()):
            try:
                stamp = await self._load(info)
            except CheckpointError as error:
                refused.append(self._set_aside(info, error))
            else:
                self._store.loaded(info.policy_version)
                return self._resume(stamp, refused)
        batches = self._resume(None, refused)
        if refused:
            # A load that failed may have left anything behind: version 0 takes a fresh worker.
            await self._compute.close()
            await self._start_worker()
        return batches

    def _resume(self, stamp: CheckpointStamp | None, refused: list[str]) -> list[Batch]:
        try:
            return self._swarm.batches.resume(stamp)
        except CheckpointError as error:
            raise CheckpointError("; ".join([*refused, str(error), *self._unusable()])) from error

    async def _load(self, info: CheckpointInfo) -> CheckpointStamp:
        """Raises `CheckpointError` unless the checkpoint is whole, has its name's version, and is the journal's."""
        stamp = await self._compute.load(Path(info.path))
        if stamp.policy_version != info.policy_version:
            raise CheckpointError(f"checkpoint {info.path} is damaged: it has policy version {stamp.policy_version}")
        self._swarm.batches.check_checkpoint(stamp)
        if not stamp.digest:
            log.warning("checkpoint %s was written by AgentJet 0.1: it has no digests to verify", info.path)
        return stamp

    def _set_aside(self, info: CheckpointInfo, error: CheckpointError) -> str:
        """Rename an unusable checkpoint; returns what happened, in words."""
        aside = self._store.set_aside(info.policy_version)
        log.error("checkpoint set aside as %s: %s", aside, error)
        body = {"ok": False, "policy_version": info.policy_version, "error": str(error), "set_aside": str(aside)}
        self._emit("checkpoint", body)
        return f"{error} (set aside as {aside})"

    def _unusable(self) -> list[str]:
        """The unusable checkpoints of earlier starts, for the message of a refusal."""
        found = [path.name for path in self._store.unusable()]
        return [f"Unusable checkpoints in {self._store.folder}: {', '.join(found)}."] if found else []

    def check_room(self, job: JobConfig) -> None:
        """Raises `ConfigError` when its completions leave no room for a prompt, as far as the model is known."""
        if self.card is not None:
            _check_room(job, self.card)

    async def _start_worker(self) -> None:
        self.num_workers += 1
        card = await self._compute.start(dtype=self._swarm.dtype)
        for change in self._swarm.check_origin(card):
            log.warning("%s", change)
        _check_room(self._swarm.job, card)
        if self.renderer is None or card != self.card:
            self.renderer = await asyncio.to_thread(Renderer, card)
        self.card = card

    async def _train_while_alive(self) -> None:
        training = asyncio.create_task(self._train())
        death = asyncio.create_task(self._compute.died())
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

    async def _train(self) -> None:
        """Batch after batch, errands in between, until stopped."""
        swarm = self._swarm
        while True:
            await self._changed.until(
                lambda: bool(self._stopping or self._errands or swarm.pending or swarm.batches.ready())
            )
            if self._stopping:
                return
            # With stale tokens allowed, completions go on across a step: the worker learns between two of their tokens.
            if (self._errands or not swarm.job.max_staleness) and not await self._calls_are_out():
                return
            try:
                await self._run_errands()
                if not self._stopping and (swarm.pending or swarm.batches.ready()):
                    await self._step()
                    self._timer.roll()
            except Later as later:
                # The journal cannot be written now, and has said so. The batch stays where it is: learning it again
                # changes nothing.
                await self._sleep(later.retry_after)
            if not self._stopping:
                self._roll()

    async def _calls_are_out(self) -> bool:
        """Hold calls and wait until none is inside; False when the engine was stopped meanwhile."""
        self._gate.hold()
        await self._gate.drained()
        return not self._stopping

    async def _step(self) -> None:
        self._enter("learning")
        batch = self._swarm.pending or self._swarm.batches.compose()
        await self._commits.durable()
        await self._learn(batch)
        job, version = self._swarm.job, self._swarm.policy_version
        if (job.checkpoint_every and version % job.checkpoint_every == 0) or version == job.max_steps:
            await self._try_checkpoint()

    async def _learn(self, batch: Batch) -> None:
        """Learn a batch, for the first time or again; only the first time is counted."""
        replay = batch.id < self._swarm.policy_version
        with observability.batch_context(batch.id), self._tracing.step(batch.id, batch.episode_ids, replay=replay):
            await self._learn_it(batch)

    async def _learn_it(self, batch: Batch) -> None:
        self._trying = batch.id
        try:
            forest = await asyncio.to_thread(self._swarm.batches.forest, batch)
            self._timer.learn()
            metrics = await self._compute.learn(batch.id, forest, batch.job)
            if batch.id == self._swarm.policy_version:
                merged = self._swarm.batches.learned(batch, {**metrics, **self._timer.metrics(forest.num_targets)})
                await self._commits.durable()
                self._metrics.append(batch.id + 1, merged)
                if has_diverged(merged):
                    log.error(DIVERGED)
                if (found := zero_variance(self._swarm)) and found.batches == REPORTED_BATCHES:
                    log.warning("\n".join(report_lines(found)))
                self._failures = 0
        except Later:  # The journal's fault, not the batch's.
            self._trying = None
            raise
        self._trying = None

    async def _run_errands(self) -> None:
        while self._errands:
            errand, done = self._errands.popleft()
            if done.done():
                continue
            try:
                result = await errand()
            except WorkerDied:
                self._errands.appendleft((errand, done))
                raise
            except Exception as error:  # It belongs to whoever sent the errand, and is raised there.
                if not done.done():  # Its caller may have been cancelled meanwhile.
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

    async def _try_checkpoint(self) -> bool:
        """A checkpoint that may fail: the last good one stays, training goes on, the event and the log say so."""
        try:
            await self.checkpoint()
        except (CheckpointError, Conflict) as error:
            log.error("no checkpoint of policy version %d: %s", self._swarm.policy_version, error)
            return False
        return True

    async def _last_checkpoint(self) -> None:
        """At a stop. Whatever goes wrong, the journal still has every batch since the last good checkpoint."""
        if self._swarm.policy_version:
            try:
                await self._try_checkpoint()
            except (AgentJetError, OSError) as error:
                log.error("no checkpoint at the stop: %s", error)

    # ---- states -----------------------------------------------------------------------------------------------------

    def _roll(self) -> None:
        if self.state != "sampling":
            self._enter("sampling")
        self._gate.open()

    async def _give_up(self, error: AgentJetError) -> None:
        failed = f" after {self._failures} consecutive worker failures" if self._failures > MAX_FAILURES else ""
        log.error("training stopped%s: %s", failed, error)
        await self._compute.close()
        self.fatal = error
        self._enter("failed", str(error))
        self._refuse_calls()
        self._reject_errands()

    def _refuse_calls(self) -> None:
        self._gate.shut(self.refusal)

    def _reject_errands(self) -> None:
        while self._errands:
            done = self._errands.popleft()[1]
            if not done.done():
                done.set_exception(self.refusal())

    def _enter(self, state: EngineState, reason: str = "") -> None:
        states.check(self.state, state)
        self.state, self.reason, self._entered = state, reason, self._monotonic()
        self._emit("state", {"state": state, "reason": reason, "policy_version": self._swarm.policy_version})
        self._changed.notify()

    def _emit(self, kind: str, body: dict[str, Any]) -> None:
        try:
            self._swarm.store.emit(kind, body)
        except Later as later:
            log.error("event %s %s is not in the journal: %s", kind, body, later)


def _check_room(job: JobConfig, card: ModelInfo) -> None:
    if job.max_tokens >= card.context_length:
        raise ConfigError(
            f"job.max_tokens = {job.max_tokens} leaves no room for a prompt in the "
            f"{card.context_length} tokens of context of {card.name!r}: lower it"
        )
