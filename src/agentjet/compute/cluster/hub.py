"""The gateway's end of the cluster's connections: each process of the cluster connects to it. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket

from agentjet.compute.channel import Channel
from agentjet.compute.cluster.link import Link, verify
from agentjet.errors import ComputeError, WorkerDied

log = logging.getLogger(__name__)


class Peer(Channel):
    """A connected process. `died` is done when its connection ended, unless this end closed it."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.name = name
        self.num_messages = 0
        """Messages received so far."""
        self.died: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()
        address = writer.get_extra_info("peername")
        self.host = str(address[0]) if address else ""
        """Address of its machine; '' if the connection ended at once."""
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self.receive()
                self.num_messages += 1
        self._finish(WorkerDied(f"the connection to {self.name} ended"))

    def close(self) -> None:
        """Close the connection, which ends the process; its requests fail. Idempotent."""
        self._task.cancel()
        self._writer.close()
        self.end(WorkerDied(f"{self.name} was ended"))

    def _finish(self, reason: WorkerDied) -> None:
        self._writer.close()
        self.end(reason)
        if not self.died.done():
            self.died.set_result(reason)


class Hub:
    """Listens for the processes of a cluster."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """`host` is the address of this machine at which the processes reach it."""
        self._host = host
        self._secret = secrets.token_hex(32)
        self._expected: dict[str, asyncio.Future[Peer]] = {}
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen on a free port. Idempotent."""
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._listener = socket.create_server((self._host, 0), family=family, backlog=1024)
            self._listener.setblocking(False)
            task = asyncio.create_task(self._accept(self._listener))
            self._tasks.add(task)

    def environment(self, name: str) -> dict[str, str]:
        """Returns the variables with which the process of that name connects."""
        assert self._listener is not None
        host = f"[{self._host}]" if ":" in self._host else self._host
        values = f"{host}:{self._listener.getsockname()[1]}", name, self._secret
        return dict(zip(Link.VARIABLES, values, strict=True))

    def expect(self, name: str) -> asyncio.Future[Peer]:
        """Returns the future connection of a process that will be started. Any other connection is refused."""
        return self._expected.setdefault(name, asyncio.get_running_loop().create_future())

    def forget(self, name: str) -> None:
        """Expect the process no longer."""
        if (future := self._expected.pop(name, None)) is not None:
            future.cancel()

    async def close(self) -> None:
        """Stop listening; connections stay. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        for name in list(self._expected):
            self.forget(name)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self._admit(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _admit(self, connection: socket.socket) -> None:
        """Verify a connection. Boundary: a stranger can end that connection only."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            name = await asyncio.to_thread(verify, connection, self._secret.encode())
            future = self._expected.pop(name, None)
            if future is None or future.done():
                raise ComputeError(f"{name!r} was refused: no process of that name is expected")
        except (ComputeError, OSError, KeyError, ValueError) as error:
            log.warning("a connection was refused: %s", error)
            connection.close()
            return
        connection.setblocking(False)
        future.set_result(Peer(name, *await asyncio.open_connection(sock=connection)))
