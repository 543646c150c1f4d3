"""A learner group of two rank processes, with the requests that the gateway sends. Pinned here:

1. they meet, load, learn, publish, save and load; a repeated operation returns its stored result;
2. the published file has the weights and the probe's log-probabilities of the checkpoint of the same version;
3. a bad request is refused on both and changes nothing;
4. weights that are not finite are published, as the embedded backend does, and the metrics show it;
5. after `kill -9` of one rank, the next request fails and the other ends; the folder of weights is removed;
6. a rank that is stopped, or uses a whole core without a step, ends the group after `server.worker_timeout`, and the
   end of the group does not wait for it; the next group learns the batch to the same weights;
7. a hook that does not return ends the group after `server.hook_timeout`, with its name.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentjet.compute.model import load_policy
from agentjet.compute.protocol import LossSpec
from agentjet.compute.ranks import Ranks
from agentjet.compute.weights import PROBE_TOKENS, Publication
from agentjet.config import ComputeConfig, JobConfig, ModelConfig, OptimizerConfig, SamplerConfig
from agentjet.errors import ConfigError, HookHung, OperationConflict, WorkerDied, WorkerHung
from agentjet.processes.guardian import Launch
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import LocalPlacement, Supervisor, Watchdog
from agentjet.types import CheckpointStamp, Op, PolicyId
from tests.compute.test_locks import recorded_batch, settings, training_batch
from tests.tiny import make_model

pytestmark = pytest.mark.thorough

POLICY = PolicyId()
COMMAND = [sys.executable, "-P", "-m", "agentjet.compute"]


@asynccontextmanager
async def two_ranks(
    folder: Path, timeout: float = 120.0, hook_timeout: float = math.inf
) -> AsyncIterator[tuple[Ranks, list[psutil.Process]]]:
    """A new group, and its processes."""
    supervisor, names, watchdog = Supervisor("127.0.0.1", LocalPlacement(list)), ["rank-0", "rank-1"], Watchdog(timeout)

    async def launch(name: str) -> Peer:
        command = (*COMMAND, str(hook_timeout))
        return await supervisor.start(Launch(name, command, folder / f"{name}.log"), sign_seconds=watchdog.interval)

    group = Ranks(names, launch, watchdog, POLICY)
    compute = ComputeConfig(backend="cluster", ranks=2, sharding="gathered")
    try:
        await group.start()
        await group.join()
        info = await group.ask("add", POLICY, tiny(folder), SamplerConfig(), compute)
        assert info == load_policy(tiny(folder)).info
        yield group, [psutil.Process(int(re.findall(r"\d+", supervisor.place(name))[0])) for name in names]
    finally:
        await group.close()
        await supervisor.close()


def tiny(folder: Path) -> ModelConfig:
    path = folder / "tiny"
    return ModelConfig(name=str(path if path.exists() else make_model(path)), device="cpu", dtype="float32", threads=1)


async def life_of_a_group(folder: Path) -> None:
    batch, loss = training_batch(recorded_batch(4), 0), LossSpec.of(settings(4))
    async with two_ranks(folder) as (group, processes):
        first: Publication = await group.ask("publish", POLICY, 0)
        assert first.num_bytes == Path(first.path).stat().st_size and first.version == 0

        op = Op.of(POLICY, 0)
        await group.load_batch(POLICY, batch)
        outputs = await group.ask("forward_backward", POLICY, op, batch.id, loss)
        assert outputs.num_steps == 1
        with pytest.raises(OperationConflict):
            await group.ask("save", POLICY, folder / "step_000001")
        with pytest.raises(OperationConflict, match="out of order"):
            await group.ask("optim_step", POLICY, Op.of(POLICY, 7), settings(4).optimizer)
        metrics = await group.ask("optim_step", POLICY, op.next(), settings(4).optimizer)
        assert metrics == await group.ask("optim_step", POLICY, op.next(), settings(4).optimizer), "a repetition"
        assert (metrics["learner/ranks"], metrics["weights/learner"], metrics["weights/sampler"]) == (2, 1, 1)
        published: Publication = await group.ask("publish", POLICY, 1)
        assert published == await group.ask("publish", POLICY, 1) and published.digest != first.digest
        stamp: CheckpointStamp = await group.ask("save", POLICY, folder / "step_000001")
        assert (stamp.policy_version, stamp.operation) == (1, 2)
        check_publication(published, folder / "step_000001" / "policy")

        with pytest.raises(ConfigError, match="does not see"):
            await group.ask("load", POLICY, folder / "nothing")
        assert await group.ask("load", POLICY, folder / "step_000001") == stamp
        assert await group.ask("publish", POLICY, 1, False) is None
        again: Publication = await group.ask("publish", POLICY, 1)
        assert again.digest == published.digest and again.probe_logprobs == published.probe_logprobs

        op = op.next().next()
        await group.load_batch(POLICY, batch)
        await group.ask("forward_backward", POLICY, op, batch.id, loss)
        metrics = await group.ask("optim_step", POLICY, op.next(), OptimizerConfig(lr=1e38))
        assert metrics["weights/finite"] == 0
        diverged: Publication = await group.ask("publish", POLICY, 2)
        assert not np.isfinite(diverged.probe_logprobs).any()

        processes[1].kill()
        with pytest.raises(WorkerDied, match="rank-1 ended by SIGKILL"):
            await group.load_batch(POLICY, batch)
        processes[0].wait()
        await group.close()  # The guardian removes the folder after the end of its process.
        assert not Path(diverged.path).parent.exists()


async def a_rank_that_is_stopped(folder: Path) -> None:
    batch = training_batch(recorded_batch(4), 0)
    async with two_ranks(folder, timeout=10.0) as (group, processes):
        processes[1].suspend()
        with pytest.raises(WorkerHung, match=r"rank-1: .*server\.worker_timeout") as hung:
            await group.load_batch(POLICY, batch)
        assert str(await group.died) == str(hung.value)
        await group.close()
        assert not any(process.is_running() for process in processes)


async def a_rank_that_spins(folder: Path) -> None:
    """The other one waits for it in a collective, as both would in NCCL."""
    batch, sign, digests = training_batch(recorded_batch(4), 0), folder / "sign", []
    recipe = {"name": "tests.plugins.hindered:Hindered", "way": "learner spins", "sign": str(sign)}
    loss = LossSpec.of(JobConfig.model_validate({"recipe": recipe}))
    for is_hindered in (True, False, False):
        if is_hindered:
            sign.touch()
        async with two_ranks(folder, timeout=10.0 if is_hindered else 120.0) as (group, processes):
            await group.load_batch(POLICY, batch)
            op = Op.of(POLICY, 0)
            if is_hindered:
                with pytest.raises(WorkerHung, match=r"the ranks made no progress for 10 s \(server\.worker_timeout\)"):
                    await group.ask("forward_backward", POLICY, op, batch.id, loss)
                await group.close()
                assert not sign.exists() and not any(process.is_running() for process in processes)
                continue
            await group.ask("forward_backward", POLICY, op, batch.id, loss)
            await group.ask("optim_step", POLICY, op.next(), settings(4).optimizer)
            digests.append((await group.ask("publish", POLICY, 1)).digest)
    assert digests[0] == digests[1]


async def a_hook_that_does_not_return(folder: Path) -> None:
    batch = training_batch(recorded_batch(4), 0)
    job = JobConfig.model_validate({"recipe": "tests.plugins.endless:EndlessLoss"})
    async with two_ranks(folder, hook_timeout=1.0) as (group, processes):
        await group.load_batch(POLICY, batch)
        with pytest.raises(HookHung, match=r"`token_loss` did not return within 1 s.*endless\.py:\d+") as hung:
            await group.ask("forward_backward", POLICY, Op.of(POLICY, 0), batch.id, LossSpec.of(job))
        assert str(await group.died) == str(hung.value) and hung.value.during == str(POLICY)
        await group.close()
        assert not any(process.is_running() for process in processes)


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


def test_a_hook_that_does_not_return_ends_its_group_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    asyncio.run(a_hook_that_does_not_return(tmp_path))


def test_a_rank_that_spins_ends_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    asyncio.run(a_rank_that_spins(tmp_path))


def test_a_rank_that_is_stopped_ends_its_group(tmp_path: Path) -> None:
    asyncio.run(a_rank_that_is_stopped(tmp_path))
