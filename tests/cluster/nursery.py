"""Starts fake replicas in milliseconds, for tests and for `bench.scaling.faults`: they are forked from one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from agentjet.compute.cluster.hub import Hub, Peer
from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.errors import WorkerDied
from agentjet.types import PolicyId
from tests.cluster.fake_replica import COMMAND, INFO, Hooks

POLL_SECONDS = 0.05
"""Time between two looks at a process that has not connected yet."""


class ForkServer:
    """The process that forks replicas. They end with it."""

    def __init__(self) -> None:
        environment = {**os.environ, **Hooks().environment()}
        self._process = subprocess.Popen(
            [*COMMAND, "nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def fork(self, environment: dict[str, str]) -> int:
        """Returns the process id of a new replica with this environment."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(environment).encode() + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    try:
        yield server
    finally:
        server.close()


class Nursery:
    """Starts and stops replicas, as a hub and a launcher do together."""

    def __init__(self, server: ForkServer, hub: Hub, settings: SamplerConfig) -> None:
        self.hub = hub
        self.hooks: Callable[[int], Hooks] = lambda number: Hooks()
        """Number of a replica in the order of their starts, from 1, to its hooks."""
        self.pids: dict[str, int] = {}
        """Process ids of the replicas that were started and not stopped, oldest first."""
        self.peers: dict[str, Peer] = {}
        self.num_started = 0
        self.explain: Callable[[str], str] = lambda name: ""
        """See `fleet.Explain`."""
        self.fail_start: list[Exception] = []
        """Raised by the next starts, one each."""
        self._server = server
        self._settings = settings

    async def start(self, name: str) -> Peer:
        """See `fleet.Start`."""
        self.num_started += 1
        if self.fail_start:
            raise self.fail_start.pop(0)
        peer = self.peers[name] = await self.connect(name, self.hooks(self.num_started))
        await peer.ask("load", PolicyId(), ModelConfig(), INFO, self._settings, ComputeConfig())
        return peer

    async def connect(self, name: str, hooks: Hooks) -> Peer:
        """Start a process; returns its connection, on which nothing was sent."""
        connection = self.hub.expect(name)
        pid = self.pids[name] = self._server.fork({**self.hub.environment(name), **hooks.environment()})
        while not connection.done():
            await asyncio.wait([connection], timeout=POLL_SECONDS)
            if not os.path.exists(f"/proc/{pid}"):
                raise WorkerDied(f"{name} ended before it connected")
        return connection.result()

    async def stop(self, name: str) -> str:
        """See `fleet.Stop`."""
        self.hub.forget(name)
        self.signal(name, signal.SIGKILL)
        self.pids.pop(name, None)
        if (peer := self.peers.pop(name, None)) is not None:
            peer.close()
        return "ended by SIGKILL"

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a replica, unless it ended."""
        if name in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[name], number)


@asynccontextmanager
async def nursery(server: ForkServer, settings: SamplerConfig | None = None) -> AsyncGenerator[Nursery, None]:
    """Opens a hub for replicas. At the end it stops those that are left."""
    hub = Hub()
    await hub.open()
    found = Nursery(server, hub, settings or SamplerConfig())
    try:
        yield found
    finally:
        for name in list(found.pids):
            await found.stop(name)
        await hub.close()
