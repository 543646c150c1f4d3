"""The gateway's half of the embedded backend: which worker has which policy. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentjet.compute.embedded.worker_process import WorkerProcess
from agentjet.compute.protocol import Capabilities, LossSpec, Outputs
from agentjet.config import ModelConfig, OptimizerConfig, ServeConfig
from agentjet.errors import AgentJetError, ComputeError, PolicyRemoved, WorkerDied
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import CheckpointStamp, ModelInfo, Op, PolicyId, Sampled, SamplingParams, TokenScore


class EmbeddedCompute:
    """Implements `Compute` with worker processes by name. A policy keeps its process until `add` or `remove`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._workers: dict[str, WorkerProcess] = {}
        """The processes that new policies get, by worker name."""
        self._hosts: dict[PolicyId, WorkerProcess] = {}
        """The process that each policy was added to. It may have died."""

    @property
    def capabilities(self) -> Capabilities:
        """See `Compute.capabilities`."""
        return Capabilities(support_sets=True, adapters=True, prefix_sharing=True, bit_equal_replay=True)

    def pid(self, policy: PolicyId) -> int | None:
        """Returns the process id of a policy's worker while it runs."""
        return self._hosts[policy].pid if policy in self._hosts else None

    async def add(self, policy: PolicyId, model: ModelConfig, *, worker: str = "", dtype: str = "") -> ModelInfo:
        """See `Compute.add`."""
        process = self._workers.get(worker)
        if process is None or process.has_ended:
            log_path = self._config.server.data_dir / "logs" / (f"worker-{worker}.log" if worker else "worker.log")
            process = self._workers[worker] = WorkerProcess(log_path, self._config.server.worker_timeout)
        replaced, self._hosts[policy] = self._hosts.get(policy), process
        process.policies.add(policy)
        if replaced is not None and replaced is not process:
            await self._leave(policy, replaced)
        try:
            await process.start()
            info = await process.ask(
                "add",
                policy,
                model=model.model_dump(mode="json"),
                dtype=dtype,
                sampler=self._config.sampler.model_dump(mode="json"),
            )
        except AgentJetError:
            await self.remove(policy)
            raise
        info["end_tokens"] = tuple(info["end_tokens"])
        return ModelInfo(**info)

    async def remove(self, policy: PolicyId) -> None:
        """See `Compute.remove`."""
        if (process := self._hosts.pop(policy, None)) is not None:
            await self._leave(policy, process)

    async def _leave(self, policy: PolicyId, process: WorkerProcess) -> None:
        """Free a policy in a worker, or end the worker if it has no other policy."""
        process.policies.discard(policy)
        if process.policies:
            with contextlib.suppress(ComputeError):  # The worker died, or ends because the removal failed.
                await process.ask("remove", policy)
        else:
            await process.close()

    async def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        """See `Sampler.sample`."""
        process = self._process(policy)
        tokens = np.asarray(token_ids, np.int32).tobytes()
        id, queue = process.open_stream(policy, tokens=tokens, params=dataclasses.asdict(params))
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            process.close_stream(policy, id)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        """See `Sampler.score`."""
        tokens = np.asarray(token_ids, np.int32).tobytes()
        scores = await self._ask("score", policy, tokens=tokens, num_likeliest=num_likeliest)
        return [TokenScore(logprob, tuple((id, value) for id, value in likeliest)) for logprob, likeliest in scores]

    async def forward_backward(self, op: Op, batch: TrainingBatch, loss: LossSpec) -> Outputs:
        """See `Learner.forward_backward`."""
        found = await self._ask("forward_backward", op.policy_id, number=op.number, batch=batch, loss=loss.to_wire())
        return Outputs(**found)

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        """See `Learner.optim_step`."""
        metrics: dict[str, float] = await self._ask(
            "optim_step", op.policy_id, number=op.number, optimizer=optimizer.model_dump(mode="json")
        )
        return metrics

    async def logprobs(self, policy: PolicyId, batch: TrainingBatch, *, reference: bool = False) -> Outputs:
        """See `Learner.logprobs`."""
        found = await self._ask("logprobs", policy, batch=batch, reference=reference)
        return Outputs(columns={"logprob": np.frombuffer(found, np.float32)})

    async def publish(self, policy: PolicyId, version: int) -> None:
        """See `Learner.publish`."""
        await self._ask("publish", policy, version=version)

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """See `Learner.save`."""
        return CheckpointStamp(**await self._ask("save", policy, path=str(path)))

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        """See `Learner.load`."""
        return CheckpointStamp(**await self._ask("load", policy, path=str(path)))

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        """See `Learner.export`."""
        await self._ask("export", policy, path=str(path), adapter=adapter)

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        """See `Compute.died`."""
        ended = {self._process(policy).died for policy in policies}
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def close(self) -> None:
        """See `Compute.close`. A worker is killed only if it does not end in time."""
        processes = {*self._workers.values(), *self._hosts.values()}
        self._workers.clear()
        self._hosts.clear()
        await asyncio.gather(*(process.close() for process in processes))

    def _process(self, policy: PolicyId) -> WorkerProcess:
        """Returns the process of a policy. Raises `PolicyRemoved` for a policy that was not added."""
        if policy not in self._hosts:
            raise PolicyRemoved(f"no worker has the policy {policy}: add it first")
        return self._hosts[policy]

    async def _ask(self, op: str, policy: PolicyId, **arguments: Any) -> Any:
        return await self._process(policy).ask(op, policy, **arguments)
