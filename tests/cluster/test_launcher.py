"""Launchers: the GPUs of processes, and the error that a log gives as the cause of a replica's end.

The cause is the first error of its process, without the wrapper.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentjet.compute.cluster import launcher
from agentjet.compute.cluster.keeper import Launch
from agentjet.compute.cluster.launcher import LocalLauncher, cause_of
from agentjet.errors import ComputeError, ConfigError

WORKER = "(Worker pid=8881) ERROR 11-24 04:56:03 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=8870) ERROR 11-24 04:56:03 [core.py:1512] "
WRAPPER = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
UNSUPPORTED = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [f"{WORKER}Traceback (most recent call last):", f"{WORKER}    raise RuntimeError(", WORKER + UNSUPPORTED,
             f"{CORE}RuntimeError: Worker failed with error 'Unsupported'", f"ERROR 11-24 04:56:03 [a.py:9] {WRAPPER}",
             "Traceback (most recent call last):", WRAPPER],
            UNSUPPORTED,
        ),
        (
            [f"{CORE}pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
             f"{CORE}  Value error, Model architectures ['Foo'] are not supported. [type=value_error, input_value=1]",
             f"{CORE}    For further information visit https://errors.pydantic.dev"],
            "Value error, Model architectures ['Foo'] are not supported.",
        ),
        (["Traceback:", "torch.OutOfMemoryError: CUDA out of memory  "], "torch.OutOfMemoryError: CUDA out of memory"),
        (["2026 INFO version 0: fetched", f"{CORE}EngineCore encountered a fatal error.", WRAPPER], ""),
        ([], ""),
    ],
)  # fmt: skip
def test_cause(tmp_path: Path, lines: list[str], cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    earlier = "ValueError: of an earlier process\n"
    log.write_text(earlier + "\n".join(lines))
    assert cause_of(log, len(earlier)) == cause
    monkeypatch.setattr(launcher, "LOG_END_BYTES", 3)
    assert cause_of(log, 0) == ""
    assert cause_of(tmp_path / "gone", 0) == ""


def test_processes_that_start_together_get_different_gpus(tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(lambda: ["0", "1"])
        assert await launcher.num_gpus() == 2
        command = (sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
        logs = [tmp_path / "a.log", tmp_path / "b.log"]
        started = await asyncio.gather(*(launcher.start(Launch(log.stem, command, log, gpus=1)) for log in logs))
        await asyncio.gather(*(process.ended for process in started))
        assert sorted(log.read_text().strip() for log in logs) == ["0", "1"]
        await launcher.close()

    asyncio.run(scenario())


@pytest.mark.anyio
async def test_a_rank_and_a_replica_share_a_gpu(tmp_path: Path) -> None:
    launcher, log = LocalLauncher(lambda: ["0", "1", "2"]), tmp_path / "a.log"

    async def gpus(name: str, beside: str) -> Sequence[str]:
        process = await launcher.start(Launch(name, ("/bin/sleep", "600"), log, gpus=1, beside=beside))
        return process.gpus

    assert await gpus("p/rank-0.1", "p/replica-") == ["0"]
    assert await gpus("p/replica-1", "p/rank-") == ["0"]
    assert await gpus("p/replica-2", "p/rank-") == ["1"]
    assert await gpus("p/rank-1.1", "p/replica-") == ["1"]
    assert await gpus("q/rank-0.1", "q/replica-") == ["2"]
    with pytest.raises(ComputeError, match="p/replica-3 needs 1 GPUs, and 0 of 3 are free"):
        await gpus("p/replica-3", "p/rank-")
    await launcher.close()


@pytest.mark.anyio
async def test_gpus_in_use_are_free_later_and_a_process_has_a_place(tmp_path: Path) -> None:
    launcher, command, log = LocalLauncher(lambda: ["0"]), ("/bin/sleep", "600"), tmp_path / "a.log"
    process = await launcher.start(Launch("a", command, log, gpus=1))
    with pytest.raises(ComputeError, match="b needs 1 GPUs, and 0 of 1 are free"):
        await launcher.start(Launch("b", command, log, gpus=1))
    with pytest.raises(ConfigError, match="b needs 2 GPUs"):
        await launcher.start(Launch("b", command, log, gpus=2))
    while not process.place:
        await asyncio.sleep(0.01)
    place = process.place
    await process.stop()
    assert process.place == place != ""
    await (await launcher.start(Launch("b", command, log, gpus=1))).stop()
    await launcher.close()
