"""Hand-written fakes that the tests of several packages share. No torch, no processes, no clock of their own."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agentjet.compute.checkpoint import seal, verified_state
from agentjet.compute.protocol import EMBEDDED, FINGERPRINT, Capabilities, LossSpec, Outputs, body_digest
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import ConfigError, OutOfCache, PolicyRemoved, WorkerDied
from agentjet.front.calls import CallChunk, CallRequest
from agentjet.protocol import BeginRequest, CallView, EpisodeQuery, EpisodeTree, FinishRequest, JobBody
from agentjet.server.gateway import Gateway
from agentjet.server.read import job_of
from agentjet.server.runs import Runs
from agentjet.swarm import EpisodeRecord, SwarmState
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import encode_set
from agentjet.types import (
    Call,
    CheckpointStamp,
    Conversation,
    EpisodeFilter,
    Message,
    ModelInfo,
    Op,
    OperationKind,
    PolicyId,
    ProcessStatus,
    Sampled,
    SamplerBounds,
    SamplersStatus,
    SamplingParams,
    TokenScore,
)
from tests.tiny import dialect, make_model_info, tokenizer

if TYPE_CHECKING:
    from agentjet.server.fronts import Fronts

RUN = Path("runs/default")
"""Folder of the default run in a data dir."""
Script = Callable[[Sequence[int], SamplingParams], Sequence[int]]
"""Prompt tokens and parameters to the completion's tokens; an end token in it ends the completion."""


class Clock:
    """Time that passes when told to."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Asked:
    """A `sample` the fake was asked for."""

    prompt: tuple[int, ...]
    params: SamplingParams
    policy: PolicyId
    finished: bool = False
    """Ran to its end; one that was cancelled or died stays False."""


class ScriptedPolicy:
    """A policy of `ScriptedCompute`. Its "weights" are a hash of all it has learned.

    So two policies are equal exactly when they learned the same forests in the same order.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.weights = "base"
        self.version = 0
        self.learned: list[int] = []
        """Batches learned since it was added, replays included."""
        self.gradient = ""
        self.batch_id = -1
        self.batch: TrainingBatch | None = None
        """The loaded batch."""
        self.next_operation = 0
        self.published = asyncio.Event()
        """Clear from an `optim_step` to the next `publish`: nothing is sampled."""
        self.published.set()
        self.end: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        """Done when it was removed, or its worker ended."""
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self._operations: dict[int, tuple[str, dict[str, float]]] = {}

    def stop(self, error: WorkerDied, *, expected: bool = True) -> None:
        if not self.end.done():
            self.end.set_result(error)
            if not expected:
                self.died.set_result(error)

    async def while_alive(self, event: Awaitable[Any]) -> None:
        """Await `event`; raises `WorkerDied` when the policy ends first, or has ended."""
        waiting = asyncio.ensure_future(event)
        await asyncio.wait([waiting, self.end], return_when=asyncio.FIRST_COMPLETED)
        if self.end.done():
            waiting.cancel()
            raise self.end.result()

    def repeated(self, op: Op, body: str) -> dict[str, float] | None:
        if op.number == self.next_operation:
            return None
        assert op.number < self.next_operation, f"{op.number} after {self.next_operation}"
        known, result = self._operations[op.number]
        assert known == body, f"operation {op.number} has another body"
        return result

    def apply(self, op: Op, body: str, result: dict[str, float]) -> None:
        self._operations[op.number] = (body, result)
        self.next_operation += 1


