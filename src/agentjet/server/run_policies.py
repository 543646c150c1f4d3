"""`RunPolicies`: the policies of one run on the backend, with the renderers of their models. `EnginePhase`: when they
sample and when they learn. `PolicyVersions`: their scores, checkpoints and exports.

A policy may begin from a checkpoint of another run: `model.name = "RUN@VERSION"`. At its first start, the policy of the
checkpoint is written into the folder `start/` of the new run as a whole model, with its adapter merged. From then on
this folder is the model of version 0, and the other run is not needed. The optimiser begins without moments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentjet.compute.protocol import Compute, check_capabilities
from agentjet.config import JobConfig, LoraConfig, ModelConfig
from agentjet.errors import (
    AgentJetError,
    CheckpointError,
    ConfigError,
    Conflict,
    InvalidRequest,
    Later,
    NotFound,
    Unavailable,
    Unprocessable,
    WorkerDied,
    did_you_mean,
)
from agentjet.front.concurrency import Broadcast, Gate, GroupCommit
from agentjet.front.run import FrontPolicies
from agentjet.protocol import (
    CheckpointInfo,
    ClusterView,
    EvaluationRequest,
    EvaluationView,
    ProcessView,
    ScaleRequest,
    check_tag,
)
from agentjet.recipes import hooks
from agentjet.rendering import Renderer
from agentjet.server.checkpoints import CheckpointStore, combined_stamp, flush, policy_folders, remove_old_exports
from agentjet.server.monitoring import Activity, divergence, emit_event, work_text
from agentjet.swarm import Journal, SwarmState
from agentjet.types import (
    JOURNAL,
    LOADS_WEIGHTS,
    SOLE_POLICY,
    WAITS_FOR_BATCH,
    CheckpointName,
    CheckpointStamp,
    EngineState,
    ModelInfo,
    PolicyId,
    ProcessStatus,
    SamplerBounds,
    metrics_prefix,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")

FIRST_WEIGHTS = "start"
"""Folder of a run with the models of version 0 that come from checkpoints."""


@dataclass(eq=False)
class RunPolicies(FrontPolicies):
    """The policies of a run. `compute` hosts them; `threads` call hooks of plug-ins."""

    compute: Compute
    folder: Path
    threads: hooks.PlugInThreads

    def __post_init__(self) -> None:
        self.names = tuple(self.config.policies)
        self.ids = tuple(PolicyId(self.run, policy) for policy in self.config.policy_names)
        name = "" if self.names else self.config.model.name
        self.model_name = Path(name).name if name and Path(name).is_dir() else name

    def chosen(self, policy: str) -> str:
        """Returns the policy that a request names. "" is the only policy of the run. Raises `Unprocessable`."""
        known = self.config.policy_names
        if policy in known or (not policy and len(known) == 1):
            return policy or known[0]
        way_out = did_you_mean(policy, known, f"name one of the policies of this run: {', '.join(known)}.")
        raise Unprocessable(f"policy = {policy!r}: {way_out}", code="policy_not_found", param="policy")

    def by_host(self) -> list[list[str]]:
        """Returns the policies of each worker, which compute one after the other, so that it holds one gradient."""
        hosts: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in self.config.policy_names:
            hosts[self.config.host_of(name)].append(name)
        return list(hosts.values())

    def has_samplers(self, policy: PolicyId) -> bool:
        """True if the samplers of a policy outlive its learner."""
        return self.compute.capabilities(self.config.compute_of(policy.policy)).separate_samplers

    def is_of_another_run(self, error: Exception) -> bool:
        during = error.during if isinstance(error, WorkerDied) else ""
        return bool(during) and during not in map(str, self.ids)

    # ---- bringing the policies up ------------------------------------------------------------------------------------

    async def add(self, job: JobConfig, activity: Activity, check_origin: Callable[[str, ModelInfo], None]) -> None:
        """Adds each policy with the weights of version 0. `check_origin` and the job may refuse its model."""
        renderers: dict[str, Renderer] = {}
        for policy in self.ids:
            name = policy.policy
            model = self.config.model_of(name)
            host = partial(self.compute.add, worker=self.config.worker_of(name), settings=self.config.compute_of(name))
            with activity.work(f"first weights {name}", f"writing the first weights of {model.name}"):
                await self._write_first_weights(policy, model, host)
            with activity.work(f"model {name} {model.name}", f"loading the model {model.name}"):
                info = await host(policy, resolved(self.folder, model))
            check_origin(name, info)
            await self.threads.wait_for("hook", partial(check_model, job, info))
            same = [one for one in (*renderers.values(), *self.renderers.values()) if one.model == info]
            renderers[name] = same[0] if same else await asyncio.to_thread(Renderer, info)
        self.renderers = renderers

    async def _write_first_weights(self, policy: PolicyId, model: ModelConfig, host: Callable[..., Any]) -> None:
        """Writes the first weights of a policy if its model is a checkpoint and they are missing. Atomic.

        Raises `ConfigError`, and `CheckpointError` for a damaged checkpoint.
        """
        folder = whole_model(self.folder, model.name)
        if folder is None or folder.exists():
            return
        checkpoint, trained = find_source(self.folder, model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        await host(policy, trained)
        await self.compute.load(policy, checkpoint)
        await self.compute.export(policy, folder)
        await self.compute.remove(policy)

    async def remove(self, *, keep_samplers: bool = False) -> None:
        """Frees the policies. With `keep_samplers`, `add` replaces the learner of those that have samplers."""
        for policy in self.ids:
            if keep_samplers and self.has_samplers(policy):
                continue
            try:
                await self.compute.remove(policy)
            except Exception:  # The boundary: the engine's task must not end in between. `add` replaces the policy.
                log.exception("the policy %s could not be removed from its worker", policy)

    async def check_job(self, job: JobConfig) -> None:
        """Raises `ConfigError` if the job needs a missing capability or teacher, or leaves a known model no room for a
        prompt. A plug-in may compute the needs, and the tokenizer of a teacher is large: a thread checks it.
        """
        models = [renderer.model for renderer in self.renderers.values()]

        def check() -> None:
            check_capabilities(self.compute.capabilities, self.config, job)
            for model in models:
                check_model(job, model)

        await self.threads.wait_for("hook", check)

    # ---- versions ----------------------------------------------------------------------------------------------------

    async def load(self, info: CheckpointInfo) -> dict[str, CheckpointStamp]:
        """Loads all policies. Raises `CheckpointError` unless the checkpoint is intact, `ConfigError` for one of other
        policies.
        """
        folders, stamps = policy_folders(Path(info.path)), {}
        names = self.config.policy_names
        if any((folder / "state.json").exists() for name, folder in folders.items() if name not in names):
            raise ConfigError(
                f"checkpoint {info.path} has the policies {', '.join(folders)}, and the settings have "
                f"{', '.join(names)}: change [policies], or move the checkpoint away"
            )
        for policy in self.ids:
            if (folder := folders.get(policy.policy)) is None:
                raise CheckpointError(f"checkpoint {info.path} is damaged: it has no policy {policy.policy!r}")
            stamp = stamps[policy.policy] = await self.compute.load(policy, folder)
            if stamp.policy_version != info.policy_version:
                raise CheckpointError(f"checkpoint {folder} is damaged: it has policy version {stamp.policy_version}")
        return stamps

    async def save(self, path: Path) -> CheckpointStamp:
        if not self.names:
            return await self.compute.save(self.ids[0], path)
        path.mkdir(parents=True)
        stamps = {policy.policy: await self.compute.save(policy, path / policy.policy) for policy in self.ids}
        flush(path)
        return combined_stamp(stamps)

    async def publish(self, version: int, *, to_samplers: bool = True, in_turns: bool = False) -> dict[str, float]:
        """Publishes all policies at the same time; returns metrics. Samplers that adopt in turns go on sampling."""
        results = await all_of(
            self.compute.publish(policy, version, to_samplers=to_samplers, in_turns=in_turns) for policy in self.ids
        )
        return {
            f"{metrics_prefix(policy.policy, self.names)}{name}": value
            for policy, metrics in zip(self.ids, results, strict=True)
            for name, value in metrics.items()
        }

    # ---- processes ---------------------------------------------------------------------------------------------------

    def cluster(self) -> ClusterView:
        hosted = {policy.policy: self.compute.samplers(policy) for policy in self.ids}
        return ClusterView(
            processes=[
                ProcessView(policy=policy.policy, **asdict(one))
                for policy in self.ids
                for one in self.compute.processes(policy)
            ],
            samplers={policy: samplers for policy, samplers in hosted.items() if samplers is not None},
        )

    async def scale(self, request: ScaleRequest) -> ClusterView:
        """Changes the number of replicas of a policy, or its bounds. Raises `Unprocessable`."""
        policy = PolicyId(self.run, self.chosen(request.policy))
        try:
            await self.compute.scale(policy, SamplerBounds.parse(request.samplers))
        except (ConfigError, ValueError) as error:
            raise Unprocessable(str(error), code="invalid_setting", param="samplers") from None
        return self.cluster()

    def doing(self) -> str:
        """Returns a phrase about slow work of the processes, with its progress, or ''."""
        works = (one.work for policy in self.ids for one in self.compute.processes(policy))
        return next((work_text(work) for work in works if work is not None), "")

    def waiting_for(self) -> str:
        hosts = (self.compute.processes(policy) for policy in self.ids)
        return next(filter(None, map(waiting_for_process, hosts)), "")

    def common(self, fact: Literal["weights", "machine"]) -> str:
        """Returns this fact of the models, or '' before they are loaded or if policies differ in it."""
        found: set[str] = {getattr(renderer.model, fact) for renderer in self.renderers.values()}
        return found.pop() if len(found) == 1 else ""


def waiting_for_process(processes: Sequence[ProcessStatus]) -> str:
    """Returns the rank or replica without which a policy cannot learn or sample, or ''. `processes` are its own."""
    ranks = [one for one in processes if one.kind == "rank"]
    replicas = [one for one in processes if one.kind == "replica"]
    for process in ranks:
        if not process.is_ready:
            return f"{process.name}, which {process.state}"
    if not replicas and ranks:
        return "a sampler replica"
    if replicas and not any(one.is_ready for one in replicas):
        return f"a sampler replica: {replicas[0].name} {replicas[0].state}"
    if all(one.state == WAITS_FOR_BATCH for one in ranks):  # Nothing is learned; a publish may wait for one replica.
        slow = (one for one in replicas if one.version is not None and one.state == LOADS_WEIGHTS)
        return next((f"{one.name}, which {one.state}" for one in slow), "")
    return ""


def check_model(job: JobConfig, model: ModelInfo) -> None:
    if job.max_tokens >= model.context_length:
        raise ConfigError(
            f"job.max_tokens = {job.max_tokens} leaves no room for a prompt in the "
            f"{model.context_length} tokens of context of {model.name!r}: lower it"
        )
    teaching = hooks.teaching(job.recipe)
    if teaching is None or teaching.is_endpoint or teaching.sources[0] in ("policy", "reference"):
        return
    teacher = teaching.sources[0]
    folder = Path(teacher)
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"job.recipe.teacher = {teacher!r} is not the folder of a model on this machine: give "
            "one, such as `agentjet export` writes, or the URL of an endpoint: http://… or https://…"
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


# ---- the phase of the engine -----------------------------------------------------------------------------------------


class EnginePhase:
    """The state of a run's engine, the gate before its samplers, and the tasks that wait for the end of a batch.

    offline ─► loading ─► sampling ◄─► learning
                  ▲  └──────┬──────────┘ (a worker crashed: loading again)
                  │         ├─► draining ─► offline
                  └ failed ◄┘
    """

    def __init__(self, swarm: SwarmState, gate: Gate) -> None:
        self.state: EngineState = "offline"
        self.reason = ""
        """Cause of the state after a failure, or ''."""
        self.gate = gate
        self.changed = Broadcast()
        self._swarm = swarm
        self._entered = time.monotonic()
        self._tasks: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self.gate.shut(self.refusal)

    def enter(self, state: EngineState, reason: str = "") -> None:
        """Changes the state, and records an event about it."""
        if state == self.state and not reason:
            return
        self.state, self.reason, self._entered = state, reason, time.monotonic()
        body = {"state": state, "reason": reason, "policy_version": self._swarm.policy_version}
        emit_event(self._swarm, "state", body)
        self.changed.notify()

    @property
    def is_up(self) -> bool:
        return self.state in ("sampling", "learning")

    def seconds_in_state(self) -> float:
        return time.monotonic() - self._entered

    def refusal(self) -> Later:
        if self.state == "failed":
            return Unavailable(f"The engine failed: {self.reason}", code="engine_failed", retry_after=30.0)
        return Unavailable("The engine is stopped.", code="engine_stopped", retry_after=10.0)

    async def between_batches(self, task: Callable[[], Awaitable[Result]]) -> Result:
        """Returns the result of a task that needs the worker to neither sample nor learn: a checkpoint, an export.

        Raises `Conflict` unless the policies are up, `Later` if the engine is stopped before the task begins.
        """
        if not self.is_up:
            raise Conflict(
                f"The engine is {self.state}: checkpoints and exports need one that is sampling or learning.",
                code="illegal_in_state",
            )
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._tasks.append((task, done))
        self.changed.notify()
        return await done

    @property
    def has_tasks(self) -> bool:
        return bool(self._tasks)

    async def run_tasks(self) -> None:
        """Runs the tasks that wait. Raises `WorkerDied`; the submitter gets any other error."""
        while self._tasks:
            task, done = self._tasks[0]  # It stays first if it is cancelled: another worker of the run died.
            result, failure = None, None
            try:
                result = await task()
            except WorkerDied:
                raise
            except Exception as error:  # The boundary: the submitter gets it.
                failure = error
            self._tasks.popleft()
            if done.done():  # The submitter was cancelled during the task.
                continue
            if failure is not None:
                done.set_exception(failure)
            else:
                done.set_result(result)

    def close(self) -> None:
        """Refuses new and held calls, and the tasks that wait, with `refusal`."""
        self.gate.shut(self.refusal)
        while self._tasks:
            done = self._tasks.popleft()[1]
            if not done.done():
                done.set_exception(self.refusal())


async def all_of(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Returns the results of works that run at the same time. The first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- versions --------------------------------------------------------------------------------------------------------

BEST = "best"
"""Tag of the checkpoint with the best held-out score, managed by the server. See `job.keep_best`."""


@dataclass(eq=False)
class PolicyVersions:
    """Scores, checkpoints and exports of a run's policy versions.

    `checkpoint` and `refuse_diverged` need weights that do not change: call them between batches.
    """

    store: CheckpointStore
    policies: RunPolicies
    commits: GroupCommit[SwarmState]
    phase: EnginePhase
    activity: Activity
    checkpoint_error: str = ""
    """Error of the newest checkpoint, or ''."""
    _keeping: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that keep the checkpoint of the best score."""

    def __post_init__(self) -> None:
        self.swarm = self.commits.swarm

    async def record_evaluation(
        self, request: EvaluationRequest, *, idempotency_key: str | None = None
    ) -> list[EvaluationView]:
        """Stores the score of a policy version and returns all evaluations. Raises `InvalidRequest`.

        Keeps the checkpoint of that version if its held-out score is the best and `job.keep_best` is set. The answer
        does not wait for that, because it comes after the running batch.
        """
        self.swarm.record_evaluation(request, idempotency_key=idempotency_key)
        await self.commits.durable()
        found = self.swarm.queries.journal.evaluations()
        best = next((evaluation.policy_version for evaluation in found if evaluation.best), None)
        if self.swarm.job.keep_best and request.held_out and best == request.policy_version:
            keeping = asyncio.create_task(self._keep_best(best))
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)
        return found

    async def _keep_best(self, version: int) -> None:
        """Tags the checkpoint of a version, which is saved if it is the present one. A failure is only logged."""

        async def save() -> None:
            if self.swarm.policy_version == version:
                await self.checkpoint()

        try:
            with suppress(Later):  # A stop saves the present version, too.
                await self.phase.between_batches(save)
            self.store.check_exists(version)
            self.store.tags.write({**self.store.tags.read(), BEST: version})
            self.store.rotate(self.swarm.job.keep_checkpoints)
        except Exception as error:  # The boundary: no request waits for it, and the close of the run goes on.
            unknown = None if isinstance(error, AgentJetError | OSError) else error
            text = "the checkpoint of policy version %d, the best one, could not be kept: %s"
            log.error(text, version, error, exc_info=unknown)

    async def close(self) -> None:
        """Waits until the checkpoint of the best score is kept. Call it after the stop of the engine."""
        await asyncio.gather(*self._keeping)

    def checkpoints(self) -> list[CheckpointInfo]:
        """Returns the checkpoints, oldest first, with their tags and scores. Raises `CheckpointError`."""
        return self.store.scored(self.swarm.queries.journal.evaluations())

    def tag(self, name: str, policy_version: int) -> list[CheckpointInfo]:
        """Tags a checkpoint and returns all. Raises `InvalidRequest`, `NotFound`, `Conflict`, `CheckpointError`."""
        if name == BEST:
            raise _reserved("Choose another name.")
        check_tag(name)
        tags = self.store.tags.read()
        if (taken := tags.get(name, policy_version)) != policy_version:
            raise Conflict(
                f"The tag {name!r} belongs to policy version {taken}: remove it first "
                f"(agentjet checkpoints untag {name}), or choose another name.",
                code="tag_taken",
            )
        self.store.check_exists(policy_version)
        self.store.tags.write({**tags, name: policy_version})
        return self.checkpoints()

    def untag(self, name: str) -> list[CheckpointInfo]:
        """Removes a tag and returns all checkpoints. Raises `InvalidRequest`, `NotFound`, `CheckpointError`."""
        if name == BEST and self.swarm.job.keep_best:
            raise _reserved("Set job.keep_best=false first.")
        tags = self.store.tags.read()
        if name not in tags:
            known = ", ".join(sorted(tags)) or "none"
            raise NotFound(f"There is no tag {name!r}; there are: {known}.", code="tag_not_found")
        del tags[name]
        self.store.tags.write(tags)
        return self.checkpoints()

    async def save(self) -> CheckpointInfo:
        """Saves the present policy version. Raises `CheckpointError`; `Conflict` if stopped or diverged."""
        return await self.phase.between_batches(self.checkpoint)

    async def checkpoint(self) -> CheckpointInfo:
        """Saves the present policy version unless it is saved already.

        Raises `CheckpointError`, and `Conflict` if a policy has diverged: its checkpoint would displace a good one.
        """
        version, keep = self.swarm.policy_version, self.swarm.job.keep_checkpoints
        if (written := self.store.good(version)) is not None:
            return written

        async def record(stamp: CheckpointStamp) -> None:
            self.swarm.batches.record_checkpoint(stamp)
            await self.commits.durable()

        try:
            self.refuse_diverged()
            with self.activity.work("checkpoint", f"saving the checkpoint of version {version}"):
                info = await self.store.write(version, self.policies.save, record, keep=keep)
        except (CheckpointError, Conflict) as error:
            self.checkpoint_error = str(error)
            emit_event(self.swarm, "checkpoint", {"ok": False, "policy_version": version, "error": str(error)})
            raise
        self.checkpoint_error = ""
        if (covered := self.store.covers(keep)) is not None:
            self.swarm.batches.checkpointed(covered)
        emit_event(self.swarm, "checkpoint", {"ok": True, "policy_version": version, "path": info.path})
        return info

    async def try_checkpoint(self) -> None:
        """Saves a checkpoint. A failure is logged and recorded, and training continues."""
        try:
            await self.checkpoint()
        except (CheckpointError, Conflict) as error:
            log.error("no checkpoint of policy version %d: %s", self.swarm.policy_version, error)

    def refuse_diverged(self) -> None:
        """Raises `Conflict` if a policy has diverged: its weights are useless."""
        if reason := divergence(self.swarm.last_step):
            raise Conflict(reason, code="policy_diverged")

    async def export(self, *, policy: str = "", adapter: bool = False) -> CheckpointInfo:
        """Writes the present version of a policy under `exports/`, as a Hugging Face folder or its `adapter` for PEFT.

        Removes all but the newest `server.keep_exports` exports of the policy. Raises `InvalidRequest` if `policy` is
        unknown or has no adapter, `Conflict` if the run has diverged, and `CheckpointError` if the disk fails.
        """
        config, chosen = self.policies.config, self.policies.chosen(policy)
        if adapter and not config.model_of(chosen).lora.rank:
            key = f"policies.{chosen}.lora" if config.policies else "model.lora.rank"
            raise Unprocessable(
                f"adapter = true, but {key} = 0: all weights are trained, so the policy has no adapter. "
                "Export the whole model, without --adapter.",
                code="no_adapter",
                param="adapter",
            )
        folder = self.store.run_folder / "exports" / (chosen if config.policies else "")

        async def write() -> CheckpointInfo:
            self.refuse_diverged()
            version = self.swarm.policy_version
            path = folder / f"step_{version:06d}{'-adapter' if adapter else ''}"
            try:
                if not path.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    with self.activity.work("export", f"exporting version {version}"):
                        await self.policies.compute.export(PolicyId(self.policies.run, chosen), path, adapter=adapter)
                    await asyncio.to_thread(remove_old_exports, folder, config.server.keep_exports)
                return CheckpointInfo(policy_version=version, path=str(path.resolve()), created=path.stat().st_mtime)
            except OSError as error:
                raise CheckpointError(f"{path} could not be written: {error}") from error

        return await self.phase.between_batches(write)


