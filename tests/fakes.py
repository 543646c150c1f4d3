"""Hand-written fakes that the tests of several packages share. No torch, no processes, no clock of their own."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.compute.embedded.checkpoint import seal, verified_state
from agentjet.compute.protocol import Capabilities, LossSpec, Outputs
from agentjet.config import OptimizerConfig, ServeConfig
from agentjet.errors import OutOfCache, WorkerDied
from agentjet.gateway import CallChunk, CallRequest, Gateway
from agentjet.protocol import BeginRequest, FinishRequest
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.support import encode_set
from agentjet.types import (
    Call,
    CheckpointStamp,
    Conversation,
    Message,
    ModelInfo,
    Op,
    PolicyId,
    Sampled,
    SamplingParams,
    TokenScore,
)
from tests.tiny import SPECIAL, make_model_info, tokenizer

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
    finished: bool = False
    """Ran to its end; one that was cancelled or died stays False."""


class ScriptedCompute:
    """A `Compute` in this process: says what its script says, and its "weights" are a hash of all it has learned.

    So two policies are equal exactly when they learned the same forests in the same order. Every log-probability is
    -0.5. What is asked for under a grammar or truncated was chosen among two tokens.
    """

    capabilities = Capabilities(support_sets=True, adapters=True, prefix_sharing=True, bit_equal_replay=True)

    def __init__(self, card: ModelInfo, script: Script, *, piece: int = 1, cache_tokens: int | None = None) -> None:
        """Completions come in pieces of `piece` tokens."""
        self.card = card
        self.script = script
        self.piece = piece
        self.cache_tokens = cache_tokens
        self.asked: list[Asked] = []
        self.learned: list[int] = []
        """Batches learned by the present worker, replays included."""
        self.starts = 0
        self.dtype = ""
        """Which the last start was told to keep."""
        self.running = False
        self.weights = ""
        self.version = 0
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
        self.die_in_learn = 0
        """So many of the next `optim_step` calls end in the worker's death, after the weights changed."""
        self.metrics: dict[str, float] = {}
        """Of every batch, besides the loss."""
        self.deadly: set[int] = set()
        """Batches that kill every worker that tries them."""
        self.num_steps = 1
        """Optimiser steps per batch."""
        self.die_in_backward = 0
        """So many of the next `forward_backward` calls end in the worker's death, after the gradient changed."""
        self.applied: list[int] = []
        """Numbers of the operations that were applied, by all workers."""
        self.gradient = ""
        self.batch_id = -1
        self.next_operation = 0
        self._operations: dict[int, tuple[str, dict[str, float]]] = {}
        self._death: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, *, dtype: str = "") -> ModelInfo:
        await self.may_start.wait()
        self.dtype = dtype
        self.starts += 1
        if self.fail_start:
            raise self.fail_start.pop(0)
        self._death = asyncio.get_running_loop().create_future()
        self._end = asyncio.get_running_loop().create_future()
        self.running, self.version, self.weights, self.learned = True, 0, "base", []
        self.gradient, self.next_operation, self._operations = "", 0, {}
        return self.card

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled]:
        asked, number = Asked(tuple(token_ids), params), len(self.asked)
        self.asked.append(asked)
        if self.cache_tokens is not None and len(token_ids) + params.max_tokens > self.cache_tokens:
            raise OutOfCache(
                f"{len(token_ids) + params.max_tokens} tokens do not fit in a cache of {self.cache_tokens}"
            )
        tokens = list(self.script(token_ids, params))
        end = next((i for i, token in enumerate(tokens) if token in self.card.end_tokens), None)
        tokens = tokens[: params.max_tokens] if end is None else tokens[: min(params.max_tokens, end + 1)]
        for i in range(0, max(1, len(tokens)), self.piece):
            await self._while_alive(self.may_sample.wait())
            if self.stuck(number, i // self.piece):
                await self._while_alive(asyncio.Event().wait())
            piece = tuple(tokens[i : i + self.piece])
            last = i + self.piece >= len(tokens)
            reason = ("stop" if tokens and tokens[-1] in self.card.end_tokens else "length") if last else None
            asked.finished = last
            yield Sampled(
                piece,
                (-0.5,) * len(piece),
                self.version,
                reason,
                _allowed(piece, params),  # type: ignore[arg-type]
            )
            await asyncio.sleep(0)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """Each token has the log-probability -1 / its position; the likeliest is token 5, with half of that."""
        scored = [TokenScore(-1 / at, ((5, -0.5 / at),)[:num_likeliest]) for at in range(1, len(token_ids))]
        await self._while_alive(asyncio.sleep(0))
        return scored

    async def forward_backward(self, op: Op, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        await self._while_alive(self.may_learn.wait())
        if self.fail_learn:
            raise self.fail_learn.pop(0)
        if batch.id in self.deadly:
            self.die("out of memory")
            raise WorkerDied("out of memory")
        body = f"{batch.id}/{loss.step}/{sorted(batch.forest.to_wire().items())}/{batch.facts}"
        if (result := self._repeated(op, body)) is not None:
            return Outputs(result, self.num_steps)
        assert batch.id == self.version, f"batch {batch.id} given to version {self.version}"
        seen = hashlib.sha256(f"{self.gradient}/{self.weights}/{body}".encode())
        self.gradient, self.batch_id = seen.hexdigest(), batch.id
        metrics = {"policy/loss": float(batch.id), "forest/tokens_computed": 0.0}
        self._applied(op, body, metrics)
        if self.die_in_backward:
            self.die_in_backward -= 1
            self.die("killed after forward_backward")
            raise WorkerDied("killed after forward_backward")
        return Outputs(metrics, self.num_steps)

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        await self._while_alive(asyncio.sleep(0))
        if (result := self._repeated(op, "optim_step")) is not None:
            return result
        self.weights = hashlib.sha256(f"{self.weights}/{self.gradient}".encode()).hexdigest()
        self.gradient = ""
        metrics = {"optim/grad_norm": 1.0, "optim/steps": 1.0, "optim/skipped_steps": 0.0, **self.metrics}
        self._applied(op, "optim_step", metrics)
        if self.die_in_learn:
            self.die_in_learn -= 1
            self.die("killed while learning")
            raise WorkerDied("killed while learning")
        return metrics

    async def logprobs(self, policy: PolicyId, batch: TrainingBatch, *, reference: bool = False) -> Outputs:
        raise AssertionError("the gateway does not ask for log-probabilities")

    async def publish(self, policy: PolicyId, version: int) -> None:
        await self._while_alive(asyncio.sleep(0))
        if version == self.version:
            return
        assert not self.gradient and version == self.version + 1, f"{version} after {self.version}"
        self.version = version
        self.learned.append(self.batch_id)

    def _repeated(self, op: Op, body: str) -> dict[str, float] | None:
        if op.number == self.next_operation:
            return None
        assert op.number < self.next_operation, f"{op.number} after {self.next_operation}"
        known, result = self._operations[op.number]
        assert known == body, f"operation {op.number} has another body"
        return result

    def _applied(self, op: Op, body: str, result: dict[str, float]) -> None:
        self._operations[op.number] = (body, result)
        self.applied.append(op.number)
        self.next_operation += 1

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        await self._while_alive(asyncio.sleep(0))
        assert not self.gradient, "saved between forward_backward and optim_step"
        if self.fail_save:
            raise self.fail_save.pop(0)
        path.mkdir()
        state = {"policy_version": self.version, "operation": self.next_operation, "weights": self.weights}
        state["dtype"] = self.card.dtype
        return CheckpointStamp(self.version, seal(path, state), self.next_operation)

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        await self._while_alive(asyncio.sleep(0))
        state = verified_state(path)
        self.version, self.weights = state["policy_version"], state["weights"]
        self.next_operation = state.get("operation", 2 * self.version)
        return CheckpointStamp(self.version, state["digest"], self.next_operation)

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        await self._while_alive(asyncio.sleep(0))
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / ("adapter.txt" if adapter else "model.txt")).write_text(self.weights)

    async def close(self) -> None:
        self._stop("stopped")

    async def died(self) -> WorkerDied:
        return await asyncio.shield(self._death)

    def die(self, why: str | WorkerDied = "killed by the test") -> None:
        """End as if the process had been killed."""
        error = why if isinstance(why, WorkerDied) else WorkerDied(why)
        self._stop(str(error))
        if not self._death.done():
            self._death.set_result(error)

    def _stop(self, why: str) -> None:
        self.running = False
        if not self._end.done():
            self._end.set_result(why)

    async def _while_alive(self, event: object) -> None:
        """Await `event`; raises `WorkerDied` when the worker ends first, or is not running."""
        if not self.running:
            event.close()  # type: ignore[attr-defined]
            raise WorkerDied("the worker is not running")
        waiting = asyncio.ensure_future(event)  # type: ignore[call-overload]
        await asyncio.wait([waiting, self._end], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise WorkerDied(self._end.result())


def _allowed(piece: tuple[int, ...], params: SamplingParams) -> tuple[bytes, ...]:
    if not params.grammar and params.top_p == 1 and not params.top_k:
        return ()
    return tuple(encode_set(np.isin(np.arange(300), [token, token + 1])) for token in piece)


def saying(reply: Callable[[str], str]) -> Script:
    """A script in words: `reply` gets the prompt's text (control tokens by name), its answer is sampled with an end
    token.

    Texts are those of `tests.tiny`'s tokenizer.
    """
    made = tokenizer()

    def script(token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        prompt = made.decode(list(token_ids), skip_special_tokens=False)
        return [*made.encode(reply(prompt), add_special_tokens=False).ids, SPECIAL.index("<|im_end|>")]

    return script


@dataclass
class Running:
    """A gateway that is up, over a scripted worker."""

    gateway: Gateway
    compute: ScriptedCompute
    clock: Clock
    stopwatch: Clock
    """Moves with the clock when the event loop stood still meanwhile."""

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something to become true; fails after five seconds."""
        async with asyncio.timeout(5):
            while not predicate():
                await asyncio.sleep(0.001)

    async def say(self, episode_id: str, text: str = "hello", *, role: str = "", **request: Any) -> Call:
        """Ask once, in a conversation of one user message, and return the recorded call."""
        conversation = Conversation((Message("user", text),))
        chunks = [chunk async for chunk in self.gateway.call(episode_id, role, CallRequest(conversation, **request))]
        assert chunks[-1].call is not None
        return chunks[-1].call

    def stream(self, episode_id: str, text: str = "hello", **request: Any) -> AsyncGenerator[CallChunk]:
        """The chunks of a streamed call."""
        conversation = Conversation((Message("user", text),))
        return self.gateway.call(episode_id, "", CallRequest(conversation, stream=True, **request))

    async def episode(
        self, reward: float, *, task: str = "t", client: str = "c", text: str = "hello", **request: Any
    ) -> str:
        """A whole training episode of one call; returns its id."""
        begun = await self.gateway.begin(BeginRequest(task_id=task, client_id=client, wait=5))
        await self.say(begun.id, text, **request)
        await self.gateway.finish(begun.id, FinishRequest(reward=reward))
        return begun.id

    async def batch(self, **request: Any) -> None:
        """Fill and learn one batch, with the rewards 0, 1, 0, 1, ... in each group; `request` goes into every call."""
        version, job = self.gateway.swarm.policy_version, self.gateway.swarm.job
        for group in range(job.batch_size):
            for member in range(job.group_size):
                await self.episode(float(member % 2), task=f"t{group}", **request)
        await self.until(
            lambda: self.gateway.swarm.policy_version == version + 1 and self.gateway.engine.state == "sampling"
        )


@asynccontextmanager
async def running(
    data_dir: Path,
    script: Script | None = None,
    *,
    job: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    call_timeout: float = 5.0,
    card: ModelInfo | None = None,
    prepare: Callable[[ScriptedCompute], None] = lambda compute: None,
    wait_ready: bool = True,
) -> AsyncIterator[Running]:
    """A gateway on `data_dir`, started and closed again. The job is two groups of two unless `job` says otherwise."""
    card = card or make_model_info(data_dir.parent / "tokenizer")
    settings = {"batch_size": 2, "group_size": 2, "max_tokens": 32, "checkpoint_every": 0, **(job or {})}
    config = ServeConfig.model_validate(
        {
            "model": {"name": card.name},
            "server": {"data_dir": data_dir, "call_timeout": call_timeout, **(server or {})},
            "job": settings,
        }
    )
    clock, stopwatch = Clock(), Clock()
    compute = ScriptedCompute(card, script or saying(lambda prompt: "hi"))
    prepare(compute)
    gateway = Gateway(config, compute, clock=clock, stopwatch=stopwatch)
    try:
        await gateway.start()
        if wait_ready:
            await gateway.ready()
        yield Running(gateway, compute, clock, stopwatch)
    finally:
        for event in (compute.may_start, compute.may_learn, compute.may_sample):
            event.set()
        await gateway.close()
