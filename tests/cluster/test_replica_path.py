"""What Python processes of a replica get at their start.

1. An interpreter without AgentJet imports the server's copy, and nothing else of the server's environment.
2. The processes that a replica starts end with it, whoever is killed, and nothing stays in shared memory.
3. vLLM's processes make temporary files in the replica's folder, which it removes. The replica keeps its own place.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

import agentjet
from agentjet.compute import vllm as package
from agentjet.compute.samplers import REPLICA_PATH
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.errors import ConfigError
from agentjet.processes import guardian
from agentjet.types import ModelInfo
from tests.tiny import make_model

PROGRAM = """
import multiprocessing, sys

def found():
    import agentjet.types
    return agentjet.__file__

if __name__ == "__main__":
    assert not any(name.startswith("agentjet") for name in sys.modules)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(found(), pool.apply(found))
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error.name)
"""


def test_a_bare_interpreter_finds_the_servers_copy(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(REPLICA_PATH)}
    done = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", tmp_path / "program.py"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == [agentjet.__file__, agentjet.__file__, "torch"], done.stderr


FAMILY = """
import json, multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory

def worker(pids):
    segment = SharedMemory(create=True, size=100)
    print(json.dumps([*pids, os.getpid(), segment.name]), flush=True)
    time.sleep(600)

def engine(pid):
    process = multiprocessing.get_context("spawn").Process(target=worker, args=([pid, os.getpid()],))
    process.start()
    process.join()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(os.getpid(),))
    process.start()
    process.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a Linux kernel")
@pytest.mark.parametrize("killed", ["guardian", "replica", "guardian replica", "engine"])
def test_nothing_outlives_a_replica(tmp_path: Path, killed: str) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    with subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, sys.executable, tmp_path / "family.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPLICA_PATH)},
    ) as started:
        assert started.stdin is not None and started.stdout is not None and started.stderr is not None
        *pids, name = json.loads(started.stdout.readline())
        names = dict(zip(("guardian", "replica", "engine", "worker"), (started.pid, *pids), strict=True))
        processes = [psutil.Process(names[name]) for name in ("replica", "engine", "worker")]
        segment = guardian.SHARED_MEMORY / name
        assert segment.exists()
        for victim in killed.split():
            os.kill(names[victim], signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=30)
        alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in alive:
            process.kill()
        started.wait(30)
        deadline = time.monotonic() + 30
        while segment.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not alive and not segment.exists()
        assert started.stderr.read() == ""  # It would be the last line of the replica's log.


class FakeVllm:
    """vLLM's modules with the names that the engine imports. Its start notes the environment, and fails."""

    environment: dict[str, str]

    def modules(self) -> dict[str, dict[str, Any]]:
        return {
            "config": {"WeightTransferConfig": SimpleNamespace},
            "distributed": {"get_tensor_model_parallel_rank": int},
            "distributed.weight_transfer": {
                "WeightTransferEngine": dict,
                "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda name, engine: None),
            },
            "distributed.weight_transfer.base": dict.fromkeys(
                ("WeightTransferInitInfo", "WeightTransferUpdateInfo"), object
            ),
            "model_executor.model_loader.reload": dict.fromkeys(
                ("finalize_layerwise_reload", "initialize_layerwise_reload"), int
            ),
            "v1.core.sched.output": {"SchedulerOutput": object},
            "v1.core.sched.scheduler": {"Scheduler": object},
            "v1.sample.logits_processor": {"LogitsProcessor": object},
            "v1.sample.logits_processor.builtin": {"process_dict_updates": int},
            "engine.arg_utils": {"AsyncEngineArgs": self.arguments},
            "v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=self.start)},
            "platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        }

    def arguments(self, **settings: Any) -> Any:
        config = SimpleNamespace(is_hybrid=False, is_attention_free=False)
        return SimpleNamespace(create_model_config=lambda: config, **settings)

    def start(self, arguments: Any) -> Any:
        self.environment = dict(os.environ)
        raise RuntimeError("a fake has no engine")


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    fake = FakeVllm()
    for name, members in fake.modules().items():
        module = ModuleType(f"vllm.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield fake
    sys.modules.pop(f"{package.__name__}.engine", None)  # It has the fakes.
    vars(package).pop("engine", None)


def test_the_processes_of_vllm_leave_no_temporary_files(tmp_path: Path, vllm: FakeVllm) -> None:
    model, before = ModelConfig(name=str(make_model(tmp_path / "model")), device="cpu"), tempfile.gettempdir()
    tempfile.tempdir = None
    engine = importlib.import_module("agentjet.compute.vllm.engine").VllmEngine
    with pytest.raises(ConfigError, match="a fake has no engine"):
        asyncio.run(
            engine.start(model, ModelInfo("tiny", "", "", 100, (2,)), SamplerConfig(), ComputeConfig(), tmp_path)
        )
    assert vllm.environment["TMPDIR"] == str(tmp_path) != tempfile.gettempdir() == before


def test_replicas_draw_different_random_numbers(tmp_path: Path, vllm: FakeVllm) -> None:
    model, info = ModelConfig(name=str(make_model(tmp_path / "model")), device="cpu"), ModelInfo("", "", "", 100, (2,))
    settings = importlib.import_module("agentjet.compute.vllm.engine").engine_settings
    made = [settings(model, info, SamplerConfig().limits, ComputeConfig()) for _ in range(2)]
    first, second = (one.pop("seed") for one in made)
    assert first != second and made[0] == made[1]
