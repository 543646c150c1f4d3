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
from pathlib import Path

from agentjet.config import ComputeConfig, ModelConfig, SamplerConfig
from agentjet.processes.guardian import Launch, ProcessEnd
from agentjet.processes.rpc import Peer
from agentjet.processes.supervisor import Supervisor
from agentjet.types import PolicyId
from tests.cluster.fake_replica import COMMAND, INFO, Hooks

POLL_SECONDS = 0.05
"""Time between two looks at whether a process has ended."""


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


class ForkedReplica:
    """A replica, as a `Process`."""

    log_path = Path()

    def __init__(self, pid: int) -> None:
        self.place = str(pid)
        self.ended: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self.pid = pid
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._watching.cancel()
        self._end()
        await asyncio.wait([self.ended])  # Those who wait for its end know it before this returns.

    async def _watch(self) -> None:
        while not self.ended.done() and os.path.exists(f"/proc/{self.pid}"):
            await asyncio.sleep(POLL_SECONDS)
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(ProcessEnd("ended by SIGKILL"))


class Nursery:
    """A `Placement` that forks replicas, and the start of a replica with it."""

    def __init__(self, server: ForkServer, settings: SamplerConfig) -> None:
        self.hooks: Callable[[int], Hooks] = lambda number: Hooks()
        """Number of a replica in the order of their starts, from 1, to its hooks."""
        self.pids: dict[str, int] = {}
        """Process ids of the replicas that have not ended, oldest first."""
        self.num_started = 0
        self.explain: Callable[[str], str] = lambda name: ""
        """See `fleet.Explain`."""
        self.fail_start: list[Exception] = []
        """Raised by the next starts, one each."""
        self._server = server
        self._settings = settings
        self._processes: set[ForkedReplica] = set()
        self.supervisor = Supervisor("127.0.0.1", self)

    async def begin(self, name: str) -> Peer:
        """See `fleet.Start`."""
        self.num_started += 1
        if self.fail_start:
            raise self.fail_start.pop(0)
        peer = await self.connect(name, self.hooks(self.num_started))
        try:
            asked = await peer.ask("load", PolicyId(), ModelConfig(), INFO, self._settings, ComputeConfig())
            peer.address, _ = asked
        except BaseException:
            await peer.stop()
            raise
        return peer

    async def connect(self, name: str, hooks: Hooks) -> Peer:
        """Start a process; returns its connection, on which nothing was sent."""
        return await self.supervisor.start(Launch(name, (), Path(), hooks.environment()))

    async def num_gpus(self) -> int | None:
        return None

    async def start(self, launch: Launch) -> ForkedReplica:
        """See `Placement`."""
        pid = self.pids[launch.name] = self._server.fork(dict(launch.environment))
        process = ForkedReplica(pid)
        self._processes.add(process)
        process.ended.add_done_callback(lambda _: self._forget(launch.name, process))
        return process

    def _forget(self, name: str, process: ForkedReplica) -> None:
        del self.pids[name]
        self._processes.discard(process)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a replica, unless it ended."""
        if name in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[name], number)

    async def close(self) -> None:
        for process in list(self._processes):
            await process.stop()


@asynccontextmanager
async def nursery(server: ForkServer, settings: SamplerConfig | None = None) -> AsyncGenerator[Nursery, None]:
    """A place for replicas. At the end it stops those that are left."""
    found = Nursery(server, settings or SamplerConfig())
    try:
        yield found
    finally:
        await found.supervisor.close()
