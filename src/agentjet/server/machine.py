"""`Machine`: load and memory of the server's machine, for people. Other machines of a cluster are not measured."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time

import psutil

from agentjet.protocol import GpuView, MachineView

SECONDS = 5.0
"""Age up to which a measurement is returned again. `nvidia-smi` takes up to a second."""
TIMEOUT = 5.0
QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
MIB = 2**20


class Machine:
    """Measures at most once in `SECONDS`, in a thread."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._measured_at = 0.0
        self._view: MachineView | None = None
        psutil.cpu_percent()  # The first value is meaningless: each one covers the time since the call before.

    async def view(self) -> MachineView:
        """Returns the newest measurement."""
        async with self._lock:
            if self._view is None or time.monotonic() - self._measured_at > SECONDS:
                self._view = await asyncio.to_thread(measure)
                self._measured_at = time.monotonic()
            return self._view


def measure() -> MachineView:
    memory = psutil.virtual_memory()
    return MachineView(
        cores=psutil.cpu_count() or 1,
        cpu=psutil.cpu_percent() / 100,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        gpus=gpus(),
    )


def gpus() -> list[GpuView]:
    """Returns NVIDIA's GPUs; empty without `nvidia-smi`, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [gpu for line in done.stdout.splitlines() if (gpu := read_gpu(line)) is not None]


def read_gpu(line: str) -> GpuView | None:
    """Returns the GPU of a line of `nvidia-smi`; None if a figure is missing, such as `[N/A]`."""
    try:
        *name, load, used, total = (part.strip() for part in line.split(","))
        return GpuView(
            name=", ".join(name),
            load=float(load) / 100,
            memory_used=int(float(used) * MIB),
            memory_total=int(float(total) * MIB),
        )
    except ValueError:
        return None
