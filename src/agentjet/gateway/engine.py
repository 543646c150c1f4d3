"""`Engine`: supervises the policies of a run. It adds them to the backend, restores them from the newest checkpoint and
runs `TrainingLoop`.

After a failure of a worker it does so again, for all policies of the run. Other runs on the worker recover separately.

    offline ─► loading ─► sampling ◄─► learning
                  ▲  └──────┬──────────┘ (a worker crashed: loading again)
                  │         ├─► draining ─► offline
                  └ failed ◄┘
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentjet.compute.protocol import check_capabilities
from agentjet.config import JobConfig
from agentjet.errors import (
    AgentJetError,
    CheckpointError,
    ComputeError,
    ConfigError,
    Conflict,
    HookHung,
    Later,
    RecipeError,
    Unavailable,
    WorkerDied,
    WorkerHung,
)
from agentjet.gateway import first_weights, observability
from agentjet.gateway.checkpoints import combined_stamp, policy_folders
from agentjet.gateway.observability import emit_event
from agentjet.gateway.training_loop import OpenRun, TrainingLoop
from agentjet.protocol import CheckpointInfo
from agentjet.recipes import hooks
from agentjet.rendering import Renderer
from agentjet.swarm import Batch
from agentjet.types import CheckpointStamp, EngineState, ModelInfo, PolicyId

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_FAILURES = 5
"""Worker failures without a learned batch or `HEALTHY_SECONDS` between them, after which training stops."""
HEALTHY_SECONDS = 60.0
STOP_GRACE_SECONDS = 10.0
"""Time that calls in progress have to end when the engine is stopped."""


class Engine:
    """The supervisor of a run's policies. One task supervises; `start` and `stop` begin and end it."""

    def __init__(self, run: OpenRun) -> None:
        self.state: EngineState = "offline"
        self.reason = ""
        """Cause of the state after a failure, or ''."""
        self.renderers: dict[str, Renderer] = {}
        """Renderers of the models by policy. Empty until all policies were up once."""
        self.num_workers = 0
        """Number of times that the policies were brought up so far: 1, and 1 for each crash of a worker."""
        self.num_hung = 0
        """Number of workers killed so far because they hung."""
        self.fatal: AgentJetError | None = None
        """The error after which no further worker was started."""
        self.training = TrainingLoop(run, enter=self._enter)
        self._run = run
        self._swarm = run.swarm
        self._store = run.store
        self._compute = run.compute
        self._sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._entered = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._failures = 0
        self._version_at_failure = 0
        self._run.gate.shut(self.refusal)

    # ---- start and stop ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Brings the policies up in the background. Does nothing if they are. Raises `Later` during a stop."""
        if self._stop_task is not None and not self._stop_task.done():
            raise Unavailable("The engine is being stopped.", code="engine_stopping", retry_after=2.0)
        if self._task is None or self._task.done():
            self.training.stopping, self.training.error = False, None
            self._failures, self.fatal = 0, None
            self._run.gate.hold()
            self._enter("loading")
            self._task = asyncio.create_task(self._supervise())

    async def wait_until_up(self) -> None:
        """Waits until the policies are up. Raises the error of an engine that failed."""
        await self._run.changed.until(lambda: self.state not in ("loading", "draining"))
        if self.fatal is not None:
            raise self.fatal

    async def stop(self) -> None:
        """Refuses calls, finishes the batch being learned, saves a checkpoint, removes the policies. Idempotent."""
        if self._stop_task is None or self._stop_task.done():
            self._stop_task = asyncio.create_task(self._stop())
        await asyncio.shield(self._stop_task)

    async def _stop(self) -> None:
        if self.state == "offline":
            return
        was_up = self.state in ("sampling", "learning")
        self.training.stopping = True
        self._run.gate.shut(self.refusal)
        if self.state != "failed":
            self._enter("draining")
        if self._task is not None:
            if not was_up:
                self._task.cancel()
            self._run.changed.notify()
            await asyncio.wait([self._task])
        try:
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                await self._run.gate.drained()
        except TimeoutError:
            log.warning("the stop cut off %d calls", self._run.gate.inside)
        if was_up and self.fatal is None and self._swarm.policy_version:
            try:
                await self.training.try_checkpoint()
            except (AgentJetError, OSError) as error:  # The journal has all batches since the last good one.
                log.error("no checkpoint at the stop: %s", error)
        await self._remove_policies()
        self.training.reject_maintenance(self.refusal)
        self._enter("offline")

    def refusal(self) -> Later:
        """Returns the refusal of a request that needs a running engine."""
        if self.state == "failed":
            return Unavailable(f"The engine failed: {self.reason}", code="engine_failed", retry_after=30.0)
        return Unavailable("The engine is stopped.", code="engine_stopped", retry_after=10.0)

    def recipe_failed(self, error: RecipeError) -> Later:
        """Stops training for a failure of the recipe in the gateway. Returns the refusal of the request.

        The request had no effect, and its client repeats it until the recipe is mended.
        """
        self.training.error = error
        self._run.changed.notify()
        return Unavailable(f"The engine failed: {error}", code="engine_failed", retry_after=30.0)

    async def between_batches(self, task: Callable[[], Awaitable[Result]]) -> Result:
        """Returns the result of a maintenance task, run while nothing is sampled or learned.

        Raises `Conflict` unless the policies are up, `Later` if the engine is stopped before the task begins.
        """
        if self.state not in ("sampling", "learning"):
            raise Conflict(
                f"The engine is {self.state}: checkpoints and exports need one that is sampling or learning.",
                code="illegal_in_state",
            )
        result: Result = await self.training.submit(task)
        return result

    def seconds_in_state(self) -> float:
        return time.monotonic() - self._entered

    def _enter(self, state: EngineState, reason: str = "") -> None:
        if state == self.state and not reason:
            return
        self.state, self.reason, self._entered = state, reason, time.monotonic()
        body = {"state": state, "reason": reason, "policy_version": self._swarm.policy_version}
        emit_event(self._swarm, "state", body)
        self._run.changed.notify()

    # ---- supervision ------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Boundary: an error that `_keep_up` does not handle fails the engine."""
        observability.run.set(self._run.name)
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
        death = asyncio.create_task(self._compute.died(self._run.policies))
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
        is_ours = not (isinstance(error, Later) or self.is_of_another_run(error))
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
        is_new = is_ours and not self.renderers and self._store.newest() is None and version == 0
        if is_new or self._failures > MAX_FAILURES:
            await self._fail(error if isinstance(error, AgentJetError) else WorkerDied(repr(error)))
            return False
        if not self._samples_in_recovery():
            self._run.gate.hold()
        self._enter("loading", f"the worker failed and is started again: {error}")
        await self._remove_policies(keep_samplers=True)
        pause = 0.0 if self._failures <= 1 else min(30.0, 2.0 ** (self._failures - 2))
        await self._sleep(error.retry_after if isinstance(error, Later) else pause)
        return True

    def is_of_another_run(self, error: Exception) -> bool:
        """True if the worker crashed during an operation on a policy of another run."""
        during = error.during if isinstance(error, WorkerDied) else ""
        return bool(during) and during not in map(str, self._run.policies)

    def _samples_in_recovery(self) -> bool:
        """True if calls continue while the policies are brought up again, because all have separate samplers."""
        can_sample = self._run.gate.is_open and all(map(self._has_samplers, self._run.policies))
        return can_sample and bool(self._swarm.job.max_staleness)

    def _has_samplers(self, policy: PolicyId) -> bool:
        """True if the samplers of a policy outlive its learner."""
        return self._compute.capabilities(self._run.config.compute_of(policy.policy)).separate_samplers

    async def _remove_policies(self, *, keep_samplers: bool = False) -> None:
        """Frees the policies. With `keep_samplers`, `add` replaces the learner of those that have samplers."""
        for policy in self._run.policies:
            if keep_samplers and self._has_samplers(policy):
                continue
            try:
                await self._compute.remove(policy)
            except Exception:  # The boundary: the engine's task must not end in between. `add` replaces the policy.
                log.exception("the policy %s could not be removed from its worker", policy)

    async def _fail(self, error: AgentJetError) -> None:
        failed = f" after {self._failures} consecutive worker failures" if self._failures > MAX_FAILURES else ""
        is_new = self.state == "loading" and self.num_workers <= 1
        log.error("%s%s: %s", "the run could not start" if is_new else "training stopped", failed, error)
        await self._remove_policies()
        self.fatal = error
        self._enter("failed", str(error))
        self._run.gate.shut(self.refusal)
        self.training.reject_maintenance(self.refusal)

    # ---- bringing the policies up -----------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Adds the policies to the backend and brings them to the policy version of the journal."""
        await self._store.sweep()
        await self.check_job(self._swarm.job)
        self.num_workers += 1
        await self._add_policies()
        batches, operations = await self._load_newest()
        self._swarm.record_origin()
        self._swarm.record_models(
            {name: one.control_tokens for name, one in self.renderers.items()},
            {name: one.context_length for name, one in self.renderers.items()},
        )
        await self.training.catch_up(batches, operations)

    async def _add_policies(self) -> None:
        """Adds each policy with the weights of version 0."""
        renderers: dict[str, Renderer] = {}
        for policy in self._run.policies:
            name = policy.policy
            config = self._run.config
            wanted, worker, settings = config.model_of(name), config.worker_of(name), config.compute_of(name)
            folder = self._store.run_folder
            activity = self._run.activity
            with activity.work(f"first weights {name}", f"writing the first weights of {wanted.name}"):
                await first_weights.write(folder, policy, wanted, self._compute, worker=worker, settings=settings)
            resolved = first_weights.resolved(folder, wanted)
            with activity.work(f"model {name} {wanted.name}", f"loading the model {wanted.name}"):
                model = await self._compute.add(policy, resolved, worker=worker, settings=settings)
            self._swarm.check_origin(name, model)
            await self._run.hooks.wait_for("hook", partial(_check_model, self._swarm.job, model))
            known = [one for one in (*renderers.values(), *self.renderers.values()) if one.model == model]
            renderers[name] = known[0] if known else await asyncio.to_thread(Renderer, model)
        self.renderers = renderers

    async def _load_newest(self) -> tuple[list[Batch], dict[str, int]]:
        """Loads the newest good checkpoint, if any. Returns the batches after it, and each policy's next operation.

        Renames unusable checkpoints and tries older ones. Raises `ConfigError` for an intact one of other settings or
        beyond the journal, `CheckpointError` if neither a checkpoint nor the journal leads to the present version.
        """
        refused: list[str] = []
        stamps: dict[str, CheckpointStamp] = {}
        for info in reversed(self._store.listing()):
            try:
                with self._run.activity.work("load", f"loading the checkpoint of version {info.policy_version}"):
                    stamps = await self._load(info)
                self._store.loaded(info.policy_version)
                break
            except CheckpointError as error:
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
        return batches, {name: stamps[name].operation if stamps else 0 for name in self._run.config.policy_names}

    async def _load(self, info: CheckpointInfo) -> dict[str, CheckpointStamp]:
        """Loads all policies. Raises `CheckpointError` unless the checkpoint is intact and the journal's."""
        folders, stamps = policy_folders(Path(info.path)), {}
        names = self._run.config.policy_names
        if any((folder / "state.json").exists() for name, folder in folders.items() if name not in names):
            raise ConfigError(
                f"checkpoint {info.path} has the policies {', '.join(folders)}, and the settings have "
                f"{', '.join(names)}: change [policies], or move the checkpoint away"
            )
        for policy in self._run.policies:
            if (folder := folders.get(policy.policy)) is None:
                raise CheckpointError(f"checkpoint {info.path} is damaged: it has no policy {policy.policy!r}")
            stamp = stamps[policy.policy] = await self._compute.load(policy, folder)
            if stamp.policy_version != info.policy_version:
                raise CheckpointError(f"checkpoint {folder} is damaged: it has policy version {stamp.policy_version}")
        self._swarm.batches.check_checkpoint(combined_stamp(stamps))
        return stamps

    def _quarantine(self, info: CheckpointInfo, error: CheckpointError) -> str:
        """Renames an unusable checkpoint. Returns a sentence about it."""
        renamed = self._store.quarantine(info.policy_version)
        log.error("unusable checkpoint, renamed to %s: %s", renamed, error)
        body = {"ok": False, "policy_version": info.policy_version, "error": str(error), "set_aside": str(renamed)}
        emit_event(self._swarm, "checkpoint", body)
        return f"{error} (renamed to {renamed})"

    async def check_job(self, job: JobConfig) -> None:
        """Raises `ConfigError` if the job needs a missing capability or teacher, or leaves a known model no room for a
        prompt. A plug-in may compute the needs, and the tokenizer of a teacher is large: a thread checks it.
        """
        models = [renderer.model for renderer in self.renderers.values()]

        def check() -> None:
            check_capabilities(self._compute.capabilities, self._run.config, job)
            for model in models:
                _check_model(job, model)

        await self._run.hooks.wait_for("hook", check)


