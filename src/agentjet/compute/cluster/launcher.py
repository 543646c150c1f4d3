"""Launchers start the processes of the cluster backend. `LocalLauncher`: subprocesses of this machine.

A process ends with its launcher: its guardian kills it and its children when the gateway is gone, also after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from agentjet.compute.cluster import guardian
from agentjet.errors import ConfigError

STOP_SECONDS = 10.0
"""Time for a guardian to kill its command. Then the guardian is killed, too."""
LOG_END_BYTES = 4096
MAX_LINE = 300
"""Characters of the log that the reason of an end quotes."""


class Launcher(Protocol):
    """Starts and ends processes by name. A name is not used twice."""

    async def free_gpus(self) -> int | None:
        """Returns the number of GPUs without a process. None if there are no GPUs: processes run on the CPU."""
        ...

    async def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, gpus: int, log_path: Path
    ) -> None:
        """Start a process with that many GPUs. `environment` is added to that of the machine.

        Raises `ConfigError` if it cannot be started.
        """
        ...

    def ended(self, name: str) -> asyncio.Future[str]:
        """Returns the future reason why a started process ended: its exit code, its log and the last line there."""
        ...

    def place(self, name: str) -> str:
        """Returns the machine and the process id of a started process; "" if unknown."""
        ...

    async def stop(self, name: str) -> None:
        """Kill a process with its children and wait for its end. Idempotent."""
        ...

    async def close(self) -> None:
        """Stop all processes. Idempotent."""
        ...


def visible_gpus() -> list[str]:
    """Returns the ids of this machine's GPUs, as in `CUDA_VISIBLE_DEVICES`, which may hide some. No torch."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        ids = [one.strip() for one in visible.split(",")]
        return [one for one in ids if one and one != "-1"]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split() if done.returncode == 0 else []


@dataclass(eq=False, slots=True)
class _Process:
    """A started process. `guardian` is its parent."""

    guardian: asyncio.subprocess.Process
    gpus: list[str]
    log_path: Path
    ended: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    watch: asyncio.Task[None] | None = None


class LocalLauncher:
    """Starts subprocesses of this machine. Each GPU belongs to one process at a time."""

    def __init__(self, find_gpus: Callable[[], list[str]] = visible_gpus) -> None:
        self._find_gpus = find_gpus
        self._gpus: list[str] | None = None
        """All GPUs, once known."""
        self._starting = asyncio.Lock()
        """Held from the choice of a process's GPUs until they are its own."""
        self._processes: dict[str, _Process] = {}

    async def free_gpus(self) -> int | None:
        if self._gpus is None:
            self._gpus = await asyncio.to_thread(self._find_gpus)
        return len(self._free()) if self._gpus else None

    async def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, gpus: int, log_path: Path
    ) -> None:
        assert name not in self._processes, f"{name} was started before"
        async with self._starting:
            await self.free_gpus()
            chosen = self._free()[:gpus]
            if len(chosen) < gpus:
                raise ConfigError(f"{name} needs {gpus} GPUs, and {len(chosen)} of {len(self._gpus or ())} are free")
            if shutil.which(command[0]) is None:
                raise ConfigError(f"{name}: {command[0]} is not a program")
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.touch(0o600)
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
            if "CUDA_VISIBLE_DEVICES" not in os.environ:  # The numbers are those of nvidia-smi.
                devices["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            with log_path.open("ab") as log:
                started = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guardian.__file__, *command),
                    stdin=asyncio.subprocess.PIPE,  # Nothing is written. It closes with this process.
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment, **devices},
                    start_new_session=True,  # Ctrl-C is for the gateway.
                )
            process = self._processes[name] = _Process(started, chosen, log_path)
            process.watch = asyncio.create_task(self._watch(process))

    def ended(self, name: str) -> asyncio.Future[str]:
        return self._processes[name].ended

    def place(self, name: str) -> str:
        process = self._processes.get(name)
        with contextlib.suppress(psutil.Error):
            children = [] if process is None else psutil.Process(process.guardian.pid).children()
            return f"this machine, process {children[0].pid}" if children else ""
        return ""

    async def stop(self, name: str) -> None:
        if (process := self._processes.get(name)) is None or process.watch is None:
            return
        if process.guardian.stdin is not None:
            process.guardian.stdin.close()
        await asyncio.wait([process.watch], timeout=STOP_SECONDS)
        if not process.watch.done():
            with contextlib.suppress(ProcessLookupError):
                process.guardian.kill()
            await asyncio.wait([process.watch])
        self._processes.pop(name, None)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(name) for name in list(self._processes)))

    def _free(self) -> list[str]:
        used = {gpu for process in self._processes.values() for gpu in process.gpus}
        return [gpu for gpu in self._gpus or () if gpu not in used]

    async def _watch(self, process: _Process) -> None:
        code = await process.guardian.wait()
        process.gpus = []
        process.ended.set_result(end_of(code, process.log_path))


def end_of(code: int, log_path: Path) -> str:
    """Returns the reason of a process that ended with this exit code of its guardian."""
    number = -code if code < 0 else code - 128
    try:
        end = f"ended by {signal.Signals(number).name}"
    except ValueError:
        end = f"ended with exit code {code}"
    line = _last_line(log_path)
    return f"{end}; see {log_path}" + (f", which ends with {line!r}" if line else "")


def _last_line(log_path: Path) -> str:
    with contextlib.suppress(OSError), log_path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_END_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
        return next((line.strip()[:MAX_LINE] for line in reversed(lines) if line.strip()), "")
    return ""
