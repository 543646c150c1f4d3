"""Two rank processes, with the requests that the gateway sends. Pinned here:

1. they meet, load, learn, publish, save and load; a repeated operation returns its stored result;
2. the published file has the weights and the probe's log-probabilities of the checkpoint of the same version;
3. a bad request is refused on both and changes nothing;
4. after `kill -9` of one rank, the next request of the other fails and ends it; the folder of weights is removed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentjet.compute.cluster.hub import Hub, Peer
from agentjet.compute.cluster.weights import PROBE_TOKENS, Publication
from agentjet.compute.embedded.model import load_policy
from agentjet.compute.protocol import LossSpec
from agentjet.config import ComputeConfig, ModelConfig
from agentjet.errors import AgentJetError, ComputeError, ConfigError, OperationConflict
from agentjet.types import CheckpointStamp, ModelInfo, Op, PolicyId
from tests.compute.test_locks import recorded_batch, settings, training_batch
from tests.tiny import make_model

POLICY = PolicyId()


class Ranks:
    """The gateway's end of a group."""

    def __init__(self, peers: list[Peer], processes: list[subprocess.Popen[bytes]]) -> None:
        self.peers = peers
        self.processes = processes

    async def ask(self, op: str, *args: Any) -> Any:
        """The answer of rank 0, or the first error of any."""
        answers = await self.answers(op, *args)
        for answer in answers:
            if isinstance(answer, AgentJetError):
                raise answer
        return answers[0]

    async def answers(self, op: str, *args: Any) -> list[Any]:
        asked = (peer.ask(op, POLICY, *args) for peer in self.peers)
        return await asyncio.gather(*asked, return_exceptions=True)


@asynccontextmanager
async def ranks(count: int) -> AsyncIterator[Ranks]:
    hub = Hub()
    await hub.open()
    names = [f"rank {rank}" for rank in range(count)]
    expected = [hub.expect(name) for name in names]
    command = [sys.executable, "-P", "-m", "agentjet.compute.cluster.rank"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env={**environment, **hub.environment(name)}) for name in names]
    peers: list[Peer] = []
    try:
        peers += await asyncio.gather(*expected)
        yield Ranks(peers, processes)
    finally:
        for peer in peers:
            peer.close()
        for process in processes:
            process.kill()
            process.wait()
        await hub.close()


async def join(group: Ranks, model: ModelConfig, sharding: str) -> ModelInfo:
    address = await group.peers[0].ask("rendezvous", POLICY)
    count = len(group.peers)
    joins = (peer.ask("join", POLICY, rank, count, address) for rank, peer in enumerate(group.peers))
    await asyncio.gather(*joins)
    compute = ComputeConfig.model_validate({"backend": "cluster", "ranks": count, "sharding": sharding})
    info: ModelInfo = await group.ask("add", model, compute)
    return info


async def life_of_a_group(folder: Path) -> None:
    name = make_model(folder / "tiny")
    model = ModelConfig(name=str(name), device="cpu", dtype="float32", threads=1)
    batch, loss = training_batch(recorded_batch(4), 0), LossSpec.of(settings(4))
    async with ranks(2) as group:
        with pytest.raises(ComputeError, match="must join"):
            await group.ask("add", model, ComputeConfig())
        info = await join(group, model, "gathered")
        assert info == load_policy(model).info
        first: Publication = await group.ask("publish", 0)
        assert first.num_bytes == Path(first.path).stat().st_size and first.version == 0

        op = Op.of(POLICY, 0)
        outputs = await group.ask("forward_backward", op, batch, loss)
        assert outputs.num_steps == 1
        with pytest.raises(OperationConflict):
            await group.ask("save", folder / "step_000001")
        with pytest.raises(OperationConflict, match="out of order"):
            await group.ask("optim_step", Op.of(POLICY, 7), settings(4).optimizer)
        metrics = await group.ask("optim_step", op.next(), settings(4).optimizer)
        assert metrics == await group.ask("optim_step", op.next(), settings(4).optimizer), "a repetition"
        assert (metrics["learner/ranks"], metrics["weights/learner"], metrics["weights/sampler"]) == (2, 1, 1)
        published: Publication = await group.ask("publish", 1)
        assert published == await group.ask("publish", 1) and published.digest != first.digest
        stamp: CheckpointStamp = await group.ask("save", folder / "step_000001")
        assert (stamp.policy_version, stamp.operation) == (1, 2)
        check_publication(published, folder / "step_000001" / "policy")

        with pytest.raises(ConfigError, match="does not see"):
            await group.ask("load", folder / "nothing")
        assert await group.ask("load", folder / "step_000001") == stamp
        assert await group.ask("publish", 1, False) is None
        again: Publication = await group.ask("publish", 1)
        assert again.digest == published.digest and again.probe_logprobs == published.probe_logprobs

        group.processes[1].kill()
        found = await group.answers("forward_backward", op.next().next(), batch, loss)
        assert all(isinstance(answer, ComputeError) for answer in found)
        group.processes[0].wait()
        assert group.processes[0].returncode == 1
        assert not Path(again.path).parent.exists()


def check_publication(publication: Publication, folder: Path) -> None:
    policy = load_policy(ModelConfig(name=str(folder), device="cpu", dtype="float32", threads=1))
    weights = load_file(publication.path)
    assert weights.keys() == {name for name, _ in policy.model.named_parameters()}
    for name, p in policy.model.named_parameters():
        assert torch.equal(weights[name], p), name
    tokens = torch.tensor(publication.probe_tokens)
    assert len(tokens) == PROBE_TOKENS
    with torch.no_grad(), policy.attention("eager"):
        logits = policy.model(input_ids=tokens[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert np.array(publication.probe_logprobs) == pytest.approx(expected.numpy(), abs=1e-5)


def test_two_processes_learn_publish_save_and_end_together(tmp_path: Path) -> None:
    asyncio.run(life_of_a_group(tmp_path))