def _check_model(job: JobConfig, model: ModelInfo) -> None:
    if job.max_tokens >= model.context_length:
        raise ConfigError(
            f"job.max_tokens = {job.max_tokens} leaves no room for a prompt in the "
            f"{model.context_length} tokens of context of {model.name!r}: lower it"
        )
    if "teacher" not in hooks.declared(job.recipe, "needs"):
        return
    teacher = hooks.declared(job.recipe, "teacher_folder")
    folder = Path(teacher)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"job.recipe.teacher = {teacher!r} is not the folder of a model on this machine: give "
            "one, such as `agentjet export` writes"
        )
    if _token_ids(folder) != _token_ids(Path(model.tokenizer_path)):
        raise ConfigError(
            f"job.recipe.teacher = {teacher!r} has another tokenizer than {model.name!r}, so it "
            "cannot grade its tokens: use a teacher with the same tokenizer"
        )


def _token_ids(folder: Path) -> Any:
    """Returns the tokens of a tokenizer with their ids. Raises `ConfigError` without a readable `tokenizer.json`."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        return tokenizer["model"]["vocab"], [(token["id"], token["content"]) for token in tokenizer["added_tokens"]]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is missing or damaged ({type(error).__name__}: {error}), and job.recipe.teacher needs the same "
            "tokenizer as the policy: give both folders their tokenizer.json"
        ) from error
