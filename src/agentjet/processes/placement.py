"""Where processes run: `Placement` starts them, `LocalPlacement` as subprocesses of this machine.

A process ends with this one: its guardian kills it and its children when the server is gone, also after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from agentjet.errors import ComputeError, ConfigError
from agentjet.processes import guardian
from agentjet.processes.guardian import STOP_SECONDS, Launch, end_of
from agentjet.processes.rpc import Process


class Placement(Protocol):
    """Starts processes, which end with it. Two processes of one name never live at the same time."""

    async def num_gpus(self) -> int | None:
        """Returns the number of GPUs that processes can get. None if there are none: processes run on the CPU."""
        ...

    async def start(self, launch: Launch) -> Process:
        """Start a process. Raises `ConfigError` if that is impossible, and `ComputeError` if its GPUs are in use."""
        ...

    async def close(self) -> None:
        """Stop all processes. Idempotent."""
        ...


def visible_gpus() -> list[str]:
    """Returns the ids of this machine's GPUs, as in `CUDA_VISIBLE_DEVICES`, which may hide some. No torch."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        ids = [one.strip() for one in visible.split(",")]
        return [one for one in ids if one and one != "-1"]
    return [index for index, *_ in _query_gpus("index")]


def visible_gpu_memory() -> tuple[int, ...]:
    """Returns the bytes of memory of each of the `visible_gpus`. Those that nvidia-smi does not list are left out."""
    memory: dict[str, int] = {}
    for index, name, size in _query_gpus("index", "uuid", "memory.total"):
        memory |= dict.fromkeys((index, name), int(size) * 2**20)
    return tuple(memory[gpu] for gpu in visible_gpus() if gpu in memory)


def _query_gpus(*facts: str) -> list[list[str]]:
    """Returns these facts of each GPU of this machine; nothing without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(facts)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []


class LocalProcess:
    """A process of this machine."""

    def __init__(self, name: str, guardian: asyncio.subprocess.Process, gpus: Sequence[str], log_path: Path) -> None:
        """`guardian` is its parent. `gpus` are the ids of its GPUs."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.name = name
        self.gpus = gpus
        self.log_path = log_path
        self._guardian = guardian
        self._place = ""
        self._watching = asyncio.create_task(self._watch())

    @property
    def place(self) -> str:
        if not self._place and not self.ended.done():
            with contextlib.suppress(psutil.Error):  # It reads the process table, so only until the child is found.
                if children := psutil.Process(self._guardian.pid).children():
                    self._place = f"this machine, process {children[0].pid}"
        return self._place

    async def stop(self) -> None:
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        await asyncio.wait([self.ended], timeout=STOP_SECONDS)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._guardian.kill()
            await asyncio.wait([self.ended])

    async def _watch(self) -> None:
        self.ended.set_result(end_of(await self._guardian.wait(), self.log_path))


class LocalPlacement:
    """Starts subprocesses of this machine. Each GPU belongs to one process at a time, or to two that share it."""

    def __init__(self, find_gpus: Callable[[], list[str]] = visible_gpus) -> None:
        self._find_gpus = find_gpus
        self._gpus: list[str] | None = None
        """All GPUs, once known."""
        self._starting = asyncio.Lock()
        """Held from the choice of a process's GPUs until they are its own."""
        self._processes: set[LocalProcess] = set()
        """Those that have not ended."""

    async def num_gpus(self) -> int | None:
        if self._gpus is None:
            self._gpus = await asyncio.to_thread(self._find_gpus)
        return len(self._gpus) or None

    async def start(self, launch: Launch) -> LocalProcess:
        async with self._starting:
            chosen = await self._choose_gpus(launch)
            if shutil.which(launch.command[0]) is None:
                raise ConfigError(f"{launch.name}: {launch.command[0]} is not a program")
            create_log(launch.log_path)
            devices = {} if launch.shares_gpus else {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
            if devices and "CUDA_VISIBLE_DEVICES" not in os.environ:  # The numbers are those of nvidia-smi.
                devices["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            with launch.log_path.open("ab") as log:
                started = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", guardian.__file__, *launch.command),
                    stdin=asyncio.subprocess.PIPE,  # Nothing is written. It closes with this process.
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **launch.environment, **devices},
                    start_new_session=True,  # Ctrl-C is for the server.
                )
            process = LocalProcess(launch.name, started, chosen, launch.log_path)
            self._processes.add(process)
            process.ended.add_done_callback(lambda _: self._processes.discard(process))
            return process

    async def close(self) -> None:
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def _choose_gpus(self, launch: Launch) -> list[str]:
        """Returns the ids of free GPUs. Raises `ConfigError`, and `ComputeError` if they are in use at present."""
        if not launch.gpus:
            return []
        await self.num_gpus()
        users: dict[str, list[str]] = {gpu: [] for gpu in self._gpus or ()}
        for process in self._processes:
            for gpu in process.gpus:
                users[gpu].append(process.name)
        beside, number = launch.beside, launch.gpus
        shared = [gpu for gpu, names in users.items() if beside and names and all(n.startswith(beside) for n in names)]
        free = shared + [gpu for gpu, names in users.items() if not names]
        if len(free) < number:
            total = len(self._gpus or ())
            # Those of a process that is being killed become free.
            raise (ConfigError if number > total else ComputeError)(
                f"{launch.name} needs {number} GPUs, and {len(free)} of {total} are free"
            )
        return free[:number]


def create_log(path: Path) -> None:
    """Create an empty log that only this user can read, unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(0o600)
