"""`Supervisor`: starts processes at one place, connects them, and finds those that hang.

The watchdog counts messages: a process that computes sends a sign of work after each interval in which it worked.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agentjet.errors import ComputeError, WorkerDied
from agentjet.processes.guardian import Launch
from agentjet.processes.placement import Placement
from agentjet.processes.rpc import UNANSWERED_SECONDS, Link, Listener, Peer, Process, tune

CONNECT_SECONDS = 300.0
"""Time for a started process to connect. It imports torch or vLLM first."""
CHECKS_PER_TIMEOUT = 10


class Supervisor:
    """Starts processes, which end with this one. Two processes of one name never start at the same time."""

    def __init__(self, host: str, placement: Placement) -> None:
        """Listens on `host`, the address of this machine at which the processes reach it. Raises `OSError`."""
        self.placement = placement
        self._secret = secrets.token_hex(32)
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, asyncio.Future[socket.socket]] = {}
        self._processes: dict[str, Process] = {}
        """Those that have not ended, by name."""
        self._listener = Listener(host, self._secret.encode(), self._claim)

    async def start(self, launch: Launch, *, sign_seconds: float = 0.0) -> Peer:
        """Start a process and wait until it connects. `sign_seconds`: the interval of its signs of work, if above 0.

        Raises the errors of `Placement.start`, or `WorkerDied` if it ends before. Then no process is left.
        """
        name = launch.name
        connection = self._expected[name] = self._loop.create_future()
        variables = dict(zip(Link.VARIABLES, (self._listener.address, name, self._secret), strict=True))
        if sign_seconds:
            variables[Link.SIGNS] = str(sign_seconds)
        try:
            process = await self.placement.start(replace(launch, environment={**launch.environment, **variables}))
            self._processes[name] = process
            process.ended.add_done_callback(lambda _: self._forget(name, process))
            try:
                await first_of(connection, process.ended, timeout=CONNECT_SECONDS)
                if not connection.done():
                    late = f"did not connect for {CONNECT_SECONDS:g} s; see {launch.log_path}"
                    raise WorkerDied(f"{name} {process.ended.result() if process.ended.done() else late}")
                tune(connection.result(), unanswered_seconds=UNANSWERED_SECONDS)
                return Peer(name, *await asyncio.open_connection(sock=connection.result()), process)
            except BaseException:
                if connection.done() and not connection.cancelled():
                    connection.result().close()
                await process.stop()
                raise
        finally:
            if self._expected.get(name) is connection:
                del self._expected[name]
            connection.cancel()

    def place(self, name: str) -> str:
        """Returns the machine and the process id of a process; "" if they are unknown."""
        process = self._processes.get(name)
        return "" if process is None else process.place

    async def close(self) -> None:
        """End all processes and stop listening. Idempotent."""
        await self.placement.close()
        self._listener.close()
        for connection in self._expected.values():
            connection.cancel()

    def _claim(self, name: str) -> Callable[[socket.socket], object]:
        """See `rpc.Claim`. Removing the name is one step, so of two connections with it one is refused."""
        connection = self._expected.pop(name, None)
        if connection is None:
            raise ComputeError(f"{name!r}: no process of that name is expected")
        return lambda found: self._loop.call_soon_threadsafe(_deliver, connection, found)

    def _forget(self, name: str, process: Process) -> None:
        if self._processes.get(name) is process:
            del self._processes[name]


def _deliver(connection: asyncio.Future[socket.socket], found: socket.socket) -> None:
    if connection.done():  # Its start was cancelled.
        found.close()
    else:
        found.setblocking(False)
        connection.set_result(found)


class Watchdog:
    """Measures how long processes that have work sent nothing."""

    def __init__(self, timeout: float) -> None:
        """`timeout` in seconds."""
        self.timeout = timeout
        self.interval = timeout / CHECKS_PER_TIMEOUT
        """Seconds between two checks, and between two signs of work."""
        self._silence = 0.0
        self._num_messages = -1

    def hangs(self, elapsed: float, num_messages: int, *, has_work: bool) -> bool:
        """Check, `elapsed` seconds after the last check; True after `timeout` seconds with work and without a message.

        A late check counts as two intervals at most. It means that this process was stopped, too, so messages of that
        time may still be unread.
        """
        if not has_work or num_messages != self._num_messages:
            self._silence, self._num_messages = 0.0, num_messages
            return False
        self._silence += min(elapsed, 2 * self.interval)
        return self._silence >= self.timeout

    async def hang(self, num_messages: Callable[[], int], has_work: Callable[[], bool]) -> None:
        """Return when the processes hang."""
        now = asyncio.get_running_loop().time
        checked = now()
        while True:
            await asyncio.sleep(self.interval)
            before, checked = checked, now()
            if self.hangs(checked - before, num_messages(), has_work=has_work()):
                return


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of these is done."""
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
