"""The gateway's half of the embedded backend: starts the worker process and sends it requests. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.compute.embedded.worker_process import Frame, Watchdog, activity_of, encode_frame, read_frame_async
from agentjet.compute.protocol import Capabilities, LossSpec, Outputs
from agentjet.config import OptimizerConfig, ServeConfig
from agentjet.errors import (
    CheckpointError,
    ComputeError,
    ConfigError,
    GrammarError,
    OperationConflict,
    OutOfCache,
    WorkerDied,
    WorkerHung,
)
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.support import unpack_sets
from agentjet.types import CheckpointStamp, ModelInfo, Op, PolicyId, Sampled, SamplingParams, TokenScore

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (CheckpointError, ComputeError, ConfigError, GrammarError, OperationConflict, OutOfCache)
}
CLOSE_SECONDS = 10.0
THREAD_WAIT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The worker's threads sleep while they wait for each other.

OpenMP's default spins for 7 ms. That makes everything several times slower if agents or a second worker need the cores.
`{"GOMP_SPINCOUNT": "1000"}` would spin for 25 us, then sleep. `python -m bench.step --waiting` compares settings.
"""
THREAD_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""If the user sets one of these variables, `THREAD_WAIT` is not applied."""
WORKER_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS is deterministic only with a workspace of fixed size. Without effect on a CPU."""


def worker_environment() -> dict[str, str]:
    """Returns the environment of the worker process. The user's own variables take precedence."""
    is_chosen = any(name in os.environ for name in THREAD_WAIT_VARIABLES)
    return {**({} if is_chosen else THREAD_WAIT), **WORKER_VARIABLES, **os.environ}


