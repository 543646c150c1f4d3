"""Processes of this machine: their GPUs and their place."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentjet.errors import ComputeError, ConfigError
from agentjet.processes.guardian import Launch
from agentjet.processes.supervisor import LocalPlacement

pytestmark = pytest.mark.anyio


async def test_processes_that_start_together_get_different_gpus(tmp_path: Path) -> None:
    placement = LocalPlacement(lambda: ["0", "1"])
    assert await placement.num_gpus() == 2
    command = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    started = await asyncio.gather(*(placement.start(Launch(log.stem, command, log, gpus=1)) for log in logs))
    await asyncio.gather(*(process.ended for process in started))
    assert sorted(log.read_text().strip() for log in logs) == ["0", "1"]
    await placement.close()


async def test_a_rank_and_a_replica_share_a_gpu(tmp_path: Path) -> None:
    placement, log = LocalPlacement(lambda: ["0", "1", "2"]), tmp_path / "a.log"

    async def gpus(name: str, group: str, beside: str) -> Sequence[str]:
        launch = Launch(name, ("/bin/sleep", "600"), log, gpus=1, group=group, beside=beside)
        return (await placement.start(launch)).gpus

    assert await gpus("p/rank-0.1", "ranks of p", "replicas of p") == ["0"]
    assert await gpus("p/replica-1", "replicas of p", "ranks of p") == ["0"]
    assert await gpus("p/replica-2", "replicas of p", "ranks of p") == ["1"]
    assert await gpus("p/rank-1.1", "ranks of p", "replicas of p") == ["1"]
    assert await gpus("q/rank-0.1", "ranks of q", "replicas of q") == ["2"]
    with pytest.raises(ComputeError, match="p/replica-3 needs 1 GPU, and 0 of 3 are free"):
        await gpus("p/replica-3", "replicas of p", "ranks of p")
    await placement.close()


async def test_gpus_in_use_are_free_later_and_a_process_has_a_place(tmp_path: Path) -> None:
    placement, command, log = LocalPlacement(lambda: ["0"]), ("/bin/sleep", "600"), tmp_path / "a.log"
    process = await placement.start(Launch("a", command, log, gpus=1))
    with pytest.raises(ComputeError, match="b needs 1 GPU, and 0 of 1 are free"):
        await placement.start(Launch("b", command, log, gpus=1))
    with pytest.raises(ConfigError, match="b needs 2 GPUs"):
        await placement.start(Launch("b", command, log, gpus=2))
    while not process.place:
        await asyncio.sleep(0.01)
    place = process.place
    await process.stop()
    assert process.place == place != ""
    await (await placement.start(Launch("b", command, log, gpus=1))).stop()
    await placement.close()
