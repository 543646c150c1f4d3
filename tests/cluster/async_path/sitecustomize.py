"""Runs at the start of each process of a replica that schedules asynchronously on a CPU. vLLM does so on GPUs only.

vLLM then schedules the next step before it has the tokens of the last one. The order is that of a GPU; what overlaps is
not. Events and streams of CUDA do nothing here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

OWN = "agentjet/compute/vllm/replica_path"


class Patched:
    """Finds the modules of vLLM that are changed after their import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in PATCHES or (spec := PathFinder.find_spec(name, path)) is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            PATCHES[name](module)

        loader.exec_module = exec_module
        return spec


def schedule_asynchronously(cpu: Any) -> None:
    original = cpu.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        vllm_config.scheduler_config.scheduler_cls = "async_steps.AsyncShortSteps"

    cpu.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def do_without_cuda(runner: Any) -> None:
    class Nothing:
        def __init__(self, *_: object, **__: object) -> None:
            self.device = runner.torch.device("cpu")

        def record(self, *_: object) -> None:
            pass

        synchronize = wait_stream = record

    cuda = runner.torch.cuda
    cuda.Event = cuda.current_stream = Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()


PATCHES: dict[str, Callable[[Any], None]] = {
    "vllm.platforms.cpu": schedule_asynchronously,
    "vllm.v1.worker.cpu_model_runner": do_without_cuda,
}
sys.meta_path.insert(0, Patched)
folder = next(one for one in sys.path if one.endswith(OWN))
spec = spec_from_file_location("replica_site", f"{folder}/sitecustomize.py")
assert spec is not None and spec.loader is not None
spec.loader.exec_module(module_from_spec(spec))