class EmbeddedCompute:
    """Implements `Compute` with one worker process. `start` may be called again after the worker died."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._log_path = config.server.data_dir / "logs" / "worker.log"
        self._ids = itertools.count(1)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, asyncio.Queue[Sampled | Exception]] = {}
        """Queues of the unfinished completions, by request id."""
        self._died: asyncio.Future[WorkerDied] | None = None
        self._watchdog = Watchdog(config.server.worker_timeout)
        self._watch_task: asyncio.Task[None] | None = None
        self._hung = False
        self._closing = False

    @property
    def capabilities(self) -> Capabilities:
        """See `Compute.capabilities`."""
        return Capabilities(support_sets=True, adapters=True, prefix_sharing=True, bit_equal_replay=True)

    @property
    def pid(self) -> int | None:
        """The worker's process id while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, *, dtype: str = "") -> ModelInfo:
        """See `Compute.start`."""
        await self._reap()
        self._closing = self._hung = False
        self._died = asyncio.get_running_loop().create_future()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path.touch(0o600)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "agentjet.compute.embedded"),  # Nothing from the current folder.
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=worker_environment(),
            )
        self._reader = asyncio.create_task(self._read_frames(self._process))
        self._watch_task = asyncio.create_task(self._watch(self._process))
        info = await self._ask("start", config=self._config.model_dump(mode="json"), dtype=dtype)
        info["end_tokens"] = tuple(info["end_tokens"])
        return ModelInfo(**info)

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        """See `Sampler.sample`."""
        id = next(self._ids)
        queue: asyncio.Queue[Sampled | Exception] = asyncio.Queue()
        self._streams[id] = queue
        try:
            self._send(
                {
                    "op": "sample",
                    "id": id,
                    "policy": dataclasses.asdict(policy),
                    "tokens": np.asarray(token_ids, np.int32).tobytes(),
                    "params": dataclasses.asdict(params),
                }
            )
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(id, None) is not None and self.pid is not None:
                with contextlib.suppress(WorkerDied):
                    self._send({"op": "cancel", "id": id})

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """See `Sampler.score`."""
        tokens = np.asarray(token_ids, np.int32).tobytes()
        scores = await self._ask("score", policy=dataclasses.asdict(policy), tokens=tokens, num_likeliest=num_likeliest)
        return [TokenScore(logprob, tuple((id, value) for id, value in likeliest)) for logprob, likeliest in scores]

    async def forward_backward(self, op: Op, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """See `Learner.forward_backward`."""
        found = await self._ask(
            "forward_backward", operation=dataclasses.asdict(op), batch=batch.to_wire(), loss=loss.to_wire()
        )
        return Outputs(**found)

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        """See `Learner.optim_step`."""
        metrics: dict[str, float] = await self._ask(
            "optim_step", operation=dataclasses.asdict(op), optimizer=optimizer.model_dump(mode="json")
        )
        return metrics

    async def logprobs(self, policy: PolicyId, batch: TrainingBatch, *, reference: bool = False) -> Outputs:
        """See `Learner.logprobs`."""
        found = await self._ask(
            "logprobs", policy=dataclasses.asdict(policy), batch=batch.to_wire(), reference=reference
        )
        return Outputs(columns={"logprob": np.frombuffer(found, np.float32)})

    async def publish(self, policy: PolicyId, version: int) -> None:
        """See `Learner.publish`."""
        await self._ask("publish", policy=dataclasses.asdict(policy), version=version)

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """See `Learner.save`."""
        return CheckpointStamp(**await self._ask("save", policy=dataclasses.asdict(policy), path=str(path)))

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """See `Learner.load`."""
        return CheckpointStamp(**await self._ask("load", policy=dataclasses.asdict(policy), path=str(path)))

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        """See `Learner.export`."""
        await self._ask("export", policy=dataclasses.asdict(policy), path=str(path), adapter=adapter)

    async def died(self) -> WorkerDied:
        """See `Compute.died`."""
        if self._died is None:
            raise ComputeError("the worker was not started")
        return await asyncio.shield(self._died)

    async def close(self) -> None:
        """See `Compute.close`. The worker is killed only if it does not end in time."""
        self._closing = True
        if self.pid is not None:
            with contextlib.suppress(WorkerDied):
                self._send({"op": "close", "id": 0})
        await self._reap()

    async def _reap(self) -> None:
        """Wait for the process to end; kill it after `CLOSE_SECONDS`."""
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait([self._watch_task])
        self._process = None

    async def _ask(self, op: str, **arguments: Any) -> Any:
        id = next(self._ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies[id] = reply
        try:
            self._send({"op": op, "id": id, **arguments})
            return await reply
        finally:
            self._replies.pop(id, None)

    def _send(self, frame: Frame) -> None:
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            raise WorkerDied("the worker process is not running")
        process.stdin.write(encode_frame(frame))

    async def _read_frames(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while (frame := await read_frame_async(process.stdout)) is not None:
            self._watchdog.reset()
            self._dispatch(frame)
        code = await process.wait()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._end(code))
        for queue in self._streams.values():
            queue.put_nowait(self._end(code))
        self._streams.clear()
        if self._died is not None and not self._died.done() and not self._closing:
            self._died.set_result(self._end(code))

    def _end(self, code: int) -> WorkerDied:
        if self._hung:
            return WorkerHung(
                f"the worker process did no work for {self._config.server.worker_timeout:g} s "
                f"(server.worker_timeout) and was killed; see {self._log_path}"
            )
        return WorkerDied(f"the worker process ended with exit code {code}; see {self._log_path}")

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the worker if it hangs."""
        now = asyncio.get_running_loop().time
        self._watchdog.reset()
        while process.returncode is None:
            checked = now()
            await asyncio.sleep(self._watchdog.interval)
            has_work = bool(self._replies or self._streams)
            if self._watchdog.hangs(now() - checked, lambda: activity_of(process.pid), has_work=has_work):
                self._hung = True
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return

    def _dispatch(self, frame: Frame) -> None:
        if "tokens" in frame:
            version = frame["version"]
            for id, tokens, logprobs, packed, reason in frame["tokens"]:
                queue = self._streams.get(id) if reason is None else self._streams.pop(id, None)
                if queue is not None:
                    support = unpack_sets(packed, len(tokens)) if packed else ()
                    queue.put_nowait(Sampled(tuple(tokens), tuple(logprobs), version, reason, support))
            return
        id = frame["id"]
        error = _ERRORS.get(frame["error"], ComputeError)(frame["message"]) if "error" in frame else None
        if error is not None and (queue := self._streams.pop(id, None)) is not None:
            queue.put_nowait(error)
        elif (reply := self._replies.get(id)) is not None and not reply.done():
            if error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(frame["ok"])