class ScriptedCompute:
    """A `Compute` in this process: says what its script says.

    Every log-probability is -0.5. What is asked for under a grammar or truncated was chosen among two tokens.
    """

    declared = Capabilities()

    def __init__(self, card: ModelInfo, script: Script, *, piece: int = 1, cache_tokens: int | None = None) -> None:
        """Completions come in pieces of `piece` tokens."""
        self.card = card
        self.script = script
        self.piece = piece
        self.cache_tokens = cache_tokens
        self.policies: dict[PolicyId, ScriptedPolicy] = {}
        """The newest of each name, also after its end."""
        self.workers: dict[str, set[PolicyId]] = {}
        """The policies of the workers that run."""
        self.asked: list[Asked] = []
        self.starts = 0
        """Workers that were started, or were to be."""
        self.may_sample = asyncio.Event()
        """Clear it, and samples stop before their next piece."""
        self.stuck: Callable[[int, int], bool] = lambda request, piece: False
        """Which request (as `asked` counts them) stops before which piece for good: a test that watches from across a
        socket cannot time `may_sample`.
        """
        self.may_sample.set()
        self.may_learn = asyncio.Event()
        """Clear it, and `forward_backward` takes until it is set."""
        self.may_learn.set()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.fail_start: list[Exception] = []
        """Raised by the next starts, one each."""
        self.fail_learn: list[Exception] = []
        self.fail_save: list[Exception] = []
        self.fail_remove: list[Exception] = []
        self.die_after: list[str] = []
        """Operations, as `KIND POLICY` in order: the worker dies after it applied one of them."""
        self.metrics: dict[str, float] = {}
        """Of every batch, besides the loss."""
        self.noise = ""
        """Changes the fingerprints of the weights, as unseeded randomness would."""
        self.deadly: set[tuple[str, int]] = set()
        """Runs and batches that kill every worker that tries them."""
        self.bounds = SamplerBounds(1, 1)
        """Replicas of each policy, as `scale` asked for."""
        self.num_steps = 1
        """Optimiser steps per batch."""
        self.loaded: list[TrainingBatch] = []
        """Batches that were sent, in order."""
        self.begun: list[int] = []
        """Batches whose gradient was asked for, by all workers."""
        self.applied: list[int] = []
        """Numbers of the operations that were applied, by all workers."""

    @property
    def sole(self) -> ScriptedPolicy:
        """The policy of a default run without named policies."""
        return self.policies[PolicyId()]

    @property
    def weights(self) -> str:
        return self.sole.weights

    @property
    def version(self) -> int:
        return self.sole.version

    @property
    def learned(self) -> list[int]:
        return self.sole.learned

    @property
    def running(self) -> bool:
        return bool(self.workers)

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        return self.declared

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        await self.may_start.wait()
        await self.remove(policy)
        if worker not in self.workers:
            self.starts += 1
            if self.fail_start:
                raise self.fail_start.pop(0)
        self.workers.setdefault(worker, set()).add(policy)
        self.policies[policy] = ScriptedPolicy(worker)
        return self.card

    async def remove(self, policy: PolicyId) -> None:
        if self.fail_remove:
            raise self.fail_remove.pop(0)
        known = self.policies.get(policy)
        if known is None or known.end.done():
            return
        known.stop(PolicyRemoved(f"policy {policy} was removed"))
        members = self.workers[known.worker]
        members.remove(policy)
        if not members:
            del self.workers[known.worker]

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        deaths = [self.policies[policy].died for policy in policies]
        done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        return next(death.result() for death in deaths if death in done)

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        return [ProcessStatus(f"replica-{i}", "replica", "sampling", "here", 0) for i in range(self.bounds.least)]

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        return SamplersStatus(self.bounds, self.bounds.least, running=5, waiting=2)

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        if bounds.least > 8:
            raise ConfigError(f"samplers = {bounds}: the cluster has 8 GPUs")
        self.bounds = bounds

    async def close(self) -> None:
        for policy in self.policies:
            await self.remove(policy)

    def die(self, why: str | WorkerDied = "killed by the test", *, worker: str = "") -> None:
        """End as if the process had been killed."""
        error = why if isinstance(why, WorkerDied) else WorkerDied(why)
        for policy in self.workers.pop(worker, ()):
            self.policies[policy].stop(error, expected=False)

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        asked, number = Asked(tuple(token_ids), params, policy), len(self.asked)
        self.asked.append(asked)
        if self.cache_tokens is not None and len(token_ids) + params.max_tokens > self.cache_tokens:
            raise OutOfCache(
                f"{len(token_ids) + params.max_tokens} tokens do not fit in a cache of {self.cache_tokens}"
            )
        known = self.policies[policy]
        tokens = list(self.script(token_ids, params))
        end = next((i for i, token in enumerate(tokens) if token in self.card.end_tokens), None)
        tokens = tokens[: params.max_tokens] if end is None else tokens[: min(params.max_tokens, end + 1)]
        for i in range(0, max(1, len(tokens)), self.piece):
            await known.while_alive(self.may_sample.wait())
            await known.while_alive(known.published.wait())
            if self.stuck(number, i // self.piece):
                await known.while_alive(asyncio.Event().wait())
            piece = tuple(tokens[i : i + self.piece])
            last = i + self.piece >= len(tokens)
            reason = ("stop" if tokens and tokens[-1] in self.card.end_tokens else "length") if last else None
            asked.finished = last
            yield Sampled(
                piece,
                (-0.5,) * len(piece),
                known.version,
                reason,
                _allowed(piece, params),  # type: ignore[arg-type]
            )
            await asyncio.sleep(0)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """Each token has the log-probability -1 / its position; the likeliest is token 5, with half of that."""
        scored = [TokenScore(-1 / at, ((5, -0.5 / at),)[:num_likeliest]) for at in range(1, len(token_ids))]
        await self._alive(policy)
        return scored

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        known = await self._alive(policy)
        known.batch = batch
        self.loaded.append(batch)

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        known = self.policies[op.policy_id]
        batch = known.batch
        assert batch is not None and batch.id == batch_id, "a batch is loaded before its operations"
        self.begun.append(batch.id)
        await known.while_alive(self.may_learn.wait())
        if self.fail_learn:
            raise self.fail_learn.pop(0)
        if (op.run, batch.id) in self.deadly:
            raise self._killed("out of memory", op)
        body = f"{batch.id}/{loss.step}/{body_digest(_without_routes(batch))}"
        if (result := known.repeated(op, body)) is not None:
            return Outputs(result, self.num_steps)
        assert batch.id == known.version, f"batch {batch.id} given to version {known.version}"
        seen = hashlib.sha256(f"{known.gradient}/{known.weights}/{body}".encode())
        known.gradient, known.batch_id = seen.hexdigest(), batch.id
        metrics = {"policy/loss": float(batch.id), "forest/tokens_computed": 0.0}
        self._apply("forward_backward", op, body, metrics)
        return Outputs(metrics, self.num_steps)

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        known = await self._alive(op.policy_id)
        body = f"optim_step/{optimizer.lr}"
        if (result := known.repeated(op, body)) is not None:
            return result
        known.published.clear()
        known.weights = hashlib.sha256(f"{known.weights}/{known.gradient}/{body}".encode()).hexdigest()
        known.gradient = ""
        found = int(hashlib.sha256(f"{known.weights}/{self.noise}".encode()).hexdigest(), 16) % 2**52
        metrics = {"optim/grad_norm": 1.0, "optim/steps": 1.0, "optim/skipped_steps": 0.0, FINGERPRINT: float(found)}
        metrics |= self.metrics
        self._apply("optim_step", op, body, metrics)
        return metrics

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        known = await self._alive(policy)
        known.published.set()
        if version == known.version:
            return {}
        assert not known.gradient and version == known.version + 1, f"{version} after {known.version}"
        known.version = version
        known.learned.append(known.batch_id)
        return {}

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        known = await self._alive(policy)
        assert not known.gradient, "saved between forward_backward and optim_step"
        if self.fail_save:
            raise self.fail_save.pop(0)
        path.mkdir()
        state = {"policy_version": known.version, "operation": known.next_operation, "weights": known.weights}
        state["dtype"] = self.card.dtype
        return CheckpointStamp(known.version, seal(path, state), known.next_operation)

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        known = await self._alive(policy)
        state = verified_state(path)
        known.version, known.weights = state["policy_version"], state["weights"]
        known.published.set()
        known.next_operation = state.get("operation", 2 * known.version)
        return CheckpointStamp(known.version, state["digest"], known.next_operation)

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        known = await self._alive(policy)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / ("adapter.txt" if adapter else "model.txt")).write_text(known.weights)

    async def _alive(self, policy: PolicyId) -> ScriptedPolicy:
        known = self.policies[policy]
        await known.while_alive(asyncio.sleep(0))
        return known

    def _apply(self, kind: OperationKind, op: Op, body: str, result: dict[str, float]) -> None:
        self.policies[op.policy_id].apply(op, body, result)
        self.applied.append(op.number)
        if self.die_after[:1] == [f"{kind} {op.policy}"]:
            raise self._killed(f"killed after {self.die_after.pop(0)}", op)

    def _killed(self, why: str, op: Op) -> WorkerDied:
        error = WorkerDied(why, during=str(op.policy_id))
        self.die(error, worker=self.policies[op.policy_id].worker)
        return error


