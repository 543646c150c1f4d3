"""Bit-equality of a policy that is trained alone and beside others: `isolated_bit_equal`.

A policy is sampled from and trained alone, and its batches are recorded. Then four policies share one worker. One gets
the recorded batches with the same operations; meanwhile the others sample and learn on batches of other tokens. The
weights and the optimiser states of both trainings must be the same bytes.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentjet.compute.backend import ProcessCompute
from agentjet.compute.operations import learn
from agentjet.config import JobConfig, ServeConfig
from agentjet.timeline import build_forest
from agentjet.timeline.batch import TrainingBatch
from agentjet.timeline.forest import call_row
from agentjet.types import Op, PolicyId, SamplingParams

JOB = JobConfig.model_validate({"batch_size": 1, "group_size": 4, "optimizer": {"lr": 1e-3}})
POLICY = PolicyId("measured")
OTHERS = (PolicyId("b"), PolicyId("c"), PolicyId("d", "planner"))
PROMPT_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Trial:
    """A kind of policy and the size of its batches."""

    model: str
    rank: int
    batches: int = 3
    max_tokens: int = 24

    def config(self, folder: Path) -> ServeConfig:
        model = {"name": self.model, "device": "cpu", "dtype": "float32", "lora": {"rank": self.rank}}
        return ServeConfig.model_validate(
            {"model": model, "sampler": {"cache_tokens": 8192}, "server": {"data_dir": str(folder)}}
        )


async def sampled(compute: ProcessCompute, policy: PolicyId, version: int, trial: Trial, seed: int) -> TrainingBatch:
    """A group of completions of one prompt, sampled at the same time, with made-up advantages."""
    prompt = np.random.default_rng(seed).integers(3, 250, PROMPT_TOKENS).astype(np.int32)

    async def complete(sequence: int) -> tuple[list[int], list[float]]:
        params = SamplingParams(max_tokens=trial.max_tokens, seed=seed * 1000 + version * 10 + sequence)
        pieces = [piece async for piece in compute.sample(policy, prompt.tolist(), params)]
        return [t for piece in pieces for t in piece.tokens], [x for piece in pieces for x in piece.logprobs]

    completions = await asyncio.gather(*(complete(sequence) for sequence in range(JOB.group_size)))
    rows = [
        call_row(
            tokens=np.concatenate([prompt, np.array(tokens, np.int32)]),
            logprobs=np.array(logprobs, np.float32),
            versions=np.full(len(tokens), version, np.int32),
            advantage=sequence - 1.5,
            temperature=1.0,
            sequence=sequence,
        )
        for sequence, (tokens, logprobs) in enumerate(completions)
    ]
    return TrainingBatch(version, build_forest(rows))


async def alone(folder: Path, trial: Trial) -> list[TrainingBatch]:
    """Trains a policy alone in its worker and saves a checkpoint; returns its batches."""
    config = trial.config(folder)
    compute, op, batches = ProcessCompute(config), Op.of(POLICY, 0), []
    try:
        await compute.add(POLICY, config.model)
        for version in range(trial.batches):
            batches.append(await sampled(compute, POLICY, version, trial, seed=7))
            _, op = await learn(compute, op, batches[-1], JOB)
            await compute.publish(POLICY, version + 1)
        await compute.save(POLICY, folder / "checkpoint")
        return batches
    finally:
        await compute.close()


async def beside_others(folder: Path, trial: Trial, batches: list[TrainingBatch]) -> None:
    """Trains the policy on recorded batches beside three others and saves a checkpoint."""
    config = trial.config(folder)
    compute = ProcessCompute(config)

    async def disturb(policy: PolicyId, seed: int) -> None:
        op = Op.of(policy, 0)
        for version in itertools.count():
            _, op = await learn(compute, op, await sampled(compute, policy, version, trial, seed), JOB)
            await compute.publish(policy, version + 1)

    try:
        for policy in (OTHERS[0], POLICY, *OTHERS[1:]):
            await compute.add(policy, config.model)
        others = [asyncio.create_task(disturb(policy, seed)) for seed, policy in enumerate(OTHERS)]
        op = Op.of(POLICY, 0)
        for batch in batches:
            await sampled(compute, POLICY, batch.id, trial, seed=7)
            _, op = await learn(compute, op, batch, JOB)
            await compute.publish(POLICY, batch.id + 1)
        for other in others:
            other.cancel()
        for ended in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
        await compute.save(POLICY, folder / "checkpoint")
    finally:
        await compute.close()


def saved(folder: Path) -> dict[str, bytes]:
    """Weights and optimiser state of a checkpoint, by file."""
    files = [*folder.rglob("*.safetensors"), *folder.rglob("trainer.pt")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def is_bit_equal(folder: Path, trial: Trial) -> bool:
    """Trains both ways."""

    async def train() -> None:
        await beside_others(folder / "beside", trial, await alone(folder / "alone", trial))

    asyncio.run(train())
    expected = saved(folder / "alone")
    return len(expected) == 2 and expected == saved(folder / "beside")
