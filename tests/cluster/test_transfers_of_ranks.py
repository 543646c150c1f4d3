"""Each transfer of weights between a real rank and real vLLM replicas on a CPU. Pinned here:

1. replicas have the learner's log-probabilities after each publish, of a model whose experts both ends pack otherwise;
2. a replica that is killed while it adopts is replaced, and the rank goes on;
3. a rank that is killed while replicas adopt is replaced: its checkpoint is published as the same version, and replicas
   sample.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentjet.compute.backend import ProcessCompute
from agentjet.compute.protocol import LossSpec
from agentjet.config import ComputeConfig, ModelConfig, OptimizerConfig, ServeConfig
from agentjet.types import Op, PolicyId
from tests.cluster.local_replica import sampler_python
from tests.compute.architectures import make_architecture
from tests.compute.test_locks import recorded_batch, settings, training_batch

pytestmark = [pytest.mark.vllm, pytest.mark.thorough, pytest.mark.slow, pytest.mark.needs("vllm")]

POLICY = PolicyId()
PATIENCE = 400.0
TOLERANCE = 1e-4
TRANSFERS: dict[str, dict[str, Any]] = {
    "file": {"samplers": 2},
    "ipc": {"colocated": True},
    "nccl": {"samplers": 2},
}
"""By transfer: other settings."""


class Learning:
    """A policy of one rank, and its replicas."""

    def __init__(self, compute: ProcessCompute, folder: Path, transfer: str) -> None:
        self.compute = compute
        self._model = ModelConfig.model_validate(
            {"name": str(folder / "model"), "device": "cpu", "dtype": "float32", "threads": 1, "context_length": 256}
        )
        values = {"backend": "cluster", "sampler_python": sampler_python(), "weight_transfer": transfer}
        self._settings = ComputeConfig.model_validate(values | TRANSFERS[transfer])
        self._op, self.version = Op.of(POLICY, 0), 0

    async def start(self) -> None:
        await self.compute.add(POLICY, self._model, settings=self._settings)

    async def learn(self) -> None:
        batch = training_batch(recorded_batch(4), 0)
        await self.compute.load_batch(POLICY, batch)
        await self.compute.forward_backward(self._op, batch.id, LossSpec.of(settings(4)))
        await self.compute.optim_step(self._op.next(), OptimizerConfig(lr=0.01))
        self._op, self.version = self._op.next().next(), self.version + 1

    async def load(self, path: Path) -> None:
        stamp = await self.compute.load(POLICY, path)
        self._op, self.version = Op.of(POLICY, stamp.operation), stamp.policy_version

    async def publish(self) -> None:
        """Let the replicas adopt the weights, and compare them with those of the learner."""
        metrics = await self.compute.publish(POLICY, self.version)
        error = metrics["sampler/probe_error"]
        versions = [one.version for one in self.compute.processes(POLICY) if one.kind == "replica" and one.is_ready]
        assert versions and set(versions) == {self.version} and error < TOLERANCE, (versions, error)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def places(self, kind: str, state: str = "") -> list[int]:
        found = [one for one in self.compute.processes(POLICY) if one.kind == kind and state in (one.state or "")]
        return [int(pid) for one in found for pid in re.findall(r"process (\d+)", one.place)]


async def life(folder: Path, transfer: str) -> None:
    config = ServeConfig.model_validate({"server": {"data_dir": folder / "d"}})
    compute = ProcessCompute(config)
    one = Learning(compute, folder, transfer)
    try:
        await one.start()
        await one.publish()
        for _ in range(2):
            await one.learn()
            await one.publish()

        await one.learn()
        publishing = asyncio.create_task(one.publish())
        await one.until(lambda: bool(one.places("replica", "loads weights")))
        os.kill(one.places("replica", "loads weights")[0], signal.SIGKILL)
        await publishing
        await compute.save(POLICY, folder / "later")

        await one.learn()
        died = asyncio.create_task(compute.died([POLICY]))
        publishing = asyncio.create_task(one.publish())
        await one.until(lambda: bool(one.places("replica", "loads weights")))
        os.kill(one.places("rank")[0], signal.SIGKILL)
        await died
        await asyncio.gather(publishing, return_exceptions=True)  # Replicas may have had all weights.
        await one.start()
        await one.load(folder / "later")
        await one.publish()
        await one.learn()
        await one.publish()
    finally:
        await compute.close()


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_replicas_have_the_weights_of_their_rank(transfer: str, tmp_path: Path) -> None:
    make_architecture(tmp_path / "model", "mixtral", hidden_size=64, head_dim=32)
    asyncio.run(asyncio.wait_for(life(tmp_path, transfer), PATIENCE))
