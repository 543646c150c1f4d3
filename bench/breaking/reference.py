"""The reference: a fresh worker that learns the same episodes without faults. Its weights are the expected ones.

Also makes the tiny model that a run starts with.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentjet.compute.backend import ProcessCompute
from agentjet.compute.protocol import learn
from agentjet.config import JobConfig, ServeConfig
from agentjet.types import Op, PolicyId
from bench.breaking.victims import ROOT, environment

WEIGHTS = "model.safetensors"


def make_model(folder: Path) -> None:
    """Runs in a separate process, so that this process never loads torch."""
    program = f"from tests.tiny import make_model; make_model({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), check=True)


async def undisturbed(
    settings: dict[str, Any], forests: Path, folder: Path, policy: PolicyId, num_batches: int
) -> Path:
    """Learn the kept batches of a policy in order, alone in a worker or cluster; returns the exported policy."""
    config = ServeConfig.model_validate({**settings, "server": {"data_dir": str(folder)}})
    compute = ProcessCompute(config)
    try:
        await compute.add(policy, config.model, settings=config.compute)
        op = Op.of(policy, 0)
        for batch_id in range(num_batches):
            kept = pickle.loads((forests / f"{batch_id:06d}.pickle").read_bytes())
            job = JobConfig.model_validate_json(kept["job"])
            _, op = await learn(compute, op, kept["batches"][policy.policy], job)
            await compute.publish(policy, batch_id + 1)
        await compute.export(policy, folder / "export")
    finally:
        await compute.close()
    return folder / "export"


def equal_weights(one: Path, other: Path) -> bool:
    """Bit by bit."""
    return (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
