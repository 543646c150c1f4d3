"""`ChosenCompute`: the backends of a server. Each policy has the one that its settings choose. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from agentjet.compute.protocol import EMBEDDED, Capabilities, Compute, LossSpec, Outputs
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig
from agentjet.errors import ConfigError, PolicyRemoved, WorkerDied
from agentjet.timeline.batch import TrainingBatch
from agentjet.types import (
    CheckpointStamp,
    ModelInfo,
    Op,
    PolicyId,
    ProcessStatus,
    Sampled,
    SamplerBounds,
    SamplersStatus,
    SamplingParams,
    TokenScore,
)


class ChosenCompute:
    """Implements `Compute` over other backends, by the name in `compute.backend`. Closes them with itself."""

    def __init__(self, backends: Mapping[str, Compute]) -> None:
        self._backends = dict(backends)
        self._chosen: dict[PolicyId, Compute] = {}
        """The backend that each policy was added to."""

    def capabilities(self, settings: ComputeConfig) -> Capabilities:
        return self._backends[settings.backend].capabilities(settings)

    async def add(
        self, policy: PolicyId, model: ModelConfig, *, worker: str = "", settings: ComputeConfig = EMBEDDED
    ) -> ModelInfo:
        backend = self._backends[settings.backend]
        if (before := self._chosen.get(policy)) is not None and before is not backend:
            await before.remove(policy)
        self._chosen[policy] = backend
        return await backend.add(policy, model, worker=worker, settings=settings)

    async def remove(self, policy: PolicyId) -> None:
        if (backend := self._chosen.pop(policy, None)) is not None:
            await backend.remove(policy)

    def sample(
        self, policy: PolicyId, token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncGenerator[Sampled, None]:
        return self._of(policy).sample(policy, token_ids, params)

    async def score(self, policy: PolicyId, token_ids: Sequence[int], num_likeliest: int) -> list[TokenScore]:
        return await self._of(policy).score(policy, token_ids, num_likeliest)

    async def load_batch(self, policy: PolicyId, batch: TrainingBatch) -> None:
        await self._of(policy).load_batch(policy, batch)

    async def forward_backward(self, op: Op, batch_id: int, loss: LossSpec) -> Outputs:
        return await self._of(op.policy_id).forward_backward(op, batch_id, loss)

    async def optim_step(self, op: Op, optimizer: OptimizerConfig) -> dict[str, float]:
        return await self._of(op.policy_id).optim_step(op, optimizer)

    async def publish(
        self, policy: PolicyId, version: int, *, to_samplers: bool = True, in_turns: bool = False
    ) -> Mapping[str, float]:
        return await self._of(policy).publish(policy, version, to_samplers=to_samplers, in_turns=in_turns)

    async def save(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return await self._of(policy).save(policy, path)

    async def load(self, policy: PolicyId, path: Path) -> CheckpointStamp:
        return await self._of(policy).load(policy, path)

    async def export(self, policy: PolicyId, path: Path, *, adapter: bool = False) -> None:
        await self._of(policy).export(policy, path, adapter=adapter)

    async def died(self, policies: Sequence[PolicyId]) -> WorkerDied:
        by_backend: dict[Compute, list[PolicyId]] = {}
        for policy in policies:
            by_backend.setdefault(self._of(policy), []).append(policy)
        deaths = [asyncio.create_task(backend.died(own)) for backend, own in by_backend.items()]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for death in deaths:
                death.cancel()

    def processes(self, policy: PolicyId) -> list[ProcessStatus]:
        backend = self._chosen.get(policy)
        return [] if backend is None else backend.processes(policy)

    def samplers(self, policy: PolicyId) -> SamplersStatus | None:
        backend = self._chosen.get(policy)
        return None if backend is None else backend.samplers(policy)

    async def scale(self, policy: PolicyId, bounds: SamplerBounds) -> None:
        if policy not in self._chosen:
            raise ConfigError(f"the policy {policy} is not loaded, so it has no samplers to scale: start it first")
        await self._chosen[policy].scale(policy, bounds)

    async def close(self) -> None:
        self._chosen.clear()
        await asyncio.gather(*(backend.close() for backend in self._backends.values()))

    def _of(self, policy: PolicyId) -> Compute:
        """Raises `PolicyRemoved` for a policy that was not added."""
        if policy not in self._chosen:
            raise PolicyRemoved(f"no backend has the policy {policy}: add it first")
        return self._chosen[policy]
