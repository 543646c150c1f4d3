"""The gateway's half of the embedded backend: which worker has which policy. No torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from agentjet.compute.embedded.worker_process import WorkerProcess
from agentjet.compute.protocol import Capabilities, LossSpec, Outputs
from agentjet.config import ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, PolicyRemoved, WorkerDied
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, ModelInfo, Op, PolicyId, Sampled, SamplingParams, TokenScore


class EmbeddedCompute:
    """Implements `Compute` with worker processes by name. A policy keeps its process until `add` or `remove`."""

    capabilities = Capabilities(support_sets=True, adapters=True)

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._workers: dict[str, WorkerProcess] = {}
        """The processes that new policies get, by worker name."""
        self._hosts: dict[PolicyId, WorkerProcess] = {}
        """The process that each policy was added to. It may have died."""

    def pid(self, policy: PolicyId) -> int | None:
        """Returns the process id of a policy's worker while it runs."""
        return self._hosts[policy].pid if policy in self._hosts else None

    async def add(self, policy: PolicyId, model: ModelConfig, *, worker: str = "") -> ModelInfo:
        process = self._workers.get(worker)
        if process is None or process.has_ended:
            log_path = self._config.server.data_dir / "logs" / (f"worker-{worker}.log" if worker else "worker.log")
            process = self._workers[worker] = WorkerProcess(log_path, self._config.server.worker_timeout)
        replaced, self._hosts[policy] = self._hosts.get(policy), process
        if replaced is not None and replaced is not process:
            await self._leave(policy, replaced)
        try:
            await process.start()
            info: ModelInfo = await process.ask("add", policy, model, self._config.sampler)
        except AgentJetError:
            await self.remove(policy)
            raise
        return info

    async def remove(self, policy: PolicyId) -> None:
        if (process := self._hosts.pop(policy, None)) is not None:
            await self._leave(policy, process)

    async def _leave(self, policy: PolicyId, process: WorkerProcess) -> None:
        """Free a policy in a worker, or end the worker if it has no other policy."""
        if process in self._hosts.values():
            with contextlib.suppress(ComputeError):  # The worker died, or ends because the removal failed.
                await process.ask("remove", policy)
        else:
            await process.close()

    def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        return self._process(policy).sample(policy, np.asarray(token_ids, np.int32), params)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        return cast(list[TokenScore], await self._ask("score", policy, np.asarray(token_ids, np.int32), num_likeliest))

    async def forward_backward(self, op: Op, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        return cast(Outputs, await self._ask("forward_backward", op.policy_id, op, batch, loss))

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return cast(dict[str, float], await self._ask("optim_step", op.policy_id, op, optimizer))

    async def publish(self, policy: PolicyId, version: int) -> None:
        await self._ask("publish", policy, version)

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ask("save", policy, path))

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return cast(CheckpointStamp, await self._ask("load", policy, path))

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        await self._ask("export", policy, path, adapter)

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        ended = {self._process(policy).died for policy in policies}
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def close(self) -> None:
        processes = {*self._workers.values(), *self._hosts.values()}
        self._workers.clear()
        self._hosts.clear()
        await asyncio.gather(*(process.close() for process in processes))

    def _process(self, policy: PolicyId) -> WorkerProcess:
        """Returns the process of a policy. Raises `PolicyRemoved` for a policy that was not added."""
        if policy not in self._hosts:
            raise PolicyRemoved(f"no worker has the policy {policy}: add it first")
        return self._hosts[policy]

    async def _ask(self, op: str, policy: PolicyId, *args: Any) -> Any:
        return await self._process(policy).ask(op, policy, *args)
