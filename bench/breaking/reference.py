"""The undisturbed one: a fresh worker that is killed by nobody and learns the same episodes. Its weights are the truth.

It also makes what a run begins with: a tiny model, and a checkpoint of a policy that learned one made-up batch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from agentjet.compute.embedded import EmbeddedCompute
from agentjet.config import JobConfig, ServeConfig
from agentjet.swarm import Journal
from agentjet.timeline.forest import Forest, Row, build_forest
from bench.breaking.victims import ROOT, environment

BASE_VERSION = 1
"""What the checkpoint is of that a run begins with, so that an empty journal has to find its base version."""
WEIGHTS = "model.safetensors"


def make_model(folder: Path) -> None:
    """In a process of its own, so that this one never loads torch."""
    program = f"from tests.tiny import make_model; make_model({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), check=True)


async def make_base(settings: dict[str, Any], data_dir: Path) -> Path:
    """Teach a worker one batch of noise and save, beside an empty journal; returns the checkpoint, in `data_dir`."""
    config = _config(settings, data_dir)
    Journal.open(data_dir / "journal.sqlite", model=config.model.name).close()
    compute = EmbeddedCompute(config)
    try:
        await compute.start()
        await compute.learn(0, _noise(), config.job)
        checkpoint = data_dir / "checkpoints" / f"step_{BASE_VERSION:06d}"
        checkpoint.parent.mkdir(parents=True)
        await compute.save(checkpoint)
    finally:
        await compute.close()
    return checkpoint


async def undisturbed(
    settings: dict[str, Any], base: Path | None, forests: Path, folder: Path, num_batches: int
) -> Path:
    """Learn the kept forests in order, from the checkpoint `base` on if there is one; returns the exported policy."""
    compute = EmbeddedCompute(_config(settings, folder))
    try:
        await compute.start()
        first = 0 if base is None else await compute.load(base)
        for batch_id in range(first, first + num_batches):
            kept = msgpack.unpackb((forests / f"{batch_id:06d}.msgpack").read_bytes())
            job = JobConfig.model_validate_json(kept["job"])
            await compute.learn(batch_id, Forest.from_wire(kept["forest"]), job)
        await compute.export(folder / "export")
    finally:
        await compute.close()
    return folder / "export"


def equal_weights(one: Path, other: Path) -> bool:
    """Bit by bit."""
    return (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


def _config(settings: dict[str, Any], data_dir: Path) -> ServeConfig:
    return ServeConfig.model_validate({**settings, "server": {"data_dir": str(data_dir)}})


def _noise() -> Forest:
    """A small batch of made-up tokens with advantages of both signs."""
    rows = [
        Row(
            tokens=np.arange(10 + i, 30 + i, dtype=np.int32),
            logprobs=np.full(8, -5.0, np.float32),
            versions=np.zeros(8, np.int32),
            advantage=1.0 if i % 2 else -1.0,
            temperature=1.0,
            sequence=i,
        )
        for i in range(4)
    ]
    return build_forest(rows)
