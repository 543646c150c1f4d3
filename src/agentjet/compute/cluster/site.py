"""`Site`: where processes of the cluster run and how they connect. There is one for each address of a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from agentjet.compute.cluster.hub import Hub, Peer
from agentjet.compute.cluster.keeper import Launch
from agentjet.compute.cluster.launcher import Launcher, Process
from agentjet.compute.embedded.backend import COMPUTE_VARIABLES
from agentjet.errors import WorkerDied

CONNECT_SECONDS = 300.0
"""Time for a started process to connect. It imports torch or vLLM first."""
REASON_SECONDS = 2.0
"""Time for a process to end by itself whose connection ended. Then it is killed."""


class Site:
    """Starts processes, connects them, and ends them by name."""

    def __init__(self, hub: Hub, launcher: Launcher) -> None:
        self._hub = hub
        self._launcher = launcher
        self._processes: dict[str, Process] = {}
        """Those that were started and not stopped."""
        self._peers: dict[str, Peer] = {}

    async def num_gpus(self) -> int | None:
        """See `Launcher.num_gpus`."""
        return await self._launcher.num_gpus()

    async def start(self, launch: Launch) -> Peer:
        """Start a process and wait until it connects. See `Launcher.start`.

        Raises `ConfigError`, or `WorkerDied` if it ends before.
        """
        name = launch.name
        connection = self._hub.expect(name)
        try:
            environment = {**COMPUTE_VARIABLES, **launch.environment, **self._hub.environment(name)}
            process = await self._launcher.start(replace(launch, environment=environment))
            self._processes[name] = process
            await first_of(connection, process.ended, timeout=CONNECT_SECONDS)
            if connection.done():
                peer = self._peers[name] = connection.result()
                return peer
            late = f"did not connect for {CONNECT_SECONDS:g} s; see {launch.log_path}"
            raise WorkerDied(f"{name} {process.ended.result() if process.ended.done() else late}")
        finally:
            self._hub.forget(name)

    def ended(self, name: str) -> asyncio.Future[str] | None:
        """Returns the future reason of a process's end; None if it was not started, or was stopped."""
        process = self._processes.get(name)
        return None if process is None else process.ended

    def place(self, name: str) -> str:
        """Returns the machine and the process id of a process; "" if they are unknown."""
        process = self._processes.get(name)
        return "" if process is None else process.place

    async def stop(self, name: str) -> str:
        """Kill a process and wait for its end; returns the reason why it ended, or "". Idempotent."""
        process, peer = self._processes.get(name), self._peers.pop(name, None)
        if process is None:
            return ""
        if peer is not None and peer.died.done():  # It is ending by itself.
            await asyncio.wait([process.ended], timeout=REASON_SECONDS)
        await process.stop()
        self._processes.pop(name, None)
        return process.ended.result()

    async def close(self) -> None:
        """End all processes and stop listening."""
        await self._launcher.close()
        await self._hub.close()


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of these is done."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