def _allowed(piece: tuple[int, ...], params: SamplingParams) -> tuple[bytes, ...]:
    if not params.grammar and params.top_p == 1 and not params.top_k:
        return ()
    return tuple(encode_set(np.isin(np.arange(300), [token, token + 1])) for token in piece)


def saying(reply: Callable[[str], str], template: str = "chatml") -> Script:
    """A script in words: `reply` gets the prompt's text (control tokens by name), its answer is sampled with an end
    token.

    Texts are those of `tests.tiny`'s tokenizer of a template.
    """
    made = tokenizer(template)
    end = made.token_to_id(dialect(template).ends[0])

    def script(token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        prompt = made.decode(list(token_ids), skip_special_tokens=False)
        return [*made.encode(reply(prompt), add_special_tokens=False).ids, end]

    return script


@dataclass
class Running:
    """The runs of a server that is up, over a scripted backend; and helpers for one of them."""

    runs: Runs
    gateway: Gateway
    compute: ScriptedCompute
    clock: Clock
    stopwatch: Clock
    """Moves with the clock when the event loop stood still meanwhile."""

    def of_run(self, name: str) -> Running:
        """The same for another run."""
        return replace(self, gateway=self.runs.get(name))

    @property
    def folder(self) -> Path:
        return self.gateway.folder

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something to become true; fails after half a minute: machines may be busy."""
        async with asyncio.timeout(30):
            while not predicate():
                await asyncio.sleep(0.001)

    async def say(self, episode_id: str, text: str = "hello", *, role: str = "", **request: Any) -> Call:
        """Ask once, in a conversation of one user message, and return the recorded call."""
        conversation = Conversation((Message("user", text),))
        asked = CallRequest(conversation, **request)
        chunks = [chunk async for chunk in self.gateway.calls.answer(episode_id, role, asked)]
        assert chunks[-1].call is not None
        return chunks[-1].call

    def stream(self, episode_id: str, text: str = "hello", **request: Any) -> AsyncGenerator[CallChunk]:
        """The chunks of a streamed call."""
        conversation = Conversation((Message("user", text),))
        return self.gateway.calls.answer(episode_id, "", CallRequest(conversation, stream=True, **request))

    async def episode(
        self,
        reward: float,
        *,
        task: str = "t",
        client: str = "c",
        text: str = "hello",
        metrics: Mapping[str, float] | None = None,
        **request: Any,
    ) -> str:
        """A whole training episode with one call of each policy; returns its id."""
        begun = await self.gateway.begin(BeginRequest(task_id=task, client_id=client, wait=5))
        for role in self.gateway.hosted.names or ("",):
            await self.say(begun.id, text, role=role, **request)
        await self.gateway.finish(begun.id, FinishRequest(reward=reward, metrics=dict(metrics or {})))
        return begun.id

    async def batch(self, **request: Any) -> None:
        """Fill and learn one batch, with the rewards 0, 1, 0, 1, ... in each group; `request` goes into every call."""
        version = self.gateway.swarm.policy_version
        await self.fill_batch(**request)
        await self.until(
            lambda: self.gateway.swarm.policy_version == version + 1 and self.gateway.phase.state == "sampling"
        )

    async def fill_batch(self, **request: Any) -> list[str]:
        """Finish the episodes of one batch, as in `batch`; returns their ids."""
        job = self.gateway.swarm.job
        places = [(group, member) for group in range(job.batch_size) for member in range(job.group_size)]
        return [await self.episode(float(member % 2), task=f"t{group}", **request) for group, member in places]


@asynccontextmanager
async def running(
    data_dir: Path,
    script: Script | None = None,
    *,
    job: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    policies: dict[str, Any] | None = None,
    call_timeout: float = 5.0,
    card: ModelInfo | None = None,
    prepare: Callable[[ScriptedCompute], None] = lambda compute: None,
    wait_ready: bool = True,
    now: float = 1_000_000.0,
    make_fronts: Callable[[ServeConfig, ScriptedCompute, Clock], Fronts] | None = None,
) -> AsyncIterator[Running]:
    """Runs on `data_dir`, started at the time `now` and closed again. The job is two groups of two unless `job` says
    otherwise.
    """
    card = card or make_model_info(data_dir.parent / "tokenizer")
    settings = {"batch_size": 2, "group_size": 2, "max_tokens": 32, "checkpoint_every": 0, **(job or {})}
    config = ServeConfig.model_validate(
        {
            "model": {"name": card.name},
            "server": {"data_dir": data_dir, "call_timeout": call_timeout, **(server or {})},
            "policies": policies or {},
            "job": settings,
        }
    )
    clock, stopwatch = Clock(now), Clock()
    compute = ScriptedCompute(card, script or saying(lambda prompt: "hi"))
    prepare(compute)
    fronts = None if make_fronts is None else make_fronts(config, compute, clock)
    runs = Runs(config, compute, clock=clock, stopwatch=stopwatch, fronts=fronts)
    runs.default.engine._sleep = lambda seconds: asyncio.sleep(0)  # Pauses after repeated crashes.
    try:
        await runs.start()
        if wait_ready:
            await runs.default.engine.wait_until_up()
        yield Running(runs, runs.default, compute, clock, stopwatch)
    finally:
        for event in (compute.may_start, compute.may_learn, compute.may_sample):
            event.set()
        await runs.close()


def recent_episodes(swarm: SwarmState, limit: int, *, status: EpisodeFilter | None = None) -> Sequence[EpisodeRecord]:
    """Returns the newest episodes, or those of a status, newest first."""
    return swarm.journal.find_episodes(EpisodeQuery(limit=limit, status=status)).episodes


def job_body(gateway: Gateway) -> JobBody:
    """Returns the settings of a run's job, as `GET /job` answers."""
    return job_of(gateway.swarm.queries)


def call_view(call_id: str, **fields: Any) -> CallView:
    """Returns a call without messages and tokens, but for the given fields."""
    absent = dict.fromkeys(("parent", "after", "retry_of"))
    empty = {name: [] for name in ("messages", "tools", "tokens", "texts", "mask", "logprobs", "versions")}
    facts = {"call_id": call_id, "role": "", "kept": 0, "fork": "", "orphan": "", "response": {}, "temperature": 1.0}
    return CallView.model_validate({**absent, **empty, **facts, "finish_reason": "stop", "created": 0.0, **fields})


def episode_tree(*calls: CallView, **fields: Any) -> EpisodeTree:
    """Returns a finished training episode with these calls."""
    facts = {"episode_id": "e", "status": "finished", "mode": "train", "task_id": "t", "task_set": "", "group": "g"}
    ran = {"client_id": "c", "policy_version": 0, "num_calls": len(calls), "calls": calls}
    return EpisodeTree.model_validate({**facts, **ran, **fields})


def _without_routes(batch: TrainingBatch) -> list[Any]:
    """Returns the fields of a batch as they were digested when the journals of `tests/locks` were recorded."""
    forest = [getattr(batch.forest, field.name) for field in fields(batch.forest) if "route" not in field.name]
    return [forest if field.name == "forest" else getattr(batch, field.name) for field in fields(batch)]