def _reserved(way_out: str) -> InvalidRequest:
    return Unprocessable(
        f"The tag {BEST!r} is reserved: the server marks the best recorded evaluation with it (job.keep_best). "
        f"{way_out}",
        code="tag_reserved",
        param="name",
    )


# ---- first weights ---------------------------------------------------------------------------------------------------


def whole_model(run_folder: Path, name: str) -> Path | None:
    """Returns the folder with the first weights of a model in a run; None if `name` is not that of a checkpoint."""
    if CheckpointName.parse(name) is None or Path(name).is_dir():
        return None
    return run_folder / FIRST_WEIGHTS / name


def resolved(run_folder: Path, model: ModelConfig) -> ModelConfig:
    """Returns settings whose `name` is a model for backends."""
    folder = whole_model(run_folder, model.name)
    return model if folder is None else model.model_copy(update={"name": str(folder)})


def check_source(run_folder: Path, model: ModelConfig) -> None:
    """Raises `ConfigError` if the model is a checkpoint that is neither written yet nor available."""
    folder = whole_model(run_folder, model.name)
    if folder is not None and not folder.exists():
        find_source(run_folder, model)


def find_source(run_folder: Path, model: ModelConfig) -> tuple[Path, ModelConfig]:
    """Returns the checkpoint of the policy that a model names, and the model settings that it was trained with.

    Raises `ConfigError` with the existing runs, policies or versions.
    """
    wanted = CheckpointName.parse(model.name)
    assert wanted is not None
    start, runs = f"model.name = {model.name!r}", run_folder.parent
    folder = runs / wanted.run
    if folder == run_folder or not (folder / JOURNAL).is_file():
        known = sorted({path.parent.name for path in runs.glob(f"*/{JOURNAL}")} - {run_folder.name})
        raise ConfigError(
            f"{start}: this data dir has no other run {wanted.run!r}; others are {', '.join(known) or 'none'}. For a "
            "run of another data dir, export its policy (agentjet export) and give the folder as model.name"
        )
    with closing(Journal.open_read_only(folder / JOURNAL)) as journal:
        origin = journal.origin
    policies = origin.named
    policy = wanted.policy or SOLE_POLICY
    if policy not in (policies or (SOLE_POLICY,)):
        names = (
            " or ".join(f"{wanted.run}/{one}@{wanted.version}" for one in policies) or f"{wanted.run}@{wanted.version}"
        )
        raise ConfigError(f"{start}: the run {wanted.run!r} has no such policy; give {names}")
    try:
        store = CheckpointStore(folder)
        checkpoint = policy_folders(store.path(store.find(wanted.version)))[policy]
    except CheckpointError as error:
        raise ConfigError(f"{start}: {error}") from None
    own = origin.of(policy)
    lora = {key: own[f"model.lora.{key}"] for key in ("rank", "alpha", "target_modules") if f"model.lora.{key}" in own}
    settings = {"name": own["model.name"], "dtype": own["model.dtype"], "lora": LoraConfig.model_validate(lora)}
    return checkpoint, resolved(folder, model.model_copy(update=settings))
